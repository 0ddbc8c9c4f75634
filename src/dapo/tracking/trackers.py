"""Trackers that people already use, behind one interface: off unless configured, never able to stop or slow a run."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dapo.errors import ConfigError

QUEUE_LINES = 1000  # what a slow tracker may be behind before lines are dropped
MLFLOW_TAG = "dapo.run"
MLFLOW_REFUSES = re.compile(r"[^\w\-. /:]")  # in the name of a metric
CLOSE_SECONDS = 10.0  # what a run waits for its trackers at the end, all of them together


class Sink(Protocol):
    """Where the numbers of a run go. Everything is called on the sink's own thread; it may block and it may raise."""

    def start(self) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files under RUN/tensorboard; `tensorboard --logdir RUN` shows them."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.folder, self.config = folder, config

    def start(self) -> None:
        from tensorboard.summary import Writer

        self.writer = Writer(str(self.folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """A Weights & Biases run named after the run folder, continued on resume; WANDB_MODE is respected."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        self.folder, self.project, self.config = folder, project, config

    def start(self) -> None:
        import wandb

        name = self.folder.resolve().name
        self.run = wandb.init(
            project=self.project,
            name=name,
            id=name,
            resume="allow",
            dir=str(self.folder),
            config=dict(self.config),
            settings=wandb.Settings(silent=True, console="off"),  # the terminal is the run's own
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values}, step=step)

    def close(self) -> None:
        self.run.finish()


class TrackioSink:
    """A trackio run of the run folder's name; `trackio show` shows it."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        self.folder, self.project, self.config = folder, project, config

    def start(self) -> None:
        import trackio

        self.trackio = trackio
        trackio.init(project=self.project, name=self.folder.resolve().name, config=dict(self.config), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.trackio.log(dict(values), step=step)

    def close(self) -> None:
        self.trackio.finish()


class MlflowSink:
    """An MLflow run of the run folder's name, continued on resume; without MLFLOW_TRACKING_URI in RUN/mlflow.db."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        self.folder, self.project, self.config = folder, project, config

    def start(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.folder.resolve() / 'mlflow.db'}"
        self.metric, self.client = Metric, MlflowClient(tracking_uri=place)
        known = self.client.get_experiment_by_name(self.project)
        experiment = known.experiment_id if known is not None else self.client.create_experiment(self.project)
        name = self.folder.resolve().name
        own = f"tags.`{MLFLOW_TAG}` = '{searchable(name)}'"
        before = self.client.search_runs([experiment], filter_string=own, max_results=1)
        if before:
            self.run = before[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        self.run = self.client.create_run(experiment, run_name=name, tags={MLFLOW_TAG: searchable(name)}).info.run_id
        for key, value in self.config.items():
            self.client.log_param(self.run, key, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        lines = [self.metric(MLFLOW_REFUSES.sub("_", name), value, now, step) for name, value in values.items()]
        self.client.log_batch(self.run, metrics=lines)

    def close(self) -> None:
        self.client.set_terminated(self.run)


def searchable(name: str) -> str:
    """A folder's name inside the quotes of MLflow's search, which knows no escapes."""
    return re.sub(r"['\"\\]", "_", name)


class SwanLabSink:
    """A SwanLab run named after the run folder, continued on resume; SWANLAB_MODE is respected."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]) -> None:
        self.folder, self.project, self.config = folder, project, config

    def start(self) -> None:
        import swanlab

        name = self.folder.resolve().name
        self.run = swanlab.init(
            project=self.project,
            name=name,
            id=name,
            resume="allow",
            log_dir=str(self.folder / "swanlog"),
            config=dict(self.config),
            # The terminal is the run's own: nothing is asked there, and nothing is read from it.
            settings=swanlab.Settings.model_validate({"interactive": False, "terminal": {"proxy_type": "none"}}),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


SINKS: dict[str, Callable[[Path, str, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "trackio": TrackioSink,
    "mlflow": MlflowSink,
    "swanlab": SwanLabSink,
}


class Tracker:
    """A sink on a thread of its own behind a bounded queue. `log` returns at once, whatever the sink does."""

    def __init__(self, name: str, sink: Sink, *, lines: int = QUEUE_LINES) -> None:
        self.name = name
        self.dropped = 0
        self.failure = ""
        self._reported = False
        self._sink = sink
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(lines)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers, or drop and count them; a failed sink gets nothing more."""
        if self.failure:
            return
        try:
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self.dropped += 1

    def trouble(self) -> str | None:
        """Why this tracker failed, once; None while it works."""
        if not self.failure or self._reported:
            return None
        self._reported = True
        return f"{self.name} gets nothing more: {self.failure}. The run continues; its own files have everything."

    def close(self, seconds: float) -> str | None:
        """Let the sink finish within `seconds`; returns a message about the lines it has not received."""
        end = time.monotonic() + seconds
        with contextlib.suppress(queue.Full):  # still writing: it is given the time, and then left behind
            self._queue.put(None, timeout=max(0.0, seconds))
        self._thread.join(max(0.0, end - time.monotonic()))
        missed = self.dropped + (self._queue.qsize() if self._thread.is_alive() else 0)
        return f"{self.name} was too slow: it lacks up to {missed} lines." if missed and not self.failure else None

    def _work(self) -> None:
        try:
            self._sink.start()
            while (item := self._queue.get()) is not None:
                self._sink.log(*item)
            self._sink.close()
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def refuse_missing(names: tuple[str, ...]) -> None:
    """A package that is not installed is refused before the run starts."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f'tracking.to = ["{name}"]: {name} is not installed.',
                remedy=f"pip install 'dapo[{name}]', or leave it out.",
            )


def make_trackers(names: tuple[str, ...], folder: Path, project: str, config: Mapping[str, Any]) -> list[Tracker]:
    return [Tracker(name, SINKS[name](folder, project, config)) for name in names]
