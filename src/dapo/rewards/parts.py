"""Rewards in parts: beside the verifier's own reward, further functions or verifiers, each in its own workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dapo.config.schema import RewardPart, RewardsConfig
from dapo.rewards.pool import VerifierPool
from dapo.types import CORRECT, Judge, Judgement, StopReason, Task, Verdict

FAILED = (Verdict.TIMEOUT, Verdict.CRASH)


class PartsJudge:
    """A `Judge` whose judgements carry every part of the reward.

    Whether a response is correct stays the verifier's word. A part that fails on a response fails the judgement, as a
    failing verifier does: a reward that nobody could measure is reported, and never taken for 0.
    """

    def __init__(self, own: Judge, rewards: RewardsConfig, folder: Path | None = None, *, rank: int = 0) -> None:
        """`folder` is where judges among the parts keep their verdicts."""
        self.own = own
        self.pools = {
            name: make_part_pool(part, rewards, folder=folder, rank=rank) for name, part in own_parts(rewards).items()
        }
        self.returned = returned_parts(rewards)
        self.reads_truncated = {name for name, part in own_parts(rewards).items() if part.function is not None}
        self.tickets: dict[int, tuple[dict[str, int], bool]] = {}  # the verifier's -> the parts', was it asked

    def submit(self, task: Task) -> int:
        ticket = self.own.submit(task)
        part = replace(task, verifier="")
        whole = replace(part, stop_reason=None)
        asked = {
            name: pool.submit(whole if name in self.reads_truncated else part) for name, pool in self.pools.items()
        }
        self.tickets[ticket] = asked, task.stop_reason is not StopReason.LENGTH
        return ticket

    def wait(self, tickets: Iterable[int]) -> dict[int, Judgement]:
        wanted = list(tickets)
        asked = {ticket: self.tickets.pop(ticket) for ticket in wanted}
        judgements = self.own.wait(wanted)
        values: dict[int, dict[str, Judgement]] = {ticket: {} for ticket in wanted}
        for name, pool in self.pools.items():
            found = pool.wait([asked[ticket][0][name] for ticket in wanted])
            for ticket in wanted:
                values[ticket][name] = found[asked[ticket][0][name]]
        return {
            ticket: with_parts(judgements[ticket], values[ticket], self.returned if asked[ticket][1] else ())
            for ticket in wanted
        }

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def own_parts(rewards: RewardsConfig) -> dict[str, RewardPart]:
    """The parts that have a function or a verifier of their own."""
    return {name: part for name, part in rewards.parts.items() if part.function or part.verifier}


def returned_parts(rewards: RewardsConfig) -> list[str]:
    """The others, that a Score has to carry."""
    return [name for name in rewards.parts if name not in own_parts(rewards) and name != CORRECT]


def make_part_pool(
    part: RewardPart,
    rewards: RewardsConfig,
    workers: int | None = None,
    *,
    folder: Path | None = None,
    rank: int = 0,
) -> VerifierPool:
    return VerifierPool(
        part.function or part.verifier or "",
        workers=workers or rewards.workers,
        seconds=rewards.cpu_seconds,
        memory_mb=rewards.memory_mb,
        folder=folder,
        rank=rank,
    )


def with_parts(judgement: Judgement, values: Mapping[str, Judgement], returned: Iterable[str] = ()) -> Judgement:
    """The verifier's judgement with the parts' values, and those that its Score had to carry (`returned`).

    Where one is missing the judgement is a failure that names it; a failure of the verifier's own comes first.
    """
    parts = {**judgement.parts, **{name: value.value for name, value in values.items() if value.verdict not in FAILED}}
    whole = replace(judgement, parts=parts, seconds=judgement.seconds + sum(value.seconds for value in values.values()))
    if judgement.verdict in FAILED:
        return whole
    failures = [(name, value.verdict, value.message) for name, value in values.items() if value.verdict in FAILED]
    failures += [(name, Verdict.CRASH, f"the Score has no part {name!r}") for name in returned if name not in parts]
    for name, verdict, message in failures:
        return replace(whole, verdict=verdict, value=-1.0, graded=False, message=f"rewards.parts.{name}: {message}")
    return whole


if TYPE_CHECKING:
    _implements: type[Judge] = PartsJudge
