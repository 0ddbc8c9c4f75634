"""The real packages, where they are installed (make test-trackers installs them): what was logged can be read back."""

import importlib.util
import sqlite3
import time
from pathlib import Path

import pytest

from dapo.tracking.trackers import SINKS, Tracker

pytestmark = pytest.mark.trackers


def log_three(name: str, folder: Path) -> None:
    assert importlib.util.find_spec(name) is not None, f"{name} is not installed; make test-trackers installs it"
    tracker = Tracker(name, SINKS[name](folder, "dapo-test", {"train.lr": 1e-6}))
    for step in (1, 2, 3):
        tracker.log(step, {"accuracy": step / 10, "eval/set/avg@k": 0.5})
    assert tracker.close(120) is None
    assert tracker.failure == ""


def test_tensorboard(tmp_path: Path):
    log_three("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    read = [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors("accuracy")]
    assert read == [(step, pytest.approx(step / 10)) for step in (1, 2, 3)]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "my-run"
    folder.mkdir()
    log_three("wandb", folder)
    (log,) = folder.glob("wandb/offline-run-*-my-run/run-my-run.wandb")
    # A process of wandb's own writes the file, and `finish` does not wait for its last line (0.31).
    end = time.monotonic() + 30
    while log.read_bytes().count(b"eval/set/avg@k") < 3 and time.monotonic() < end:
        time.sleep(0.05)
    assert log.read_bytes().count(b"eval/set/avg@k") >= 3


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    log_three("trackio", tmp_path / "my-run")
    with sqlite3.connect(tmp_path / "trackio" / "dapo-test.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("my-run", step) for step in (1, 2, 3)]
    assert all("accuracy" in str(metrics) for _, _, metrics in rows)
