"""Waits, the watchdog's clock, and whom it names; its beats are called by hand, so no test waits for a clock."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dapo.errors import EXIT_FAILED, WaitedTooLong
from dapo.waiting import watchdog as module
from dapo.waiting.blame import SILENT_S, holders, live
from dapo.waiting.heartbeat import (
    FOLDER,
    MOST_BYTES,
    Heartbeat,
    Waited,
    Writer,
    born,
    forget_heartbeats,
    own_identity,
    read_heartbeats,
    status_of,
    within,
    write_heartbeat,
)
from dapo.waiting.registry import NEVER, OPEN, report_progress, waiting
from dapo.waiting.watchdog import ASK_S, BEAT_S, GRACE_S, Watchdog


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the watchdog said; its process does not end."""
    said: list[str] = []
    monkeypatch.setattr(module, "say", said.append)
    return said


def dog(folder: Path, **settings: object) -> Watchdog:
    made = Watchdog(folder, limit_s=10, **settings)  # type: ignore[arg-type]
    made.end = lambda code: made.__dict__.setdefault("code", code)
    return made


def test_a_wait_beyond_its_limit_ends_the_run_by_name(tmp_path: Path, ended: list[str]):
    watched = dog(tmp_path / "run")
    with waiting("callback Mine"), waiting("standard output: whoever reads it does not"):
        watched.look(BEAT_S)  # seen first now: it counts from here
        for _ in range(5):
            watched.look(BEAT_S)
        assert ended == []  # 10 s, not more
        watched.look(BEAT_S)
    (text,) = ended
    assert text.startswith(
        "WaitedTooLong: the run has waited 12 s for standard output: whoever reads it does not; train.max_wait_s = 10."
    )
    assert f"process {os.getpid()}" in text
    assert "waits for callback Mine > standard output" in text
    assert "test_watchdog.py" in text  # the stack of the thread that waits
    assert f"resume exactly from the newest checkpoint: dapo resume {tmp_path / 'run'}" in text
    assert watched.__dict__["code"] == EXIT_FAILED
    assert OPEN == []


def test_what_moves_or_has_a_limit_of_its_own_is_never_ended(tmp_path: Path, ended: list[str]):
    watched = dog(tmp_path)
    with waiting("a server", patience=NEVER), waiting("many verdicts") as some:
        for _ in range(100):
            watched.look(BEAT_S)
            some.moved()
    assert ended == []


def test_a_long_wait_lends_its_patience_to_those_inside_and_one_without_a_limit_does_not(
    tmp_path: Path, ended: list[str]
):
    watched = dog(tmp_path)
    with waiting("a name", patience=NEVER), waiting("a checkpoint", patience=4), waiting("a file") as inner:
        assert inner.patience == 4
        for _ in range(21):
            watched.look(BEAT_S)
        assert ended == []  # 40 s
        watched.look(BEAT_S)
    assert "waited 42 s for a file; train.max_wait_s = 10, times 4." in ended[0]
    with waiting("a name", patience=NEVER), waiting("a file") as inner:
        assert inner.patience == 1


def test_the_thread_that_waits_says_that_it_moves_on(tmp_path: Path, ended: list[str]):
    watched = dog(tmp_path)
    with waiting("a pass"):
        for _ in range(20):
            watched.look(BEAT_S)
            report_progress()
    report_progress()  # nothing is waited for
    assert ended == []


def test_a_wait_that_is_over_while_it_is_looked_at_ends_nothing(tmp_path: Path, ended: list[str]):
    watched = dog(tmp_path)

    def what() -> str:
        if watched.clock == 7 * BEAT_S:
            OPEN.clear()
        return "a file"

    waiting(what).__enter__()
    for _ in range(7):
        watched.look(BEAT_S)
    assert (ended, OPEN) == ([], [])


def test_the_clock_stands_still_while_the_process_does(tmp_path: Path, ended: list[str]):
    """Ctrl-Z and fg an hour later: one beat that took an hour is a beat."""
    watched = dog(tmp_path)
    with waiting("a file"):
        watched.look(BEAT_S)
        watched.look(3600.0)
        assert ended == []
        assert watched.clock == BEAT_S + 2 * BEAT_S


def test_a_wait_that_can_be_stopped_is_told_so_and_ended_only_if_it_does_not_listen(tmp_path: Path, ended: list[str]):
    watched = dog(tmp_path)
    asked: list[float] = []

    def stacks() -> list[str]:
        asked.append(watched.clock)
        return ["process 7:", "  File x.py"]

    with waiting("3 verdicts", can_stop=True, holders=stacks) as wait:
        wait.check()
        for _ in range(7):
            watched.look(BEAT_S)
        assert ended == []
        with pytest.raises(WaitedTooLong, match=r"(?s)waited 12 s for 3 verdicts.*process 7:.*File x.py"):
            wait.check()
        for _ in range(int(GRACE_S / BEAT_S)):
            watched.look(BEAT_S)
    assert len(ended) == 1
    assert asked == [BEAT_S + ASK_S, BEAT_S + 6 * ASK_S]  # seldom: whoever is asked is interrupted


def raises(*_: object) -> str:
    raise KeyError("it went on meanwhile")


def test_an_owner_that_cannot_say_what_it_waits_for_does_not_end_the_watchdog(tmp_path: Path, ended: list[str]):
    watched = dog(tmp_path)
    with waiting(raises, holders=raises):  # type: ignore[arg-type]
        for _ in range(7):
            watched.look(BEAT_S)
    assert "the run has waited 12 s for ?; " in ended[0]


def test_a_process_ends_also_where_nobody_can_be_asked_or_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file system is stale, the store of the ranks is gone, and standard error is a pipe without a reader."""

    def broken(_: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(module, "say", broken)
    monkeypatch.setattr(module, "read_heartbeats", raises)
    watched = dog(tmp_path, announce=raises)
    with waiting("all ranks", collective=1):
        for _ in range(12):
            watched.look(BEAT_S)
    assert watched.__dict__["code"] == EXIT_FAILED


def test_a_rank_that_waits_for_others_lets_them_speak_first(tmp_path: Path, ended: list[str]):
    """Its limit is longer, and it names the rank that is not in the collective, with that one's wait."""
    watched = dog(tmp_path, rank=0, size=2)
    (tmp_path / "config.toml").touch()
    away = beat(1, [Waited("file metrics.jsonl", 9.0)], stack=["files.py:27 in append_line"], size=2)
    write_heartbeat(tmp_path, away)
    with waiting("the engine's next tick"), waiting("all ranks (sum)", collective=4):
        for _ in range(11):
            watched.look(BEAT_S)
        assert ended == []  # 20 s: 10 for the others
        watched.look(BEAT_S)
    assert "rank 0 of 2 has waited 22 s for all ranks (sum)" in ended[0]
    assert "rank 1 (process" in ended[0]
    assert "waits for file metrics.jsonl" in ended[0]
    assert "files.py:27 in append_line" in ended[0]
    assert "rank 0 (process" not in ended[0]


def test_it_speaks_before_the_collectives_own_timeout_which_names_nobody(tmp_path: Path, ended: list[str]):
    watched = dog(tmp_path, collective_limit_s=12)
    with waiting("all ranks (sum)", collective=4):
        for _ in range(8):
            watched.look(BEAT_S)
    assert "waited 14 s for all ranks (sum)" in ended[0]


# ------------------------------------------------------------------ whom everybody waits for


def beat(rank: int, waits: list[Waited], now: float | None = None, **more: object) -> Heartbeat:
    made = Heartbeat(rank, 3, **own_identity(), unix_s=time.time() if now is None else now, waits=waits)
    return replace(made, **more)  # type: ignore[arg-type]


def together(number: int) -> list[Waited]:
    return [Waited("the engine's next tick", 5.0), Waited("all ranks (exchange)", 5.0, number)]


def test_of_three_ranks_the_one_outside_of_the_collective_is_named():
    found = holders([beat(0, together(9)), beat(1, []), beat(2, together(9))])
    assert [holder.rank for holder in found] == [1]
    assert "is at work" in found[0].text


def test_else_those_that_are_behind_in_it_else_all():
    assert [h.rank for h in holders([beat(0, together(9)), beat(1, together(8)), beat(2, together(9))])] == [1]
    assert [h.rank for h in holders([beat(rank, together(9)) for rank in range(3)])] == [0, 1, 2]


def test_a_rank_without_a_heartbeat_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch):
    (found,) = holders([beat(0, together(9), 1000.0), beat(2, [], 1000.0)], 1001.0)
    assert (found.rank, found.text, found.seconds) == (1, "rank 1: has left no heartbeat", 6.0)
    with monkeypatch.context() as patch:
        patch.setattr("dapo.waiting.blame.MOST_RANKS", 2)
        assert [h.rank for h in holders([beat(rank, together(9), size=10) for rank in range(2)])] == [0, 1]
    assert len(holders([beat(0, together(9), size=10**15)])) == 8  # a number out of a file
    (found,) = holders([beat(0, together(9), 1000.0), beat(2, [], 1000.0 - SILENT_S - 1)], 1000.0)
    assert found.rank == 2  # one that was heard of and is silent now says more than a number


def test_a_silent_rank_comes_before_all_others():
    now = 1000.0
    silent = beat(2, together(9), now - SILENT_S - 1, stack=["loop.py:1 in train"])
    (found,) = holders([beat(0, together(9), now), beat(1, [Waited("file x", 9.0)], now), silent], now)
    assert found.rank == 2
    assert "has not been heard of for 11 s; then it waited for all ranks (exchange)" in found.text
    assert "the process lives, so the file system of the run's folder may block" in found.text  # nothing is written
    assert found.stack == ["loop.py:1 in train"]
    (found,) = holders([beat(0, together(9), now), beat(1, [], now), replace(silent, born=-1)], now)
    assert found.text.endswith("for 11 s; then it waited for all ranks (exchange)")  # it may have ended


def test_a_stopped_process_is_told_from_a_silent_one():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        asleep = beat(1, together(9), pid=child.pid, born=born(child.pid))
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        (found,) = holders([beat(0, together(9)), asleep, beat(2, [])])
        assert f"rank 1 (process {child.pid} on" in found.text
        assert f"is stopped by a signal since about 0 s; kill -CONT {child.pid} lets it go on" in found.text
        assert live([asleep]) == [asleep]
    finally:
        child.kill()
        child.wait()
    assert live([asleep]) == []  # gone


def test_another_process_with_its_number_is_not_the_rank():
    assert live([beat(0, [])])
    assert not live([beat(0, [], born=1)])
    assert not live([beat(0, [], ended="waited too long")])


# ------------------------------------------------------------------ heartbeats


def test_a_heartbeat_is_read_as_it_was_written(tmp_path: Path):
    (tmp_path / "config.toml").touch()
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / ".rank-0.json.tmp").symlink_to(tmp_path / "elsewhere")
    written = [beat(1, together(3)), beat(0, [], others={"checkpoint step-000001": [Waited("folder x", 1.0)]})]
    for one in written:
        write_heartbeat(tmp_path, one)
    assert read_heartbeats(tmp_path) == written[::-1]
    assert not (tmp_path / "elsewhere").exists()
    forget_heartbeats(tmp_path, keep=1)
    assert read_heartbeats(tmp_path) == [written[1]]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"rank": "x"}', '{"rank": Infinity}', "null", '{"rank": 0}', "[" * 10_000]
)
def test_what_is_no_heartbeat_is_left_out(tmp_path: Path, text: str):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank-0.json").write_text(text)
    os.mkfifo(tmp_path / FOLDER / "rank-1.json")  # reading it would block
    write_heartbeat(tmp_path, beat(2, [], stack=["x" * MOST_BYTES]))
    assert read_heartbeats(tmp_path) == []


def test_work_that_blocks_is_left_to_itself(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    assert within(0.05, lambda: (tmp_path / "pipe").read_text()) is None
    assert within(60, lambda: 3) == 3
    with pytest.raises(OSError, match="nowhere"):
        within(60, lambda: (tmp_path / "nowhere").read_text())


def test_a_started_watchdog_writes_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    (tmp_path / "config.toml").touch()
    watched = dog(tmp_path)
    watched.limit_s = 1e9
    watched.start()
    with waiting("this test"):
        while not any(one.waits for one in read_heartbeats(tmp_path)):
            pass
        (found,) = read_heartbeats(tmp_path)
    watched.stop()
    assert found.waits[0].what == "this test"
    assert any("test_watchdog.py" in line for line in found.stack)
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.timeout(300)  # fails by waiting
def test_the_first_heartbeat_is_there_as_soon_as_the_run_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank may be held up before its second look: nobody could say then which process it is."""
    monkeypatch.setattr(module, "BEAT_S", 1e6)  # no second look
    watched = dog(tmp_path)
    watched.start()
    while watched._writer is None or watched._writer.thread.ident is None:
        time.sleep(0.001)
    assert read_heartbeats(tmp_path) == []
    (tmp_path / "config.toml").touch()
    while not (found := read_heartbeats(tmp_path)):
        time.sleep(0.001)
    watched.stop()
    assert found[0].pid == os.getpid()
    assert not (tmp_path / FOLDER).exists()


def test_a_run_that_never_begins_leaves_no_folder(tmp_path: Path):
    watched = dog(tmp_path / "run")
    watched.start()
    watched.stop()
    assert not (tmp_path / "run").exists()
    writer = Writer(tmp_path)  # a folder that was there before, and is no run's yet
    writer.put(beat(0, []))
    writer.close(60)
    assert list(tmp_path.iterdir()) == []


def test_status_of_nobody():
    assert status_of(2**22 + 1) == []
    assert born(2**22 + 1) == 0
