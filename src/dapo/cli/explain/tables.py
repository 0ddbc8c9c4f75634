"""How `dapo explain` writes values and small tables."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_table(console: Console, title: str | None, rows: list[tuple[str, str]], *, escaped: bool = True) -> None:
    table = Table(box=None, show_header=False, title=title, title_justify="left", padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(name, escape(value) if escaped else value)
    console.print(table)
    console.print()


def in_words(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    return ", ".join(str(inner) for inner in value) if isinstance(value, list | tuple) else str(value)
