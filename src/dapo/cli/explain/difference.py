"""`dapo explain RECIPE OTHER`: the keys in which two recipes, or a recipe and a preset, differ."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.table import Table

from dapo.cli.explain.tables import in_words
from dapo.config.keys import known_keys
from dapo.config.load import flatten, load_recipe_or_run, preset_names, read_preset
from dapo.config.schema import PRESET_KEYS
from dapo.config.sources import TABLES, in_schema
from dapo.console import Pipe

MISSING = object()


def difference(first: str, second: str, overrides: list[str]) -> list[tuple[str, str, str, str]]:
    """(key, first, second, meaning) where they differ; against a preset only algorithm keys are compared."""
    sides = [preset_keys(name) if is_preset(name) else recipe_keys(name, overrides) for name in (first, second)]
    place = {key: at for at, key in enumerate(known_keys())}
    either = sorted(sides[0] | sides[1], key=lambda key: (place[in_schema(key)], key))
    return [
        (key, said(sides[0], key), said(sides[1], key), meaning(key))
        for key in either
        if sides[0].get(key, MISSING) != sides[1].get(key, MISSING) and key != "preset" and is_compared(key, sides)
    ]


def is_compared(key: str, sides: list[dict[str, Any]]) -> bool:
    """A key that both have; of data.train and data.eval also what one has as a list and the other as a table."""
    return all(key in side for side in sides) or all(
        any(other.startswith("data.") for other in side) and key.startswith(TABLES) for side in sides
    )


def said(side: dict[str, Any], key: str) -> str:
    return in_words(side[key]) if key in side else ""


def meaning(key: str) -> str:
    return known_keys()[in_schema(key)].description or ""


def is_preset(name: str) -> bool:
    return name in preset_names()


def recipe_keys(name: str, overrides: list[str]) -> dict[str, Any]:
    return flatten(load_recipe_or_run(name, overrides).config.model_dump(mode="json"))


def preset_keys(name: str) -> dict[str, Any]:
    """What a preset says of every algorithm key: its own value, or the default."""
    own = flatten(read_preset(name))
    fixed = {key: None if value == "none" else value for key, value in own.items()}
    defaults = {
        key: field.default
        for key, field in known_keys().items()
        if key.startswith(PRESET_KEYS) and not field.is_required()
    }
    return defaults | fixed


def print_difference(rows: list[tuple[str, str, str, str]], first: str, second: str, as_json: bool) -> None:
    if as_json:
        found = [{"key": key, "first": a, "second": b, "meaning": meaning} for key, a, b, meaning in rows]
        typer.echo(json.dumps({"first": first, "second": second, "differences": found}, ensure_ascii=False, indent=2))
        return
    console = Pipe(highlight=False)
    if not rows:
        console.print(f"{first} and {second} are the same.")
        return
    table = Table("key", first, second, "meaning", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    console.print(table)
