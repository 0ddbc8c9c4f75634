"""`dapo report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or not.")]) -> None:
    """Write RUN/report.html: curves, evaluations and responses in one page that opens offline.

    \b
    dapo report runs/first
    """
    from dapo.report.page import write_page

    typer.echo(str(write_page(folder)))
