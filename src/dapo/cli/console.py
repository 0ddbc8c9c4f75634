"""The console that verbs print tables on."""

from __future__ import annotations

from rich.console import Console


class Pipe(Console):
    """A console that leaves a reader who has seen enough (`| head`) to `main`, as every other verb does."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
