"""How a run stops before its end.

Ctrl-C, SIGTERM and SIGUSR1: finish the current step's updates, then write a checkpoint to resume from. What waits for
longer than train.max_wait_s is stopped by the watchdog.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

from dapo.config.schema import Config
from dapo.distributed.world import ALONE, World
from dapo.waiting.watchdog import Watchdog

# SIGUSR1 is what a batch system sends ahead of a time limit.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupted(Exception):
    """Sampling or evaluation was interrupted. The weights have not changed, so the step can be repeated."""


class Stoppable(Protocol):
    world: World
    is_stopping: bool  # this rank was asked to stop


@contextmanager
def stop_on_signals(run: Stoppable) -> Iterator[None]:
    """The first signal asks the run to stop; the second has its usual effect. Only the main thread handles signals.

    With several ranks the second one is ignored: the launcher forwards the signal that the terminal has sent already,
    and kills ranks that do not stop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def ask(number: int, _frame: FrameType | None) -> None:
        run.is_stopping = True
        if run.world.size == 1:
            signal.signal(number, before[signal.Signals(number)])

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_stop(run: Stoppable) -> None:
    """Raise Interrupted where any rank was asked to stop. Collective, so that all ranks stop at the same place."""
    if run.world.any(run.is_stopping):
        raise Interrupted


@contextmanager
def watched(config: Config, folder: Path, world: World = ALONE) -> Iterator[None]:
    """With a watchdog over everything that this rank waits for, from before its run begins."""
    watchdog = Watchdog(
        folder,
        limit_s=config.train.max_wait_s,
        rank=world.rank,
        size=world.size,
        collective_limit_s=0.9 * config.cluster.timeout_s,  # before torch's own, which names nobody
        announce=world.announce,
    )
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
