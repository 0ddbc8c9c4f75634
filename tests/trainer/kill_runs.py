"""A program: runs the toy task N times, each killed by SIGKILL at a random moment and resumed to its end.

`PYTHONPATH=tests:tests/trainer python tests/trainer/kill_runs.py FOLDER N [KEY=VALUE …]` prints one JSON line per run:
where it was killed, and whether weights and metrics are those of a run that was never killed. Each run is a forked
child: a real kill, and imports are paid once.
"""

import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import torch
from toy import recipe

from dapo import files
from dapo.report.ledger import LEDGER, balance_of_run
from dapo.report.load import load_run
from dapo.trainer.loop import train
from dapo.trainer.observer import Observer
from dapo.trainer.resume import resume_run
from dapo.trainer.start import start_run

STEPS = 4
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


def in_child(work: object) -> int:
    """Exit status of a forked child that does `work`; negative: the signal that ended it."""
    child = os.fork()
    if child == 0:
        work()  # type: ignore[operator]
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def finish(folder: Path, root: Path, preset: str, killer: Observer | None) -> None:
    changes = (f"train.steps={STEPS}", f"preset={preset}", *(sys.argv[3:] or MORE[preset]))
    observers = [killer] if killer else []
    if (folder / "config.toml").exists():
        run = resume_run(folder, observers=observers)
    else:
        run = start_run(recipe(root, *changes, dtype="float32"), folder, observers)
    train(run)
    run.close()


def fingerprint(folder: Path) -> str:
    """SHA-256 over the final weights' bytes, the ledger, which must balance, and the metrics without clock times."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    digest = hashlib.sha256((newest / "model" / "model.safetensors").read_bytes())
    assert balance_of_run(folder, skips_visits=load_run(folder).skips_visits).faults == []
    digest.update((folder / LEDGER).read_bytes())
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        kept = {key: value for key, value in json.loads(line).items() if not key.startswith("timing.")}
        digest.update(json.dumps(kept).encode())
    return digest.hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    root, n = Path(sys.argv[1]), int(sys.argv[2])
    choose = random.Random(0)
    presets = tuple(MORE)
    wanted = {}
    for preset in presets:
        recipe(root)  # writes the model once, before any fork
        assert in_child(lambda p=preset: finish(root / f"straight-{p}", root, p, None)) == 0
        wanted[preset] = fingerprint(root / f"straight-{preset}")
    for i in range(n):
        preset = presets[i % 2]
        phase = choose.choice(["sampling", "update", "checkpoint"])
        at = choose.randint(1, {"sampling": 40, "update": 7, "checkpoint": 40}[phase])
        folder = root / f"killed-{i}"
        code = in_child(lambda f=folder, p=preset, w=phase, a=at: finish(f, root, p, Killer(w, a)))
        if code == -signal.SIGKILL:
            assert in_child(lambda f=folder, p=preset: finish(f, root, p, None)) == 0
        same = fingerprint(folder) == wanted[preset]
        print(json.dumps({"preset": preset, "phase": phase, "at": at, "code": code, "is_same": same}), flush=True)


if __name__ == "__main__":
    main()
