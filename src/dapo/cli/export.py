"""`dapo export`: a run's model as a Hugging Face folder with a model card and, with --bundle, the run's record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dapo.errors import ConfigError


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder for the model.")],
    bundle: Annotated[
        bool,
        typer.Option(
            "--bundle", help="Add config, metrics, evaluations, sample rollouts, data manifest and report in DIR/run."
        ),
    ] = False,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="The checkpoint after this step instead of the newest.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The LoRA adapter alone, in peft's format, instead of the merged model.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="REPO", help="Upload it to the Hugging Face hub as USER/NAME, private."),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: everybody may see a new repository.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Export the newest intact checkpoint, or another one, as a plain Hugging Face folder with a model card.

    \b
    dapo export runs/first --out models/first
    dapo export runs/first --out models/step-40 --step 40
    dapo export runs/first --out release --bundle
    dapo export runs/lora --out adapters/first --adapter
    dapo export runs/first --out models/first --push me/first
    """
    from dapo.release.export import export_run
    from dapo.release.push import push as upload
    from dapo.release.push import refuse_name

    if public and push is None:
        raise ConfigError("--public: has no effect without --push.", remedy="Add --push USER/NAME.")
    if push is not None:
        refuse_name(push)
    exported = export_run(run, out, step=step, is_bundle=bundle, is_adapter=adapter)
    address = None if push is None else upload(exported.folder, push, is_public=public)
    if as_json:
        told = {
            "out": str(exported.folder),
            "step": exported.step,
            "skipped": list(exported.skipped),
            "pushed": address,
        }
        typer.echo(json.dumps(told))
        return
    for message in exported.skipped:
        typer.echo(message, err=True)
    what = "adapter" if adapter else "model"
    record = " and the run's record in run/" if bundle else ""
    typer.echo(f"{exported.folder}: the {what} after step {exported.step}, with its card in README.md{record}.")
    if address is not None:
        typer.echo(f"Uploaded: {address}")
