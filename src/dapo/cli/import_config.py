"""`dapo import-config`: turn a config of verl, TRL or OpenRLHF into a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dapo.commands import dapo_command
from dapo.errors import ConfigError, DiskError
from dapo.peers.settings import Remark, Translation
from dapo.peers.translate import PEERS, check, recipe_text, translate

MOST = 10**12  # GPUs or rows; a larger number is a typing error, and too large a one overflows a float


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A verl or OpenRLHF script, a TRL file, YAML or JSON.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.toml", help="Write the recipe here; must be new.")] = None,
    peer: Annotated[str | None, typer.Option(help="verl, trl or openrlhf; default: auto-detected.")] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Number of GPUs, since TRL's batch sizes are per device. Default: 1."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Rows of the training file, to turn epochs into steps.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn another framework's config into a recipe; list what is not carried over and what differs in meaning.

    Nothing in the file is executed: shell variables are substituted as text, and only Python literals are read.

    \b
    dapo import-config run_dapo.sh --out mine.toml
    dapo import-config grpo.py --gpus 4 --rows 7473 > mine.toml
    """
    if peer is not None and peer not in PEERS:
        raise ConfigError(f"--peer {peer}: unknown framework.", remedy=f"Use one of: {', '.join(PEERS)}.")
    refuse_existing(out)
    found = translate(file, peer=peer, gpus=gpus, rows=rows)
    resolved = check(found, file.stem)
    text = recipe_text(found, file.name)
    if out is not None:
        write_new(out, text)
    if as_json:
        typer.echo(
            json.dumps(as_data(found, text, out) | {"unused": dict(resolved.unused)}, ensure_ascii=False, indent=2)
        )
        return
    if out is None:
        typer.echo(text, nl=False)
        return
    for title, remarks in found.lists():
        typer.echo(f"{title}:", err=True)
        for remark in remarks:
            typer.echo(f"  {remark.setting}: {remark.why}", err=True)
    typer.echo(f"{out}: {len(found.keys)} keys from {found.peer}. Next: {dapo_command('explain', out)}")


def as_data(found: Translation, text: str, out: Path | None) -> dict[str, object]:
    def listed(remarks: list[Remark]) -> list[dict[str, str]]:
        return [{"setting": one.setting, "why": one.why, "changes": one.weight.name.lower()} for one in remarks]

    return {
        "peer": found.peer,
        "out": str(out) if out is not None else None,
        "keys": found.keys,
        "origin": found.origin,
        "differs": listed(found.differs),
        "no_counterpart": listed(sorted(found.missing, key=lambda remark: remark.weight)),
        "recipe": text,
    }


def refuse_existing(out: Path | None) -> None:
    if out is not None and out.suffix != ".toml":
        raise ConfigError(f"--out {out}: a recipe is a TOML file.", remedy=f"Use --out {out}.toml.")
    try:
        is_there = out is not None and (out.exists() or out.is_symlink())
    except OSError as error:  # a folder without read permission, a name that is too long
        raise not_written(f"{out}: cannot be written: {error.strerror}.") from None
    if is_there:
        raise ConfigError(f"--out {out}: exists already.", remedy="Name a new file.")


def write_new(out: Path, text: str) -> None:
    """Write the file atomically."""
    from dapo.files import replace_file

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, text)
    except DiskError as error:
        raise not_written(error.message) from None
    except OSError as error:
        raise not_written(f"{out}: cannot be written: {error.strerror}.") from None


def not_written(why: str) -> ConfigError:
    return ConfigError(f"--out {why}", remedy="Name a file in a folder that can be written to and has space.")
