"""`dapo export`: a run's model as a Hugging Face folder with a model card and, with --bundle, the run's record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder for the model.")],
    bundle: Annotated[
        bool,
        typer.Option(
            "--bundle", help="Add config, metrics, evaluations, sample rollouts, data manifest and report in DIR/run."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export the newest intact checkpoint as a plain Hugging Face folder with a model card.

    \b
    dapo export runs/first --out models/first
    dapo export runs/first --out release --bundle
    """
    from dapo.release.export import export_run

    exported = export_run(run, out, is_bundle=bundle)
    if as_json:
        typer.echo(json.dumps({"out": str(exported.folder), "step": exported.step, "skipped": list(exported.skipped)}))
        return
    for message in exported.skipped:
        typer.echo(message, err=True)
    record = " and the run's record in run/" if bundle else ""
    typer.echo(f"{exported.folder}: the model after step {exported.step}, with its card in README.md{record}.")
