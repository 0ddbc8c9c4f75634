"""The console that verbs print on, and the tables of figures that benchmarks print."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


class Pipe(Console):
    """Prints text as it is: a file, a source or a question may hold `[/b]` or `:smile:`, and neither is ours to act on.

    A reader who has seen enough (`| head`) is left to `main`, as by every other verb.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def wide_console() -> Pipe:
    """For tables of many columns: a file has no edge, so rows stay whole in one."""
    console = Pipe(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 180
    return console


def table_of(*names: str, figures: slice) -> Table:
    """Columns of these names without a frame; those with figures are aligned to the right."""
    table = Table(*names, box=None)
    for column in table.columns[figures]:
        column.justify = "right"
    return table
