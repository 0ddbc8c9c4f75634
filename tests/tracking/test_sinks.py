"""Trackers: several at once, and none of them able to stop, slow or outlive a run."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import toy

from dapo.config import load_recipe
from dapo.errors import ConfigError
from dapo.tracking import trackers as sinks
from dapo.tracking.trackers import Tracker
from dapo.trainer.loop import train
from dapo.trainer.start import start_run
from dapo.trainer.track import TrackerObserver


class Kept:
    """A sink that keeps what it gets, and does what it is told to on the way."""

    def __init__(self, *_: object) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.threads: set[str] = set()
        self.is_closed = False

    def start(self) -> None:
        self.threads.add(threading.current_thread().name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.threads.add(threading.current_thread().name)
        self.lines.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


class DiesAtStart(Kept):
    def start(self) -> None:
        raise SystemExit("no such account")  # libraries have been seen to


class DiesAtSecondLine(Kept):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.lines:
            raise ConnectionError("gone\nfor good")
        super().log(step, values)


class Hangs(Kept):
    def log(self, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002
        threading.Event().wait()  # for ever: who waits for it never comes back


def test_a_tracker_gets_every_line_in_order_on_a_thread_of_its_own():
    sink = Kept()
    tracker = Tracker("kept", sink)
    for step in range(50):
        tracker.log(step, {"accuracy": step / 50})
    assert tracker.close(120) is None
    assert sink.lines == [(step, {"accuracy": step / 50}) for step in range(50)]
    assert sink.is_closed
    assert sink.threads == {"tracker kept"}


def test_a_hanging_tracker_costs_nothing_but_its_own_lines():
    tracker = Tracker("slow", Hangs(), lines=10)
    for step in range(1000):
        tracker.log(step, {"accuracy": 0.5})
    assert tracker.dropped >= 1000 - 10 - 1  # the queue, and the line it hangs on
    message = tracker.close(0.2)
    assert message is not None
    assert "slow was too slow" in message


@pytest.mark.parametrize(
    ("sink", "why"), [(DiesAtStart(), "SystemExit"), (DiesAtSecondLine(), "ConnectionError: gone for good")]
)
def test_a_dead_tracker_says_why_once_and_takes_nothing_more(sink: Kept, why: str):
    tracker = Tracker("dead", sink)
    for step in range(5):
        tracker.log(step, {})
    tracker._thread.join(120)
    tracker.log(9, {})
    message = tracker.trouble()
    assert message is not None
    assert why in message
    assert tracker.trouble() is None
    assert tracker.close(1) is None


def test_a_run_with_three_trackers_of_which_one_dies_and_one_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = Kept()
    made = {"tensorboard": lambda *_: kept, "wandb": DiesAtStart, "trackio": Hangs}
    monkeypatch.setattr(sinks, "SINKS", made)
    monkeypatch.setattr(sinks, "find_spec", lambda _name: True)
    monkeypatch.setattr("dapo.trainer.track.CLOSE_SECONDS", 1.0)
    resolved = toy.recipe(tmp_path, 'tracking.to=["tensorboard", "wandb", "trackio"]', "train.steps=3", dtype="float32")
    run = start_run(resolved, tmp_path / "run")
    try:
        train(run)
    finally:
        run.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in kept.lines] == [1, 2, 3]
    for (_, values), line in zip(kept.lines, lines, strict=True):
        assert values == pytest.approx({name: value for name, value in line.items() if name != "step"})
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    told = [event["message"] for event in events if event["kind"] == "tracker"]
    assert any("wandb gets nothing more: SystemExit" in message for message in told)
    assert any("trackio was too slow" in message for message in told)
    assert len(told) == 2


def test_an_evaluation_is_logged_at_its_step_under_the_name_of_its_set():
    sink, observer = Kept(), TrackerObserver(())
    observer.trackers = [Tracker("kept", sink)]
    observer.on_evaluation({"step": 4, "set": "held", "avg@k": 0.5, "pass@k": 0.75, "maj@k": None, "problems": 9})
    assert observer.trackers[0].close(120) is None
    assert sink.lines == [(4, {"eval/held/avg@k": 0.5, "eval/held/pass@k": 0.75})]


def test_a_tracker_that_is_not_installed_is_refused_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sinks, "find_spec", lambda _name: None)
    resolved = toy.recipe(tmp_path, 'tracking.to=["wandb"]', dtype="float32")
    with pytest.raises(ConfigError, match=r"pip install 'dapo\[wandb\]'"):
        start_run(resolved, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_off_unless_configured_and_a_project_without_a_tracker_is_refused():
    assert load_recipe("quickstart").config.tracking.to == ()
    with pytest.raises(ConfigError, match=r"tracking\.project: has no effect"):
        load_recipe("quickstart", ["tracking.project=mine"])
    with pytest.raises(ConfigError, match=r"tracking\.project: has no effect"):
        load_recipe("quickstart", ["tracking.project=mine", 'tracking.to=["tensorboard"]'])
    with pytest.raises(ConfigError, match=r"tracking\.to"):
        load_recipe("quickstart", ['tracking.to=["neptune"]'])


@pytest.mark.parametrize("n_lines", [0, 1, 4, 5, 6, 11])
def test_border_a_tracker_that_is_late_gets_the_first_lines_and_counts_the_others(n_lines: int):
    may_start = threading.Event()

    class Late(Kept):
        def start(self) -> None:
            may_start.wait(60)

    sink = Late()
    tracker = Tracker("late", sink, lines=5)
    for step in range(n_lines):
        tracker.log(step, {})
    may_start.set()
    message = tracker.close(60)
    assert [step for step, _ in sink.lines] == list(range(min(n_lines, 5)))
    assert tracker.dropped == max(0, n_lines - 5)
    assert message == (f"late was too slow: it lacks up to {n_lines - 5} lines." if n_lines > 5 else None)
