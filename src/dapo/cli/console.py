"""The console that verbs print tables on."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class Pipe(Console):
    """Prints text as it is: a file, a source or a question may hold `[/b]` or `:smile:`, and neither is ours to act on.

    A reader who has seen enough (`| head`) is left to `main`, as by every other verb.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
