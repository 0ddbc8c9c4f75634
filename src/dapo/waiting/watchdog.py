"""The watchdog of a rank: says what is waited for, and ends a wait that is longer than train.max_wait_s.

It touches no file itself. Its clock stands still while the process does (Ctrl-Z, SIGSTOP, a machine that sleeps), and a
wait counts from when the watchdog saw it first, so that a busy machine ends nothing.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

from dapo.errors import EXIT_FAILED
from dapo.waiting.blame import Holder, holder_of, holders
from dapo.waiting.heartbeat import (
    Heartbeat,
    Waited,
    Writer,
    forget_heartbeat,
    forget_heartbeats,
    own_identity,
    read_heartbeats,
    within,
)
from dapo.waiting.registry import NEVER, OPEN, waiting

BEAT_S = 2.0
AFTER_OTHERS_S = 10.0  # a rank that waits for another one gives it that long to speak first
GRACE_S = 30.0  # for a wait that can be stopped to be so
ASK_S = 4.0  # after which the processes that are waited for are asked for their stacks
READ_S = 5.0  # for the heartbeats of other ranks
MOST_FRAMES = 24
T = TypeVar("T")


class Watchdog:
    """Looks at this process's waits every `BEAT_S`, in a thread of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        limit_s: float,
        rank: int = 0,
        size: int = 1,
        collective_limit_s: float = NEVER,
        announce: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self.limit_s = limit_s
        self.collective_limit_s = min(limit_s + AFTER_OTHERS_S, collective_limit_s)
        self.announce = announce
        self.thread_id = threading.get_ident()  # of the thread that trains
        self.identity = own_identity()
        self.clock = 0.0
        self.seen: dict[waiting, tuple[float, int]] = {}  # when it was seen first, and how far it had come
        self.stacks: dict[waiting, tuple[float, list[str]]] = {}  # of those that are waited for
        self.end: Callable[[int], object] = os._exit
        self._done = threading.Event()
        self._writer: Writer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.rank == 0:
            within(READ_S, lambda: forget_heartbeats(self.folder, keep=self.size))
        self._writer = Writer(self.folder)
        self._thread = threading.Thread(target=self._serve, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The run has come to its end: nothing is waited for any more, and no heartbeat is left."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        if self._writer is not None:
            self._writer.close(READ_S)
        within(READ_S, lambda: forget_heartbeat(self.folder, self.rank))

    def _serve(self) -> None:
        last = time.monotonic()
        self.look(0.0)
        while not self._done.wait(BEAT_S):
            now = time.monotonic()
            self.look(now - last)
            last = now

    def look(self, elapsed: float) -> Heartbeat:
        """One beat: count every wait, report them, and end what has waited too long."""
        self.clock += min(elapsed, 2 * BEAT_S)
        self.seen = {wait: self._since(wait) for wait in list(OPEN)}
        beat = self.heartbeat()
        if self._writer is not None:
            self._writer.put(beat)
        innermost = {wait.thread: wait for wait in self.seen}  # says most, and knows whether others are waited for
        for wait in innermost.values():
            since, _ = self.seen[wait]
            limit = wait.patience * (self.limit_s if wait.collective is None else self.collective_limit_s)
            age = self.clock - since
            if age <= limit or wait not in OPEN:
                continue
            if wait.can_stop and age <= limit + GRACE_S:
                wait.expired = wait.expired or self.message(beat, wait, age)
            else:
                self.give_up(beat, self.message(beat, wait, age))
                break
        return beat

    def _since(self, wait: waiting) -> tuple[float, int]:
        since, moves = self.seen.get(wait, (self.clock, wait.moves))
        return (since, moves) if moves == wait.moves else (self.clock, wait.moves)

    # ------------------------------------------------------------------ what is said

    def heartbeat(self) -> Heartbeat:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        mine: list[Waited] = []
        others: dict[str, list[Waited]] = {}
        for wait in self.seen:
            told = Waited(
                answer_of(wait.__str__, "?"), round(self.age(wait), 1), wait.collective, self._stacks_of(wait)
            )
            (mine if wait.thread == self.thread_id else others.setdefault(names.get(wait.thread, "?"), [])).append(told)
        self.stacks = {wait: found for wait, found in self.stacks.items() if wait in self.seen}
        stack = frames_of(sys._current_frames().get(self.thread_id))
        return Heartbeat(self.rank, self.size, **self.identity, unix_s=time.time(), waits=mine,
                         stack=stack, others=others)  # fmt: skip

    def age(self, wait: waiting) -> float:
        return self.clock - self.seen[wait][0]

    def _stacks_of(self, wait: waiting) -> list[str]:
        """Asked for once in a while: whoever answers is interrupted in its work."""
        if self.age(wait) < ASK_S:
            return []
        asked, found = self.stacks.get(wait, (-NEVER, []))
        if self.clock - asked >= 5 * ASK_S:
            self.stacks[wait] = self.clock, answer_of(wait.holders, [])
            return self.stacks[wait][1]
        return found

    def message(self, beat: Heartbeat, wait: waiting, age: float) -> str:
        """What was waited for, by whom, since when, with the stack of the one that holds it."""
        who = f"rank {self.rank} of {self.size}" if self.size > 1 else "the run"
        text = f"{who} has waited {age:.0f} s for {answer_of(wait.__str__, '?')}; {self._limit_of(wait)}."
        for holder in self.whom(beat, wait):
            text += f"\n{holder.text}" + "".join(f"\n  {line}" for line in holder.stack)
        return text

    def _limit_of(self, wait: waiting) -> str:
        return f"train.max_wait_s = {self.limit_s:g}" + (f", times {wait.patience:g}" if wait.patience != 1 else "")

    def whom(self, beat: Heartbeat, wait: waiting) -> list[Holder]:
        """The ranks that hold up a collective; else this one."""
        if wait.collective is None:
            return [holder_of(beat, beat.unix_s)]
        others = answer_of(lambda: within(READ_S, lambda: read_heartbeats(self.folder)), None) or []
        return holders([beat, *(other for other in others if other.rank != self.rank)])

    def give_up(self, beat: Heartbeat, message: str) -> None:
        """End this process, as nothing else ends what it waits in; the newest checkpoint is what remains."""
        with suppress(Exception):  # the others may be gone, and the process ends all the same
            within(2.0, lambda: self.announce(message))
        if self._writer is not None:
            self._writer.put(replace(beat, ended=message))
            self._writer.close(READ_S)
        remedy = f"Once its cause is mended, resume exactly from the newest checkpoint: dapo resume {self.folder}"
        indent = "\n" + " " * len("WaitedTooLong: ")
        with suppress(OSError):  # a pipe without a reader
            say(f"WaitedTooLong: {message}\n{remedy}".replace("\n", indent) + "\n")
        self.end(EXIT_FAILED)


def answer_of(question: Callable[[], T], otherwise: T) -> T:
    """What a folder says, or the owner of a wait, which goes on meanwhile: trouble there must not end the watchdog."""
    try:
        return question()
    except Exception:
        return otherwise


def say(text: str) -> None:
    """To standard error, unless nobody reads that either."""
    data = text.encode(errors="replace")
    while data and select.select([], [2], [], 1.0)[1]:
        data = data[os.write(2, data[: select.PIPE_BUF]) :]


def frames_of(frame: FrameType | None) -> list[str]:
    """The stack that ends in this frame, without a look at any source file; innermost last."""
    lines: list[str] = []
    while frame is not None and len(lines) < MOST_FRAMES:
        code = frame.f_code
        lines.append(f"{'/'.join(code.co_filename.split('/')[-3:])}:{frame.f_lineno} in {code.co_qualname}")
        frame = frame.f_back
    return lines[::-1]
