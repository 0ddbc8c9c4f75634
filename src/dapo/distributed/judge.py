"""Judging shared by the ranks: each rank's own pool judges its share, and everybody learns every verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from dapo.distributed.world import World
from dapo.types import Judge, Judgement, StopReason, Verdict


class SharedJudge:
    """A `Judge` that every rank asks the same questions in the same order; ticket t is answered by rank t mod size."""

    def __init__(self, own: Judge, world: World) -> None:
        self.own, self.world = own, world
        self.n_tickets = 0
        self.own_ticket: dict[int, int] = {}  # ours -> the pool's, of what this rank judges

    def submit(
        self,
        response: str,
        answer: str,
        *,
        stop_reason: StopReason | None = None,
        meta: Mapping[str, object] | None = None,
    ) -> int:
        ticket = self.n_tickets
        self.n_tickets += 1
        if ticket % self.world.size == self.world.rank:
            self.own_ticket[ticket] = self.own.submit(response, answer, stop_reason=stop_reason, meta=meta)
        return ticket

    def wait(self, tickets: Iterable[int]) -> dict[int, Judgement]:
        wanted = list(tickets)
        if not wanted:
            return {}
        mine = {ticket: self.own_ticket.pop(ticket) for ticket in wanted if ticket in self.own_ticket}
        judged = self.own.wait(mine.values())
        shares = self.world.gather([[ticket, asdict(judged[own])] for ticket, own in mine.items()])
        return {
            ticket: Judgement(**{**state, "verdict": Verdict(state["verdict"])})
            for share in shares
            for ticket, state in share
        }


if TYPE_CHECKING:
    _implements: type[Judge] = SharedJudge
