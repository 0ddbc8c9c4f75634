"""CPU time of a process with its descendants, read from outside."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dapo.rewards import process_tree
from dapo.rewards.process_tree import Sleep, children, own_seconds, tree, tree_seconds

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")

WORK = (
    "import os, sys, time\ndef work(s):\n    end = time.process_time() + s\n    while time.process_time() < end: pass\n"
)
REST = "print('done', flush=True)\nsys.stdin.read()\n"


@contextmanager
def started(body: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has printed a line and now waits for the end of its input."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", WORK + body], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def seconds_of(pid: int) -> float:
    seconds = tree_seconds(pid)
    assert seconds is not None
    return seconds


def test_a_process_and_the_children_it_has_waited_for():
    with started("work(0.1)\n" + REST) as alone:
        assert 0.08 <= seconds_of(alone.pid) < 0.4
    child = "pid = os.fork()\nif pid == 0:\n    work(0.3)\n    os._exit(0)\n"
    with started(child + "os.waitpid(pid, 0)\n" + REST) as parent:
        assert seconds_of(parent.pid) >= 0.27  # in ticks of 10 ms, each kind cut off
        assert tree(parent.pid) == [parent.pid]


def test_living_descendants_and_zombies():
    grandchild = (
        "if os.fork() == 0:\n    if os.fork() == 0:\n        work(0.3)\n    "
        + REST.replace("\n", "\n    ")
        + "os._exit(0)\n"
    )
    with started(grandchild + "time.sleep(600)\n") as parent:
        assert len(tree(parent.pid)) == 3
        while seconds_of(parent.pid) < 0.27:
            pass
        parent.kill()
    zombie = "if os.fork() == 0:\n    work(0.3)\n    print('done', flush=True)\n    os._exit(0)\nsys.stdin.read()\n"
    with started(zombie) as parent:
        assert seconds_of(parent.pid) >= 0.27
        assert len(tree(parent.pid)) == 2


def test_children_are_found_where_the_kernel_lists_none(monkeypatch: pytest.MonkeyPatch):
    with started(
        "if os.fork() == 0:\n    " + REST.replace("\n", "\n    ") + "\n    os._exit(0)\nsys.stdin.read()\n"
    ) as parent:
        (child,) = children(parent.pid)
        real = process_tree._read

        def without_lists(path: str) -> str:
            if path.endswith("/children"):
                raise FileNotFoundError(path)
            return real(path)

        monkeypatch.setattr(process_tree, "_read", without_lists)
        assert children(parent.pid) == [child]


def test_nothing_is_known_of_a_process_that_is_gone():
    with started(REST) as process:
        pass
    assert tree_seconds(process.pid) is None
    assert children(process.pid) == []


def test_own_seconds_hold_the_living_children():
    with started("work(0.2)\n" + REST) as child:
        before = own_seconds()
        assert before >= seconds_of(os.getpid()) - 0.05
        assert before >= seconds_of(child.pid)


def test_a_process_that_works_is_not_asleep():
    with started("print('done', flush=True)\nwork(600)") as process:
        sleep = Sleep(process.pid, 0.1)
        before = seconds_of(process.pid)
        while seconds_of(process.pid) < before + 0.2:
            sleep.look()
        process.kill()
    assert sleep.seconds < 0.1  # however long that took


def test_a_process_that_waits_is_asleep():
    with started(REST) as process:
        sleep = Sleep(process.pid, 0.1)
        while sleep.seconds < 0.2:
            sleep.look()
        assert seconds_of(process.pid) < 0.2


def test_a_late_look_adds_no_more_than_two_intervals(monkeypatch: pytest.MonkeyPatch):
    with started(REST) as process:
        sleep = Sleep(process.pid, 0.1)
        late = time.monotonic() + 60
        while process_tree.is_at_work(process.pid):  # on its way from its answer to its rest
            pass
        monkeypatch.setattr(process_tree.time, "monotonic", lambda: late)
        sleep.look()
    assert sleep.seconds == 0.2
