"""`dapo train`: a run from a recipe."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from dapo.cli.options.common import Fit, Set, Trust
from dapo.cli.running.fit import fitted
from dapo.cli.running.loading import loading
from dapo.config import Resolved, load_recipe
from dapo.config.load import flatten
from dapo.config.schema import ClusterConfig, Config
from dapo.data.inputs import check_inputs, check_model
from dapo.trainer.trust import agree_on_code, code_named, follows_first_rank, keys_of, refuse_strangers_recipe


def command(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe (quickstart, gsm8k-1.5b-24gb, …) or a TOML file.")],
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; must be new. Default: runs/RECIPE-TIME.")] = None,
    trust: Trust = False,
    fit: Fit = None,
) -> None:
    """Train a model from a recipe. Ctrl-C saves a checkpoint, once the updates of the step are done.

    \b
    dapo train quickstart --set train.steps=5 --out runs/first
    dapo train my-recipe.toml --set preset=grpo --set train.seed=1
    dapo train gsm8k-coder-1.5b-h200 --fit 24gb      # sizes and memory settings for a smaller card
    """
    resolved = load_recipe(recipe, set_ or [])
    if fit is not None:
        resolved = fitted(recipe, set_ or [], fit, resolved)
    if not follows_first_rank(resolved.config):
        refuse_strangers_recipe(recipe, set_ or [], trust=trust)
    run_to_end(resolved, out)


def run_to_end(resolved: Resolved, out: Path | None) -> Path:
    """Start a run and train it; say how to resume it. Missing inputs are reported before torch is loaded."""
    if is_ray_driver(resolved.config.cluster):
        return train_on_ray(resolved, out)
    if not follows_first_rank(resolved.config):
        check(resolved.config)

    with loading():
        from dapo.cli.doctor import print_verdict
        from dapo.cli.running.messages import errors_name, say_end
        from dapo.cli.running.terminal import terminal_observer
        from dapo.distributed.world import open_world
        from dapo.trainer.interrupt import watched
        from dapo.trainer.loop import train
        from dapo.trainer.start import start_run

    with open_world(resolved.config.cluster) as world, terminal_observer(is_shown=world.is_first) as view:
        agree_on_code(world, resolved.config)
        if not world.is_first:
            check(resolved.config)
        now = time.strftime("%Y%m%d-%H%M%S")
        folder = Path(world.from_first(str(out or Path("runs") / f"{resolved.name}-{now}")))
        with errors_name(folder), watched(resolved.config, folder, world):
            run = start_run(resolved, folder, [view], world=world)
            with closing(run):
                train(run)
    if not world.is_first:
        raise typer.Exit
    say_end(run, folder)
    print_verdict(folder)
    return folder


def check(config: Config) -> None:
    check_model(config)
    check_inputs(config)


def is_ray_driver(cluster: ClusterConfig) -> bool:
    """Is this the process that starts the ranks, and not one of them?"""
    return cluster.backend == "ray" and "RANK" not in os.environ


def train_on_ray(resolved: Resolved, out: Path | None) -> Path:
    """The same command on every rank, supervised; after a fault, `dapo resume`."""
    from dapo.distributed.ray_workers import supervise
    from dapo.trainer.start import refuse_existing

    folder = (out or Path("runs") / f"{resolved.name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    refuse_existing(folder)
    typed = sys.argv[1:]
    own = [] if "--out" in typed else ["--out", str(folder)]

    def command() -> list[str]:
        is_started = (folder / "config.toml").exists()
        return [
            "-m",
            "dapo",
            *(["resume", str(folder), *still_ours(folder, resolved)] if is_started else [*typed, *own]),
        ]

    supervise(resolved.config.cluster, command, folder, on_gpus=resolved.config.model.device != "cpu")
    return folder


def still_ours(folder: Path, resolved: Resolved) -> list[str]:
    """`--trust` for ranks on machines that have no record of the run, while its config names what was typed here."""
    ours = code_named(flatten(resolved.config.model_dump(mode="json")))
    return ["--trust"] if code_named(keys_of(folder / "config.toml")) == ours else []
