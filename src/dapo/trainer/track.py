"""The configured trackers as an observer of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from dapo.config.load import flatten
from dapo.tracking.trackers import CLOSE_SECONDS, Tracker, make_trackers, refuse_missing
from dapo.trainer.observer import Observer


class TrackerObserver(Observer):
    """Logs every step and evaluation to the trackers; writes an event when one of them fails or lags."""

    def __init__(self, names: tuple[str, ...]) -> None:
        refuse_missing(names)
        self.trackers: list[Tracker] = []
        self.run: Any = None

    def on_start(self, run: Any) -> None:
        self.run = run
        config = flatten(run.config.model_dump(mode="json"))
        self.trackers = make_trackers(run.config.tracking.to, run.folder, run.config.tracking.project, config)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        self.log(int(metrics["step"]), {k: v for k, v in metrics.items() if k != "step"})

    def on_evaluation(self, line: Mapping[str, Any]) -> None:
        named = {name: line.get(name) for name in ("avg@k", "pass@k", "maj@k")}
        scores = {f"eval/{line['set']}/{name}": value for name, value in named.items() if value is not None}
        self.log(int(line["step"]), scores)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        for tracker in self.trackers:
            tracker.log(step, finite)
            if message := tracker.trouble():
                self.run.event("tracker", message)

    def on_end(self, run: Any) -> None:
        end = time.monotonic() + CLOSE_SECONDS
        for tracker in self.trackers:
            for message in (tracker.close(end - time.monotonic()), tracker.trouble()):
                if message:
                    run.event("tracker", message)
