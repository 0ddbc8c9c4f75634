"""A new run in a new folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dapo.commands import dapo_command
from dapo.config.advice import warnings_of
from dapo.config.load import Resolved, to_toml
from dapo.config.model_shapes import model_location
from dapo.config.toml_text import with_run_format
from dapo.distributed.world import ALONE, World
from dapo.errors import ConfigError
from dapo.files import replace_file
from dapo.trainer.assemble import assemble
from dapo.trainer.claim import claim, release
from dapo.trainer.observer import Observer
from dapo.trainer.run import Run
from dapo.trainer.trust import trust_run


def start_run(resolved: Resolved, folder: Path, observers: Sequence[Observer] = (), *, world: World = ALONE) -> Run:
    """Start a new run; refuses a folder that is not empty."""
    if world.is_first:
        refuse_existing(folder)
    return begin_run(resolved, folder, observers, world=world)


def refuse_existing(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: exists and is no folder.", remedy="Name a new folder.")
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "config.toml").is_file():
            raise ConfigError(f"--out {folder}: exists already, and is no run.", remedy="Name a new folder.")
        raise ConfigError(
            f"--out {folder}: exists already.",
            remedy=f"Name another folder; or resume that run: {dapo_command('resume', folder)}",
        )


def begin_run(resolved: Resolved, folder: Path, observers: Sequence[Observer] = (), *, world: World = ALONE) -> Run:
    """Start a run in a new folder, which may already hold the problems that the caller passed."""
    config = resolved.config
    world.barrier()  # the first rank has looked whether it is new
    is_new = world.is_first and not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made: {error.strerror}.", remedy="Name another folder.") from None
    if world.is_first:
        claim(folder)
    try:
        run = assemble(config, folder, model_location(config.model.path), observers, world=world)
    except BaseException:  # whatever stopped it: leave no empty folder behind
        release(folder)
        if is_new:
            folder.rmdir()
        raise
    if world.is_first:
        replace_file(folder / "config.toml", with_run_format(to_toml(config)))
        trust_run(folder, config)
    world.barrier()
    for warning in warnings_of(config):
        run.event("config", warning)
    return run
