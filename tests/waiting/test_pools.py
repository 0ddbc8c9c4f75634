"""Verdicts and answers that never come: the wait is named with the worker's stack, and can be ended."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dapo.environments.conversation import Conversation
from dapo.environments.pool import EnvironmentPool
from dapo.environments.protocol import Turn
from dapo.errors import VerifierStopped, WaitedTooLong
from dapo.rewards import VerifierPool
from dapo.types import Problem, Task
from dapo.waiting.registry import OPEN

HERE = Path(__file__)


class Mute:
    """An environment that never answers."""

    def start(self, problem: Problem, seed: int) -> str:  # noqa: ARG002
        return ""

    def respond(self, text: str) -> Turn:  # noqa: ARG002
        while True:
            time.sleep(0.05)


def ended_by_a_watchdog(work: Callable[[], Any], held_in: str) -> tuple[str, list[str]]:
    """Its name and its holders, seen once they are in that function; then it is ended, as a watchdog would."""
    seen: list[tuple[str, list[str]]] = []

    def watch() -> None:
        while True:
            for wait in list(OPEN):
                stack = wait.holders() if wait.can_stop else []
                if any(f"in {held_in}" in line for line in stack):  # a worker first imports for a while
                    seen.append((str(wait), stack))
                    wait.expired = "it took too long"
                    return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    work()
    watcher.join()
    return seen[0]


def test_a_verdict_that_never_comes_is_named_and_given_up_for_all_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mark = tmp_path / "mark"
    mark.touch()
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1] / "trainer"))
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "trainer"))
    with VerifierPool("toy:sleeps_while_marked", workers=1, seconds=3000) as pool:
        tasks = [Task(text, "1", None, {"slow_while": str(mark)}) for text in ("w1w2", "w1w1")]  # asleep on both
        first, second = (pool.submit(task) for task in tasks)

        def wait() -> None:
            with pytest.raises(VerifierStopped, match="it took too long"):
                pool.wait([first])

        name, stack = ended_by_a_watchdog(wait, "sleeps_while_marked")
        assert name == "1 of 1 verdicts by toy:sleeps_while_marked"
        assert stack[0] == f"process {pool.worker_pids()[0]}:"
        assert any("toy.py" in line and "in sleeps_while_marked" in line for line in stack)
        with pytest.raises(VerifierStopped):  # at once: a step that is rolled back collects its tickets
            pool.wait([second])
    assert OPEN == []


def test_an_answer_that_never_comes_is_named_and_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent))
    monkeypatch.syspath_prepend(str(HERE.parent))
    pool = EnvironmentPool(["test_pools:Mute"], workers=1, seconds=3000)
    try:
        problem = Problem("p7", "q", "a", environment="test_pools:Mute")
        ticket = pool.ask(Conversation("p7/0/0", problem, 0, said=("hello",)))

        def wait() -> None:
            with pytest.raises(WaitedTooLong, match="it took too long"):
                pool.wait([ticket])

        name, stack = ended_by_a_watchdog(wait, "respond")
        assert name == "1 of 1 answers of test_pools:Mute, first problem p7, turn 1"
        assert any("in respond" in line for line in stack)
    finally:
        pool.close()
