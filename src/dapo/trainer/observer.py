"""Callbacks of a run: the terminal's, a tracker's, a user's own. Every method is optional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Observer:
    """Called by the loop as things happen; subclass what you need."""

    def on_start(self, run: Any) -> None:
        """The run is assembled, and about to start or resume."""

    def on_groups(self, known: int, wanted: int) -> None:
        """`known` of the `wanted` mixed groups of the step are certain."""

    def on_update(self, done: int, total: int) -> None:
        """`done` of the step's updates have run."""

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """A step ended."""

    def on_value_step(self, line: Mapping[str, float], total: int) -> None:
        """A step of value pretraining ended; `line` is what value.jsonl got."""

    def on_evaluation_progress(self, done: int, total: int) -> None:
        """`done` of the evaluation's responses are verified."""

    def on_evaluation(self, line: Mapping[str, Any]) -> None:
        """An evaluation ended; `line` is what eval.jsonl got."""

    def on_event(self, kind: str, message: str) -> None:
        """A warning, fault, skipped checkpoint or resume."""

    def on_end(self, run: Any) -> None:
        """The run ended, finished or interrupted."""
