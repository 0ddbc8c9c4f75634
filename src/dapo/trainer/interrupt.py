"""Ctrl-C and SIGTERM: the update in progress is finished, a checkpoint is written, and the run says how to go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """Sampling or evaluation was cut short; nothing of it has touched the weights, so the step can be repeated."""


class Stoppable(Protocol):
    is_stopping: bool


@contextmanager
def stop_on_signals(run: Stoppable) -> Iterator[None]:
    """The first signal asks the run to stop; the second one is obeyed as usual. In a thread signals are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(number: int, _frame: FrameType | None) -> None:
        run.is_stopping = True
        signal.signal(number, before[signal.Signals(number)])

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_stop(run: Stoppable) -> None:
    """Called where stopping is safe."""
    if run.is_stopping:
        raise Interrupted
