"""`dapo quickstart`: train the bundled toy model with DAPO on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from dapo.cli.options.common import Set
from dapo.config import load_recipe
from dapo.config.load import nearest_recipe
from dapo.files import read_lines


def command(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; must be new. Default: runs/quickstart-TIME.")
    ] = None,
    set_: Set = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
) -> None:
    """Train the bundled toy model on its task and show it learning: minutes on a laptop, nothing to download.

    \b
    dapo quickstart
    dapo quickstart --set preset=grpo-naive --out runs/naive
    """
    from dapo.cli.train import run_to_end
    from dapo.report.page import write_page

    start = time.monotonic()
    resolved = load_recipe("quickstart", [*(set_ or []), f"model.device={device}"])
    folder = run_to_end(resolved, out)
    lines = list(read_lines(folder / "eval.jsonl"))
    if lines:
        first, last = lines[0], lines[-1]
        typer.echo(
            f"avg@{last['k']} on held-out problems: {first['avg@k']:.3f} before, {last['avg@k']:.3f} after "
            f"{last['step']} steps, {time.monotonic() - start:.0f} s."
        )
    typer.echo(f"Report: {write_page(folder)}")
    typer.echo(next_command())


def next_command() -> str:
    nearest = nearest_recipe()
    if nearest == "quickstart":
        return "Next, to compare with naive GRPO: dapo quickstart --set preset=grpo-naive --out runs/naive"
    return f"Next, a real model on this machine: dapo explain {nearest}"
