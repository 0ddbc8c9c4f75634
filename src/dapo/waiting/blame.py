"""Whom a run waits for, told from the heartbeats of its ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from dapo.waiting.heartbeat import Heartbeat, Waited, born, status_of, this_host

SILENT_S = 10.0  # without a heartbeat, after which a rank is not heard of any more
FOREIGN_S = 120.0  # the same, after which a rank on another machine is taken for ended
STOPPED = ("T", "t")
MOST_RANKS = 4096  # that are looked for: the number comes from a file, which may be anybody's
MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank that the others, or the user, wait for: what it does, and where."""

    rank: int
    text: str
    seconds: float
    stack: list[str]


def live(beats: Sequence[Heartbeat], now: float | None = None) -> list[Heartbeat]:
    """Those whose process is still there; of other machines, those heard of lately."""
    now = time.time() if now is None else now
    return [beat for beat in beats if is_live(beat, now)]


def is_live(beat: Heartbeat, now: float) -> bool:
    if beat.ended:
        return False
    if beat.host == this_host():
        return bool(status_of(beat.pid)) and born(beat.pid) == beat.born
    return now - beat.unix_s < FOREIGN_S


def holders(beats: Sequence[Heartbeat], now: float | None = None) -> list[Holder]:
    """The ranks that everybody waits for: those that are not themselves waiting for others.

    One that is stopped or silent, or of which there is no heartbeat; else those outside of the collective that the
    others are in, or behind in it.
    """
    now = time.time() if now is None else now
    size = min(max(beat.size for beat in beats), MOST_RANKS)
    missing = sorted(set(range(size)) - {beat.rank for beat in beats})[:MOST_NAMED]
    deaf = [beat for beat in beats if is_stopped(beat) or now - beat.unix_s > SILENT_S]
    outside = [beat for beat in beats if beat.waits == [] or beat.waits[-1].collective is None]
    numbers = {beat.rank: beat.waits[-1].collective or 0 for beat in beats if beat not in outside}
    behind = [beat for beat in beats if beat.rank in numbers and numbers[beat.rank] < max(numbers.values())]
    if missing and not deaf:
        longest = max(beat.waits[-1].seconds + now - beat.unix_s if beat.waits else 0.0 for beat in beats)
        return [Holder(rank, f"rank {rank}: has left no heartbeat", longest, []) for rank in missing]
    return [holder_of(beat, now) for beat in deaf or outside or behind or beats]


def holder_of(beat: Heartbeat, now: float) -> Holder:
    ago = now - beat.unix_s
    who = f"rank {beat.rank} (process {beat.pid} on {beat.host})"
    wait = beat.waits[-1] if beat.waits else None
    if is_stopped(beat):
        text = f"{who}: is stopped by a signal since about {ago:.0f} s; kill -CONT {beat.pid} lets it go on"
    elif ago > SILENT_S:
        text = f"{who}: has not been heard of for {ago:.0f} s" + (f"; then it waited for {wait.what}" if wait else "")
        if is_alive(beat):
            text += "; the process lives, so the file system of the run's folder may block, or the process hangs"
    elif wait is not None:
        text = f"{who}: waits for {' > '.join(one.what for one in beat.waits)}, since {wait.seconds + ago:.0f} s"
    else:
        text = f"{who}: is at work"
    waited = wait.seconds + ago if wait else ago
    return Holder(beat.rank, text, waited, stack_of(wait, beat))


def stack_of(wait: Waited | None, beat: Heartbeat) -> list[str]:
    """Of the process that is waited for, where there is one; else of the rank."""
    return list(wait.holders) if wait is not None and wait.holders else list(beat.stack)


def is_alive(beat: Heartbeat) -> bool:
    """Whether the process is known to live; one on another host may or may not."""
    return beat.host == this_host() and born(beat.pid) == beat.born


def is_stopped(beat: Heartbeat) -> bool:
    return is_alive(beat) and status_of(beat.pid)[:1] in [[s] for s in STOPPED]
