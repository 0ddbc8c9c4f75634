"""What an environment is: it begins with a problem, answers each turn, and ends the episode with a score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dapo.types import Problem, Score


@dataclass(frozen=True, slots=True)
class Turn:
    """An environment's answer: text that is added to the episode, or the end with its score.

    With `score` the episode is over, and `text` is only recorded. With neither, `Turn()`, it is over too: the
    environment has no answer, and the run's verifier judges what the model said last. `role` is how a chat template
    names the speaker; without a template the text is added as it is. `called` counts a tool call, `failed` one that
    failed.
    """

    text: str = ""
    score: Score | None = None
    role: str = "user"
    called: bool = False
    failed: bool = False


@runtime_checkable
class Environment(Protocol):
    """One episode. It is made without arguments in a worker process of its own kind, and used for one episode.

    A class may say `answer_after_ticks`: its answers take effect that many engine ticks after a turn ended, however
    fast they came. What it answers may depend on the problem, the seed and what was said, on nothing else: a resumed
    run replays the episode. It may have `stop`, strings that end a turn as the end token does (of a pair the second
    does, after the first), and `close()`, for what should not wait until the object is gone.
    """

    def start(self, problem: Problem, seed: int) -> str | None:
        """What to add to the prompt, if anything. The seed is that of (problem, visit): a group shares its prompt."""
        ...

    def respond(self, said: str) -> Turn:
        """The answer to what the model just said."""
        ...
