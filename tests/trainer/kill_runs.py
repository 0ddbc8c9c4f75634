"""A program: runs the toy task N times, each killed by SIGKILL at a random moment and resumed to its end.

`PYTHONPATH=tests:tests/trainer python tests/trainer/kill_runs.py FOLDER N [KEY=VALUE …]` prints one JSON line per run:
where it was killed, and whether weights and metrics are those of a run that was never killed. Each run is a forked
child: a real kill, and imports are paid once.

`RANKS=2` runs it on two ranks, replicated and sharded in turn: one of them is killed, the other ends by itself, and one
or two ranks resume. Ranks add up gradients in another order, so weights then agree within float64's rounding; the
ledger is the same to the byte.
"""

import hashlib
import json
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from toy import recipe

from dapo import files
from dapo.config.load import parse_override
from dapo.config.schema import ClusterConfig
from dapo.distributed.world import ALONE, World, open_world
from dapo.report.ledger import LEDGER, balance_of_run
from dapo.report.load import load_run
from dapo.trainer.loop import train
from dapo.trainer.observer import Observer
from dapo.trainer.resume import resume_run
from dapo.trainer.start import start_run

STEPS = 4
RANKS = int(os.environ.get("RANKS", "1"))
DTYPE = "float32" if RANKS == 1 else "float64"
CLOSE = 1e-9
PARTS = (
    "rewards.parts={short = {function = 'toy:short', weight = 0.5}, moody = {function = 'toy:moody', weight = -0.2}}"
)
MORE = {"dapo": (), "dapo-fast": (PARTS, "rewards.aggregation=normalize_then_sum")}  # carried groups have parts too


class Killer(Observer):
    """Kills its own process at the n-th event of a phase: sampling, update, or a flush while writing a checkpoint."""

    def __init__(self, phase: str, n: int) -> None:
        self.phase, self.left = phase, n
        if phase == "checkpoint":
            flush = files.sync

            def counted(path: Path) -> None:
                if "checkpoints" in path.parts:
                    self.event("checkpoint")
                flush(path)

            files.sync = counted

    def event(self, phase: str) -> None:
        self.left -= phase == self.phase
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_groups(self, known: int, wanted: int) -> None:  # noqa: ARG002
        self.event("sampling")

    def on_update(self, done: int, total: int) -> None:  # noqa: ARG002
        self.event("update")


def in_children(n: int, work: Callable[[World], None]) -> list[int]:
    """Exit statuses of `n` forked children that do `work` as the ranks of one run; negative: by which signal."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [os.fork() or as_rank(rank, n, port, work) for rank in range(n)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def as_rank(rank: int, size: int, port: int, work: Callable[[World], None]) -> int:
    """In the child, which ends here."""
    try:
        if size == 1:
            work(ALONE)
        else:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
            with open_world(ClusterConfig(backend="torchrun", timeout_s=120)) as world:
                work(world)
        os._exit(0)
    except BaseException as error:
        if not isinstance(error, SystemExit) and "lost contact" not in str(error):
            traceback.print_exc()
    os._exit(1)


def finish(
    folder: Path,
    root: Path,
    preset: str,
    world: World,
    killer: Callable[[], Observer] | None = None,
    shard: str = "none",
) -> None:
    cluster = ["cluster.backend=none"] if world is ALONE else ["cluster.backend=torchrun", f"cluster.shard={shard}"]
    changes = (f"train.steps={STEPS}", f"preset={preset}", *(sys.argv[3:] or MORE[preset]), *cluster)
    observers = [killer()] if killer else []
    if (folder / "config.toml").exists():
        run = resume_run(folder, [parse_override(key) for key in cluster], observers, world=world)
    else:
        run = start_run(recipe(root, *changes, dtype=DTYPE), folder, observers, world=world)
    train(run)
    run.close()


def fingerprint(folder: Path) -> str:
    """SHA-256 over the final weights' bytes, the ledger, which must balance, and the metrics without clock times."""
    digest = hashlib.sha256((newest_of(folder) / "model.safetensors").read_bytes())
    assert_balanced(folder)
    digest.update((folder / LEDGER).read_bytes())
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        kept = {key: value for key, value in json.loads(line).items() if not key.startswith("timing.")}
        digest.update(json.dumps(kept).encode())
    return digest.hexdigest()


def assert_balanced(folder: Path) -> None:
    run = load_run(folder)
    assert balance_of_run(folder, skips_visits=run.skips_visits, metrics=run.metrics).faults == []


def newest_of(folder: Path) -> Path:
    return sorted((folder / "checkpoints").glob("step-*"))[-1] / "model"


def is_same(folder: Path, straight: Path) -> bool:
    """On one rank to the last bit. On several: the ledger, which must balance, and weights within rounding."""
    if RANKS == 1:
        return fingerprint(folder) == fingerprint(straight)
    assert_balanced(folder)
    ours, theirs = (
        {name: tensor for file in newest_of(one).glob("*.safetensors") for name, tensor in load_file(file).items()}
        for one in (folder, straight)
    )
    is_close = all(float((ours[name] - theirs[name]).abs().max()) < CLOSE for name in theirs)
    return is_close and (folder / LEDGER).read_bytes() == (straight / LEDGER).read_bytes()


def main() -> None:
    torch.set_num_threads(1)
    root, n = Path(sys.argv[1]), int(sys.argv[2])
    choose = random.Random(0)
    presets = tuple(MORE)
    recipe(root, dtype=DTYPE)  # writes the model once, before any fork
    for preset in presets:
        assert in_children(1, lambda world, p=preset: finish(root / f"straight-{p}", root, p, world)) == [0]
    for i in range(n):
        preset = presets[i % 2]
        phase = choose.choice(["sampling", "update", "checkpoint"])
        at = choose.randint(1, {"sampling": 40, "update": 7, "checkpoint": 40}[phase])
        rank = 0 if phase == "checkpoint" else choose.randrange(RANKS)  # which writes it, where nothing is sharded
        shard = "full" if RANKS > 1 and phase != "checkpoint" and i % 4 > 1 else "none"
        folder = root / f"killed-{i}"

        def killed(world: World, f: Path = folder, p: str = preset, k: tuple = (rank, phase, at, shard)) -> None:
            finish(f, root, p, world, (lambda: Killer(*k[1:3])) if world.rank == k[0] else None, k[3])

        codes = in_children(RANKS, killed)
        resumed_by = choose.randint(1, RANKS)
        if codes[rank] == -signal.SIGKILL:
            assert (
                in_children(resumed_by, lambda world, f=folder, p=preset: finish(f, root, p, world)) == [0] * resumed_by
            )
        same = is_same(folder, root / f"straight-{preset}")
        more = {"ranks": RANKS, "killed": rank, "shard": shard, "resumed_by": resumed_by} if RANKS > 1 else {}
        line = {"preset": preset, "phase": phase, "at": at, "code": codes[rank], "is_same": same}
        print(json.dumps(line | more), flush=True)


if __name__ == "__main__":
    main()
