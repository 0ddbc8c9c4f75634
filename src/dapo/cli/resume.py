"""`dapo resume`: resume a run that was stopped or killed."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from dapo.cli.options.common import Trust
from dapo.cli.running.loading import loading
from dapo.cli.train import is_ray_driver
from dapo.config.load import load_recipe, parse_override
from dapo.data.inputs import check_inputs
from dapo.trainer.trust import agree_on_code, follows_first_rank, refuse_strangers_run


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key that does not affect learning: train.steps=200."
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Resume a run from its newest intact checkpoint, exactly as if it had never stopped.

    \b
    dapo resume runs/first
    dapo resume runs/first --set train.steps=200
    """
    check_early(folder, set_ or [], trust=trust)

    with loading():
        from dapo.cli.doctor import print_verdict
        from dapo.cli.running.messages import errors_name, say_end
        from dapo.cli.running.terminal import terminal_observer
        from dapo.distributed.world import open_world
        from dapo.trainer.interrupt import watched
        from dapo.trainer.loop import train
        from dapo.trainer.resume import read_run_config, resume_run

    changes = [parse_override(text) for text in set_ or []]
    config = read_run_config(folder, changes)
    if is_ray_driver(config.cluster):
        from dapo.distributed.ray_workers import supervise

        typed = sys.argv[1:]
        command = ["-m", "dapo", *typed, *([] if "--trust" in typed else ["--trust"])]  # checked here, for all ranks
        supervise(config.cluster, lambda: command, folder.absolute(), on_gpus=config.model.device != "cpu")
        return
    with (
        errors_name(folder),
        open_world(config.cluster) as world,
        terminal_observer(is_shown=world.is_first) as view,
    ):
        agree_on_code(world, config)
        if not world.is_first:
            check_inputs(config)
        with watched(config, folder, world):
            run = resume_run(folder, changes, [view], world=world)
            with closing(run):
                train(run)
    if not world.is_first:
        raise typer.Exit
    say_end(run, folder)
    print_verdict(folder)


def check_early(folder: Path, changes: list[str], *, trust: bool = False) -> None:
    """Check before torch is loaded, on the first rank: who made the run, and that its inputs are still there."""
    if os.path.isfile(folder / "config.toml"):
        config = load_recipe(str(folder / "config.toml"), changes).config
        if follows_first_rank(config):
            return
        refuse_strangers_run(folder, changes, trust=trust)
        if not is_ray_driver(config.cluster):
            check_inputs(config)
