"""Episodes of tiny models, and an environment in the test's own process: what tests of every engine have in common."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dapo.environments.conversation import Answer, Conversation
from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.rollout.engine import Engine, Finished
from dapo.rollout.episodes import EpisodeEngine
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.turn_marks import TurnMarks
from dapo.types import Judgement, Problem, Verdict
from engine_requests import request

TURNS = 5


class Words:
    """In this process: answers by what was said, five turns long, then a score."""

    def __init__(self, turns: int = TURNS, after: int = 2, words: int = 3) -> None:
        self.turns, self.after, self.words = turns, after, words
        self.waited_s = 0.0
        self.stops: tuple[tuple[str, str], ...] = ()
        self.asked: list[Conversation] = []
        self.ended: list[str] = []

    def answer_after_ticks(self, environment: str) -> int:  # noqa: ARG002
        return self.after

    def stop(self, environment: str) -> tuple[tuple[str, str], ...]:  # noqa: ARG002
        return self.stops

    def opening(self, problem: Problem, seed: int) -> str:  # noqa: ARG002
        return ""

    def ask(self, conversation: Conversation) -> int:
        self.asked.append(conversation)
        return len(self.asked) - 1

    def wait(self, tickets: Sequence[int]) -> dict[int, Answer]:
        return {ticket: self.answer(self.asked[ticket]) for ticket in tickets}

    def answer(self, conversation: Conversation) -> Answer:
        if len(conversation.said) == self.turns:
            return Answer("bye", judgement=Judgement(Verdict.CORRECT, 0.5, graded=True))
        said = len(conversation.said[-1]) + conversation.seed
        return Answer(" ".join(f"w{3 + (said + i) % 30}" for i in range(self.words)), called=True)

    def end(self, name: str) -> None:
        self.ended.append(name)

    def close(self) -> None: ...


def episodes_over(inner: Engine, words: Words, policy: Policy) -> EpisodeEngine:
    """Of problems 0 to 39 every fourth has no environment."""
    marks = TurnMarks(policy.tokenizer, chat=False, eos_ids=policy.eos_ids)
    problems = {str(i): Problem(str(i), "", "", environment="words" if i % 4 else "") for i in range(40)}
    return EpisodeEngine(inner, words, marks, problems, max_turns=8)


def requests(n: int, limit: int = 120) -> list[Any]:
    return [request(i, limit) for i in range(n)]


def check_logp(policy: Policy, finished: Sequence[Finished], atol: float = 1e-10) -> None:
    """Of the tokens that the model drew, by one forward over everything that was said."""
    for item in finished:
        assert logp_gap(policy, item).max(initial=0) <= atol


def logp_gap(policy: Policy, item: Finished) -> NDArray[Any]:
    """|engine's log-prob − that of one forward| of each token that the model drew."""
    asked, completion = item
    packed = pack([asked.prompt], [completion.tokens], policy.device, own=[completion.own])
    with torch.no_grad():
        expected, _ = policy(packed, temperature=1.0)
    own = completion.logp if completion.own is None else completion.logp[completion.own]
    gap: NDArray[Any] = np.abs(own - expected.numpy())
    return gap


def prefilled(engine: LocalEngine) -> list[int]:
    """Tokens of every prefill from now on; padding and what is computed again for shared pages does not count."""
    counts: list[int] = []

    def noted(compute: Callable[..., None]) -> Callable[..., None]:
        return lambda ids, slots, *past: (counts.append(int((slots > 0).sum())), compute(ids, slots, *past))[1]

    decoder = engine._decoder
    decoder.prefill, decoder.extend = noted(decoder.prefill), noted(decoder.extend)  # type: ignore[method-assign]
    return counts


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for i, completion in one.items():
        assert np.array_equal(completion.tokens, other[i].tokens), i
        assert np.array_equal(completion.own, other[i].own), i
        assert completion.stop_reason is other[i].stop_reason
        assert completion.episode == other[i].episode
