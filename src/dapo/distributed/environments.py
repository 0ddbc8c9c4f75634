"""Environments shared by the ranks: each episode's lives on one of them, and all ranks get all answers."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dapo.distributed.world import World
from dapo.environments.conversation import Answer, Conversation, Environments
from dapo.environments.pool import EnvironmentPool
from dapo.errors import cannot_be_true
from dapo.types import Judgement, Problem, Verdict


class SharedEnvironments:
    """`Environments` that every rank asks the same questions in the same order. An episode's name says whose it is."""

    def __init__(self, own: EnvironmentPool, world: World) -> None:
        self.own, self.world = own, world
        self.waited_s = 0.0
        self.on_notice: Callable[[str], None] = lambda _text: None
        self._notices: list[str] = []
        own.on_notice = self._notices.append
        self._homes: list[int] = []  # of each ticket
        self._own_ticket: dict[int, int] = {}  # ticket -> that of this rank's pool

    def answer_after_ticks(self, environment: str) -> int:
        return self.own.answer_after_ticks(environment)

    def stop(self, environment: str) -> tuple[tuple[str, str], ...]:
        return self.own.stop(environment)

    def opening(self, problem: Problem, seed: int) -> str:
        home = self._home(problem.id)
        text = self.own.opening(problem, seed) if home == self.world.rank else ""
        return str(self.world.gather(text)[home])

    def ask(self, conversation: Conversation) -> int:
        ticket, home = len(self._homes), self._home(conversation.name)
        self._homes.append(home)
        if home == self.world.rank:
            self._own_ticket[ticket] = self.own.ask(conversation)
        return ticket

    def wait(self, tickets: list[int]) -> dict[int, Answer]:
        """All ranks wait for the slowest answer."""
        if not tickets:
            return {}
        began = time.perf_counter()
        mine = {ticket: self._own_ticket.pop(ticket) for ticket in tickets if ticket in self._own_ticket}
        answers = self.own.wait(list(mine.values()))
        notices = self._notices[:]
        self._notices.clear()
        own_part = {"answers": [[ticket, asdict(answers[own])] for ticket, own in mine.items()], "notices": notices}
        found: dict[int, Answer] = {}
        for rank, part in enumerate(self.world.gather(own_part)):
            found |= read_part(rank, part, [ticket for ticket in tickets if self._homes[ticket] == rank])
            for notice in part["notices"]:
                self.on_notice(str(notice))
        self.waited_s += time.perf_counter() - began
        return found

    def end(self, name: str) -> None:
        self.own.end(name)

    def close(self) -> None:
        self.own.close()

    def _home(self, name: str) -> int:
        return zlib.crc32(name.encode()) % self.world.size


def read_part(rank: int, part: Any, asked: Sequence[int]) -> dict[int, Answer]:
    """The answers of one rank, which are those it was asked for; else an error that names it."""
    try:
        answers = {ticket: answer_of(state) for ticket, state in part["answers"]}
        if list(answers) != list(asked) or len(part["answers"]) != len(asked) or not isinstance(part["notices"], list):
            raise ValueError(f"answers to {list(answers)} were given, and asked for to {list(asked)}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise cannot_be_true(rank, "answers of environments", error) from None
    return answers


def answer_of(state: dict[str, Any]) -> Answer:
    judged = state["judgement"]
    if not all(isinstance(state[name], str) for name in ("text", "role")):
        raise ValueError("an answer is not a text")
    told = None if judged is None else Judgement(**{**judged, "verdict": Verdict(judged["verdict"])})
    return Answer(**{**state, "judgement": told})


if TYPE_CHECKING:
    _implements: type[Environments] = SharedEnvironments
