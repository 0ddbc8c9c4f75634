"""The waits of this process: `with waiting("what for"): ...` around whatever another may delay.

Entering one costs a microsecond; the watchdog looks at the open ones from its own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from dapo.errors import WaitedTooLong

NEVER = float("inf")  # patience of a wait that has a limit of its own, or only gives another one its name

OPEN: list[waiting] = []  # of all threads, in the order in which they began


def nobody() -> list[str]:
    return []


class waiting:
    """A wait under way. `what` names the thing and its owner; as a function it is called only when somebody asks.

    `patience` multiplies the limit, also of the waits inside of this one. `collective` is the number of the collective
    operation that all ranks are in. Whoever waits in a loop that calls `check` can be stopped there; any other wait
    ends with its process. `holders`: the stacks of the processes that are waited for, a line each.
    """

    __slots__ = ("can_stop", "collective", "expired", "holders", "moves", "patience", "thread", "what")

    def __init__(
        self,
        what: str | Callable[[], str],
        *,
        patience: float = 1.0,
        collective: int | None = None,
        can_stop: bool = False,
        holders: Callable[[], list[str]] = nobody,
    ) -> None:
        self.what, self.patience, self.collective = what, patience, collective
        self.can_stop, self.holders = can_stop, holders
        self.thread, self.moves, self.expired = 0, 0, ""

    def __enter__(self) -> Self:
        self.thread = threading.get_ident()
        outer = innermost(self.thread)
        if outer is not None and outer.patience != NEVER:
            self.patience = max(self.patience, outer.patience)
        OPEN.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        OPEN.remove(self)

    def __str__(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()

    def moved(self) -> None:
        """Part of it has come: the limit counts anew."""
        self.moves += 1

    def check(self) -> None:
        """WaitedTooLong where the watchdog found this wait beyond its limit."""
        if self.expired:
            raise WaitedTooLong(self.expired, remedy="Once its cause is mended, resume: dapo resume RUN")


def innermost(thread: int) -> waiting | None:
    return next((wait for wait in reversed(OPEN[:]) if wait.thread == thread), None)


def report_progress() -> None:
    """Whatever this thread waits for, a part of it is done."""
    wait = innermost(threading.get_ident())
    if wait is not None:
        wait.moved()
