"""A program for torchrun: does a list of toy runs on all ranks, one after the other, in one world.

`torchrun --nproc-per-node N tests/distributed/ranks.py FOLDER PLANS` where PLANS is JSON: a list of keyword arguments
of `do`. Importing torch takes longer than a toy run, so many share one start.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from toy import recipe_file

from dapo.checkpoints import sharded
from dapo.cli.main import leave
from dapo.config.load import load_recipe, parse_override
from dapo.config.schema import ClusterConfig
from dapo.distributed.world import ALONE, World, open_world
from dapo.rollout import shared
from dapo.trainer.loop import train
from dapo.trainer.observer import Observer
from dapo.trainer.resume import resume_run
from dapo.trainer.run import Run
from dapo.trainer.start import start_run


class Killer(Observer):
    """Kills this process, as nobody can catch, at the n-th event of a phase.

    "backward": inside of a backward pass; "save": in the background, when this rank has written its files.
    """

    def __init__(self, phase: str, n: int) -> None:
        self.phase, self.left = phase, n

    def event(self, phase: str) -> None:
        self.left -= phase == self.phase
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_start(self, run: Run) -> None:
        first = run.learner.policy.backbone.layers[0]
        first.register_forward_hook(lambda _layer, _inputs, output: self.watch(output))
        write = sharded.write_weights

        def write_and_tell(*arguments: Any) -> Any:
            written = write(*arguments)
            self.event("save")
            return written

        sharded.write_weights = write_and_tell

    def watch(self, hidden: torch.Tensor) -> None:
        if hidden.requires_grad:
            hidden.register_hook(lambda _gradient: self.event("backward"))

    def on_groups(self, known: int, wanted: int) -> None:  # noqa: ARG002
        self.event("sampling")

    def on_update(self, done: int, total: int) -> None:  # noqa: ARG002
        self.event("update")


def do(
    world: World,
    root: Path,
    *,
    name: str,
    overrides: list[str],
    dtype: str = "float64",
    family: str = "llama",
    resumes: bool = False,
    kill: tuple[int, str, int] | None = None,
    garble: tuple[int, int] | None = None,
    memory: tuple[int, int] | None = None,
    stages: bool = False,
) -> None:
    """One run under `root`, new or resumed, with the gradient of every update written beside it."""
    world.stages = stages  # type: ignore[misc]
    home = root / f"{family}-{dtype}"
    if world.is_first:
        home.mkdir(exist_ok=True)
        recipe_file(home, dtype=dtype, family=family)
    world.barrier()
    backend = "none" if world is ALONE else "torchrun"
    changes = [*overrides, f"cluster.backend={backend}"]
    observers = [Killer(*kill[1:])] if kill is not None and kill[0] == world.rank else []
    if resumes:
        run = resume_run(root / name, [parse_override(text) for text in changes], observers, world=world)
    else:
        path, keys = recipe_file(home, dtype=dtype, family=family)
        run = start_run(load_recipe(str(path), [*keys, *changes]), root / name, observers, world=world)
    try:
        if garble is not None and garble[0] == world.rank:
            send_garbage(garble[1])
        if memory is not None and memory[0] == world.rank:
            run_short_of_memory(run, memory[1])
        keep_gradients(run)
        train(run)
    finally:
        run.close()


def send_garbage(n: int) -> None:
    """From its n-th message on, this rank's responses have a token that no vocabulary has."""
    encode = shared.encode
    left = [n]

    def encode_garbage(finished: Any, logp_dtype: type) -> bytes:
        left[0] -= 1
        if left[0] <= 0:
            finished[0][1].tokens[0] = 1_000_000
        return encode(finished, logp_dtype)

    shared.encode = encode_garbage  # type: ignore[assignment]


def run_short_of_memory(run: Run, tokens: int) -> None:
    """This rank has memory for a pass over so many tokens, and for no more; NAME.shortages counts what was refused."""

    def allocate(_policy: Any, arguments: tuple[Any, ...]) -> None:
        if arguments[0].n_tokens > tokens:
            with run.folder.with_suffix(".shortages").open("a") as file:
                file.write(f"{arguments[0].n_tokens}\n")
            raise torch.OutOfMemoryError(f"Tried to allocate {arguments[0].n_tokens} tokens")

    for policy in {run.learner.policy, run.learner.whole}:
        policy.register_forward_pre_hook(allocate)


def keep_gradients(run: Run) -> None:
    """gradients/N.safetensors of the run: what the N-th update's AdamW was given."""
    optimizer, folder = run.learner.optimizer, run.folder / "gradients"
    update = optimizer.moments.update

    def keep_and_update(masters: dict[str, torch.Tensor], lr: float) -> None:
        whole = {name: optimizer.whole(name, masters[name].grad).clone() for name in masters}
        if run.world.is_first:
            folder.mkdir(exist_ok=True)
            save_file(whole, folder / f"{run.learner.updates:03d}.safetensors")
        update(masters, lr)

    optimizer.moments.update = keep_and_update  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    root, plans = Path(sys.argv[1]), json.loads(sys.argv[2])
    with open_world(ClusterConfig(backend="torchrun", timeout_s=120)) as world:
        for plan in plans:
            do(world, root, **plan)
    leave()


def one_process(root: Path, plans: list[dict[str, Any]]) -> None:
    for plan in plans:
        do(ALONE, root, **plan)


if __name__ == "__main__":
    main()
