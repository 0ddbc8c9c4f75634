"""The real packages, where they are installed (make test-trackers installs them): what was logged can be read back."""

import importlib.util
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dapo.tracking.trackers import SINKS, Tracker

pytestmark = pytest.mark.trackers


def log_three(name: str, folder: Path, steps: Sequence[int] = (1, 2, 3)) -> None:
    assert importlib.util.find_spec(name) is not None, f"{name} is not installed; make test-trackers installs it"
    tracker = Tracker(name, SINKS[name](folder, "dapo-test", {"train.lr": 1e-6}))
    for step in steps:
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
    end = time.monotonic() + 1800
    while log.read_bytes().count(b"eval/set/avg@k") < 3 and time.monotonic() < end:
        time.sleep(0.05)
    assert log.read_bytes().count(b"eval/set/avg@k") >= 3


def test_trackio_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for steps in ((1, 2), (3,)):
        log_three("trackio", tmp_path / "my-run", steps)
    with sqlite3.connect(tmp_path / "trackio" / "dapo-test.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("my-run", step) for step in (1, 2, 3)]
    assert all("accuracy" in str(metrics) for _, _, metrics in rows)


def test_mlflow_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "it's a run"
    folder.mkdir()
    for steps in ((1, 2), (3,)):
        log_three("mlflow", folder, steps)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("dapo-test")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("it's a run", "FINISHED")
    assert run.data.params == {"train.lr": "1e-06"}
    for name, values in (("accuracy", [0.1, 0.2, 0.3]), ("eval/set/avg_k", [0.5, 0.5, 0.5])):
        logged = client.get_metric_history(run.info.run_id, name)
        assert [(one.step, one.value) for one in logged] == list(zip((1, 2, 3), values, strict=True))


def test_mlflow_logs_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/theirs.db")
    log_three("mlflow", tmp_path / "my-run")
    assert (tmp_path / "theirs.db").is_file()
    assert not (tmp_path / "my-run").exists()


def test_swanlab_offline_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Offline each part is a file of its own; the id in it is what `swanlab sync` puts them together by."""
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    folder = tmp_path / "my-run"
    folder.mkdir()
    for steps in ((1, 2), (3,)):
        log_three("swanlab", folder, steps)
    logs = sorted(folder.glob("swanlog/run-*/*.swanlab"))
    assert all(b"my-run" in log.read_bytes() and b"accuracy" in log.read_bytes() for log in logs)
    assert len(logs) == 2
    assert len({log.name for log in logs}) == 1, "the same id"
    assert sum(log.read_bytes().count(b"eval/set/avg@k") for log in logs) >= len(logs)
