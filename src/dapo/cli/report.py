"""`dapo report`: runs as a page that opens offline, or a run and its responses on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dapo.errors import ConfigError


def command(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs, finished or not.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the page. Default: the run's own; for several runs, `comparison` next to it."),
    ] = None,
    phrases: Annotated[
        Path | None,
        typer.Option(help="Phrase list for emergent behaviour. Default: RUN/phrases.toml, or the shipped list."),
    ] = None,
    overlay: Annotated[
        Path | None, typer.Option(help="Curves to overlay on the run's: a CSV with metric,step,value,label.")
    ] = None,
    beside: Annotated[Path | None, typer.Option(hidden=True)] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Print to the terminal; write no page.")] = False,
    problem: Annotated[str | None, typer.Option(help="With --terminal: a problem id, or its first characters.")] = None,
    step: Annotated[int | None, typer.Option(help="With --terminal: a recorded step. Default: the latest.")] = None,
    heat: Annotated[
        str,
        typer.Option(help="With --problem: colour tokens by probability, entropy, ratio, advantage, clipped or none."),
    ] = "clipped",
) -> None:
    """Write report.html: curves, the doctor's diagnosis and a rollout browser in a page that opens offline.

    \b
    dapo report runs/first
    dapo report runs/first runs/grpo --out comparison
    dapo report runs/first --terminal --problem quickstart-0a1b
    """
    if beside is not None:
        raise ConfigError(f"--beside {beside}: has another name now.", remedy=f"Use --overlay {beside}.")
    if not terminal:
        for name, value in (("--problem", problem), ("--step", step)):
            if value is not None:
                raise ConfigError(
                    f"{name} {value}: has no effect on a page.", remedy="Add --terminal, or leave it out."
                )
        from dapo.report.page import write_page

        try:
            page = write_page(*folders, out=out, phrases=phrases, overlay=overlay)
        except OSError as error:
            where = error.filename2 or error.filename or out or folders[0]  # of a copy, filename2 is the target
            raise ConfigError(
                f"{where}: the page cannot be written: {error.strerror or error}.",
                remedy="Name a writable folder with free space: --out DIR.",
            ) from None
        typer.echo(str(page))
        return
    for name, path in (("--out", out), ("--overlay", overlay), ("--phrases", phrases)):
        if path is not None:
            raise ConfigError(
                f"{name} {path}: has no effect on the terminal.", remedy=f"Leave out {name} or --terminal."
            )
    from dapo.report.terminal import print_differences, print_run

    for folder in folders:
        print_run(folder, problem=problem, step=step, heat=heat)
    if problem is None:
        print_differences(folders)
