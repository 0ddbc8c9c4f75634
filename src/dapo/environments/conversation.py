"""What was said in an episode so far, as an environment is asked about it, and what it answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dapo.types import Judgement, Problem


@dataclass(frozen=True, slots=True)
class Answer:
    """An environment's answer to a turn. With a judgement, or without a text, the episode is over."""

    text: str = ""
    role: str = "user"
    called: bool = False
    failed: bool = False
    judgement: Judgement | None = None  # its score; TIMEOUT or CRASH where it could not answer

    @property
    def is_over(self) -> bool:
        return self.judgement is not None or not self.text


@dataclass(frozen=True, slots=True)
class Conversation:
    """An episode as its environment knows it: enough to make the environment again, wherever it was."""

    name: str  # of the episode, unique among those under way
    problem: Problem
    seed: int  # of (problem, visit)
    said: tuple[str, ...]  # the model's turns; the last one is to be answered
    answers: tuple[Answer, ...] = ()  # to all turns but the last


class Environments(Protocol):
    """Whoever has the environments: ask, and wait for the answer later."""

    waited_s: float  # by those who asked; they may set it back

    def answer_after_ticks(self, environment: str) -> int:
        """After how many engine ticks an answer takes effect."""
        ...

    def stop(self, environment: str) -> tuple[tuple[str, str], ...]:
        """(begin, end): a turn ends where `end` stands after `begin`, as at an end token."""
        ...

    def opening(self, problem: Problem, seed: int) -> str:
        """What the environment adds to the prompt; empty for nothing."""
        ...

    def ask(self, conversation: Conversation) -> int:
        """A ticket for the answer to what was said last."""
        ...

    def wait(self, tickets: list[int]) -> dict[int, Answer]:
        """The answers to these tickets, each handed out once."""
        ...

    def end(self, name: str) -> None:
        """The episode is over, or nobody wants it any more; a ticket that is out is worth nothing."""
        ...

    def close(self) -> None: ...
