"""A process with all its descendants: the CPU time they have used, whether any of them is at work, how they end.

Read from /proc, where a process in a namespace of its own is listed as well. Counted is what every living process (or
zombie) of the tree has used, and what the children it has waited for had used. Two things escape: a child that is gone
before it is seen, of a parent that ignores SIGCHLD and so never waits; and an orphan, unless the process at the root
adopts it (`adopt_orphans`). What escapes is bounded by the wall-clock limit alone.

Without /proc (macOS) nothing is known: `tree_seconds` is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STATE, _PARENT, _USER_TICKS, _CHILD_SYSTEM_TICKS = 0, 1, 11, 14  # in /proc/PID/stat, counted after the name


def tree_seconds(pid: int) -> float | None:
    """CPU time of the process and its descendants, to 10 ms; None where that cannot be read, or it is gone."""
    ticks = [_ticks(fields) for one in tree(pid) if (fields := _stat(f"/proc/{one}/stat")) is not None]
    return sum(ticks) / _TICKS_PER_SECOND if ticks else None


def own_seconds() -> float:
    """CPU time of this process and its descendants: living ones to 10 ms, the rest to a microsecond."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    living = sum(tree_seconds(pid) or 0.0 for pid in children(os.getpid()))
    return sum(usage.ru_utime + usage.ru_stime for usage in used) + living


def children_seconds() -> float:
    """CPU time of the children this process has waited for, and of those they had waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def is_at_work(pid: int) -> bool:
    """Whether a thread of the tree runs, is ready to (however long it has to wait for a core), or reads from a disk."""
    for one in tree(pid):
        for thread in _listed(f"/proc/{one}/task"):
            fields = _stat(f"/proc/{one}/task/{thread}/stat")
            if fields is not None and fields[_STATE] in ("R", "D"):
                return True
    return False


class Sleep:
    """How long a tree has been doing nothing. A process that is only kept from its core by others is not asleep."""

    def __init__(self, pid: int, interval: float) -> None:
        self._pid, self._most = pid, 2 * interval
        self._seen_at, self._seen_cpu = time.monotonic(), tree_seconds(pid) or 0.0
        self.seconds = 0.0

    def look(self) -> None:
        """Add the time since the last look, less what was worked in it, if no process is working now.

        A look that comes later than twice the interval adds no more than that: who looks late was kept from its core,
        as the tree may have been. Look where nothing has come from the tree: what has ended is not asleep.
        """
        now, cpu = time.monotonic(), tree_seconds(self._pid)
        if not is_at_work(self._pid):
            idle = now - self._seen_at - max(0.0, (cpu or 0.0) - self._seen_cpu)
            self.seconds += min(max(0.0, idle), self._most)
        self._seen_at, self._seen_cpu = now, cpu or 0.0


def tree(pid: int) -> list[int]:
    """The process and its descendants, parents first."""
    found = [pid]
    for one in found:
        found += children(one)
    return found


def children(pid: int) -> list[int]:
    """The living children of a process, and those it has not waited for yet."""
    threads = _listed(f"/proc/{pid}/task")
    try:
        lists = [_read(f"/proc/{pid}/task/{thread}/children") for thread in threads]
    except FileNotFoundError:  # a kernel without these lists; or it is gone, and then it is no process's parent
        return _children_by_search(pid)
    except ProcessLookupError:
        return []
    return [int(child) for text in lists for child in text.split()]


def _children_by_search(pid: int) -> list[int]:
    found = []
    for name in _listed("/proc"):
        fields = _stat(f"/proc/{name}/stat") if name.isdigit() else None
        if fields is not None and int(fields[_PARENT]) == pid:
            found.append(int(name))
    return found


def _ticks(fields: list[str]) -> int:
    return sum(int(field) for field in fields[_USER_TICKS : _CHILD_SYSTEM_TICKS + 1])


def _stat(path: str) -> list[str] | None:
    """The fields after the name, which may hold blanks and brackets itself."""
    try:
        return _read(path).rpartition(")")[2].split()
    except OSError:
        return None


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that started it ends, on Linux. Its own children are not notified."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def adopt_orphans() -> None:
    """On Linux: descendants whose parent ends become children of this process, so that they stay in its tree."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(known: set[int]) -> None:
    """Wait for adopted children that have ended; `known` are waited for by those who started them."""
    for pid in set(children(os.getpid())) - known:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
