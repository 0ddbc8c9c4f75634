"""A run shown in a notebook's cell as it goes. IPython is there or it is not: nothing depends on it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo.report.load import load_run
from dapo.report.summary import html_of, shown
from dapo.trainer.observer import Observer
from dapo.trainer.run import Run

REDRAW_SECONDS = 0.5
SHOWN_EVENTS = 5


def is_notebook() -> bool:
    """Whether this process is a notebook's kernel, which can show HTML; a terminal's IPython cannot."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookView(Observer):
    """Progress, small curves, the table so far and the last events, redrawn in place."""

    def __init__(self) -> None:
        from IPython.display import HTML, display  # type: ignore[import-not-found, unused-ignore]

        self._html: Any = HTML
        self._handle: Any = display(HTML("<i>starting …</i>"), display_id=True)
        self._folder = Path()
        self._total = self._done = 0
        self._phase = ""
        self._summary = ""
        self._events: list[str] = []
        self._drawn = 0.0

    def on_start(self, run: Run) -> None:
        self._folder, self._total, self._done = run.folder, run.config.train.steps, run.step
        self._show("model loaded")

    def on_groups(self, known: int, wanted: int) -> None:
        self._show(f"rollout {known} of {wanted} groups")

    def on_update(self, done: int, total: int) -> None:
        self._show(f"update {done} of {total}")

    def on_evaluation_progress(self, done: int, total: int) -> None:
        self._show(f"evaluation {done} of {total} responses")

    def on_value_step(self, line: Mapping[str, float], total: int) -> None:
        self._show(f"value pretraining {int(line['step'])} of {total}")

    def on_step(self, metrics: Mapping[str, float]) -> None:
        self._done = int(metrics["step"])
        self._summarise()

    def on_evaluation(self, line: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._summarise()

    def on_event(self, kind: str, message: str) -> None:
        self._events = [*self._events, f"{kind}: {message}"][-SHOWN_EVENTS:]
        self._draw()

    def on_end(self, run: Run) -> None:
        self._done = run.step
        self._phase = "finished" if run.is_complete else "stopped, a checkpoint is kept"
        self._summarise(is_last=True)

    def _show(self, phase: str) -> None:
        self._phase = phase
        if time.monotonic() - self._drawn > REDRAW_SECONDS:
            self._draw()

    def _summarise(self, *, is_last: bool = False) -> None:
        """Read again what the run has written; seldom enough not to slow down steps of some milliseconds."""
        if is_last or not self._summary or time.monotonic() - self._drawn > REDRAW_SECONDS:
            self._summary = html_of(load_run(self._folder))
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        events = "".join(f'<div style="opacity:.7">{shown(event)}</div>' for event in self._events)
        self._handle.update(
            self._html(
                f'<progress value="{self._done}" max="{max(1, self._total)}"></progress> '
                f"step {self._done} of {self._total} · {shown(self._phase)}{self._summary}{events}"
            )
        )
