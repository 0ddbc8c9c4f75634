"""Verifying shared by the ranks: each rank's own pool verifies its part, and all ranks get all verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dapo.distributed.world import World
from dapo.errors import VerifierStopped, cannot_be_true
from dapo.types import Judge, Judgement, Task, Verdict

STOPPED = "stopped"


class SharedJudge:
    """A `Judge` that every rank asks the same questions in the same order; ticket t is answered by rank t mod size."""

    def __init__(self, own: Judge, world: World) -> None:
        self.own, self.world = own, world
        self.n_tickets = 0
        self.own_ticket: dict[int, int] = {}  # ticket -> that of this rank's pool

    def submit(self, task: Task) -> int:
        ticket = self.n_tickets
        self.n_tickets += 1
        if ticket % self.world.size == self.world.rank:
            self.own_ticket[ticket] = self.own.submit(task)
        return ticket

    def wait(self, tickets: Iterable[int]) -> dict[int, Judgement]:
        wanted = list(tickets)
        if not wanted:
            return {}
        mine = {ticket: self.own_ticket.pop(ticket) for ticket in wanted if ticket in self.own_ticket}
        judgements: dict[int, Judgement] = {}
        try:
            judged = self.own.wait(mine.values())
            own_part: object = [[ticket, asdict(judged[own])] for ticket, own in mine.items()]
        except VerifierStopped as stopped:  # every rank stops with it, at the same place
            own_part = {STOPPED: [stopped.message, stopped.remedy]}
        parts = self.world.gather(own_part)
        for part in parts:
            if isinstance(part, dict) and STOPPED in part:
                raise VerifierStopped(str(part[STOPPED][0]), remedy=str(part[STOPPED][1]))
        for rank, part in enumerate(parts):
            asked = [ticket for ticket in wanted if ticket % self.world.size == rank]
            judgements |= read_part(rank, part, asked)
        return judgements


def read_part(rank: int, part: Any, asked: Sequence[int]) -> dict[int, Judgement]:
    """The verdicts of one rank, which are those it was asked for; else an error that names it."""
    try:
        judged = {ticket: Judgement(**{**state, "verdict": Verdict(state["verdict"])}) for ticket, state in part}
        if list(judged) != list(asked) or len(part) != len(asked):
            raise ValueError(f"verdicts on {list(judged)} were given, and asked for on {list(asked)}")
        numbers = [value for judgement in judged.values() for value in (judgement.value, *judgement.parts.values())]
        if not all(isinstance(value, float | int) for value in numbers):
            raise ValueError("a reward is not a number")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise cannot_be_true(rank, "verdicts", error) from None
    return judged


if TYPE_CHECKING:
    _implements: type[Judge] = SharedJudge
