"""What `dapo train` and `dapo resume` print when a run ends, however it ends: always with the run's own name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import typer

from dapo.commands import dapo_command, name_run
from dapo.config.schema import Config
from dapo.errors import DapoError, out_of_memory


class EndedRun(Protocol):
    step: int
    config: Config

    @property
    def is_complete(self) -> bool: ...


def say_end(run: EndedRun, folder: Path) -> None:
    """At the end of a run, or where a signal has stopped it."""
    if not run.is_complete:
        typer.echo(
            f"Stopped after step {run.step} of {run.config.train.steps}. Resume: {dapo_command('resume', folder)}"
        )
        return
    typer.echo(f"Done: {run.step} steps in {folder}.")
    typer.echo(f"  Evaluate: {dapo_command('eval', '--model', folder, '--data', 'FILE')}")
    typer.echo(f"  Report: {dapo_command('report', folder)}")
    typer.echo(f"  Export: {dapo_command('export', folder, '--out', 'DIR')}")


@contextmanager
def errors_name(folder: Path) -> Iterator[None]:
    """Put the run's folder into errors that say `dapo resume RUN`, and print that command after a second Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / "config.toml").is_file():
            typer.echo(f"Resume: {dapo_command('resume', folder)}", err=True)
        raise
    except (DapoError, RuntimeError) as error:
        known = error if isinstance(error, DapoError) else out_of_memory(error)
        if known is None:
            raise
        raise type(known)(known.message, remedy=name_run(known.remedy, folder)) from error
