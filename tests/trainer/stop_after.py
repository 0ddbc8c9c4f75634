"""A run that is asked to stop in the middle of a step."""

from typing import Any

from dapo.trainer.observer import Observer


class StopAfter(Observer):
    """Asks the run to stop in the middle of the second step's sampling."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def on_start(self, run: Any) -> None:
        self.run = run

    def on_groups(self, known: int, wanted: int) -> None:  # noqa: ARG002
        self.calls -= self.run.step == 1
        if self.calls == 0:
            self.run.is_stopping = True
