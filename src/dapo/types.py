"""The vocabulary that config, code, metrics and docs share: problem, completion, verdict, group. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from dapo.algorithms.mixed_groups import is_mixed

CORRECT = "correct"  # the part of the reward that is the verifier's own
PART_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")  # of a part of the reward: metrics and columns carry it

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class StopReason(StrEnum):
    """Why a response ended."""

    EOS = "EOS"  # the model wrote an end token; that token is part of the response
    LENGTH = "LENGTH"  # the response reached limits.max_response_tokens: truncated
    ABORTED = "ABORTED"  # nobody wants it any more (surplus), or the engine gave it up (non-finite logits)


class Verdict(StrEnum):
    """What the verifier says of one response. The five stay separate everywhere; only CORRECT counts as accuracy 1."""

    CORRECT = "CORRECT"
    WRONG = "WRONG"
    UNPARSEABLE = "UNPARSEABLE"  # no final answer could be found or read in the response
    TIMEOUT = "TIMEOUT"  # judging it used up its CPU time, or slept too long (waiting in the queue does not count)
    CRASH = "CRASH"  # the verifier raised, died or ran out of memory on it


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with a checkable reference answer.

    `id` is stable across runs and files (a hash of the normalised question unless the data brings its own). `answer` is
    the reference as text. `meta` holds what a verifier or a table needs beyond it: a code problem's tests, a level.
    `verifier` judges its responses, where that is not the run's. `turns` are the (role, text) of a row that is a chat
    and is put to the model as it is; the last is the user's. `environment` answers the model's turns, where it has one.
    """

    id: str
    question: str
    answer: str
    source: str = ""
    meta: Mapping[str, object] = field(default_factory=dict)
    verifier: str = ""
    turns: tuple[tuple[str, str], ...] = ()
    environment: str = ""

    def for_verifier(self) -> dict[str, object]:
        """Its `meta` with the question and where it is from, which functions of others ask for; its own keys win."""
        return {"question": self.question, "data_source": self.source, **self.meta}

    def task(self, response: str, stop_reason: StopReason) -> Task:
        """A response to it, as its verifier gets it."""
        return Task(response, self.answer, stop_reason, self.for_verifier(), self.verifier)


@dataclass(frozen=True, slots=True)
class Score:
    """What a user's reward function returns: a raw value, and whether it counts as correct.

    `correct` is what accuracy and dynamic sampling use. None means "graded": a group is then mixed when its raw
    values differ. `parts` are further named rewards: those that rewards.parts gives a weight are added to `value` by
    it, the others are only recorded.
    """

    value: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verifier's verdict with its evidence: what was extracted and compared, and how much work that took."""

    verdict: Verdict
    value: float  # raw reward before shaping: +1 / −1 for rule-based verifiers (DAPO eq. 7)
    extracted: str | None = None
    reference: str = ""
    seconds: float = 0.0  # CPU time of a worker and its children; by the clock where it slept too long or died
    message: str = ""  # why, for everything but CORRECT and WRONG
    graded: bool = False  # True when `value` alone decides (Score.correct was None)
    parts: Mapping[str, float] = field(default_factory=dict)  # further parts of the reward, as they were, by name

    @property
    def accuracy(self) -> int:
        """1 for CORRECT, else 0. Never the shaped reward."""
        return int(self.verdict is Verdict.CORRECT)


@dataclass(frozen=True, slots=True)
class Task:
    """One response to verify against one reference, with the problem's extra data (`meta`)."""

    response: str
    answer: str
    stop_reason: StopReason | None = None
    meta: Mapping[str, object] = field(default_factory=dict)
    verifier: str = ""  # the problem's own; empty: the run's
    seconds: float = 10.0  # CPU time limit


def engine_fault(problem: Problem) -> Judgement:
    """What a response counts as that the engine itself gave up: a reported fault, never correct."""
    return Judgement(Verdict.CRASH, -1.0, reference=problem.answer, message="the engine gave it up: non-finite logits")


class Judge(Protocol):
    """What sampling and evaluation need of a verifier: hand in responses, wait for their verdicts."""

    def submit(self, task: Task) -> int:
        """A ticket for this response; verifying may begin at once."""
        ...

    def wait(self, tickets: Iterable[int]) -> dict[int, Judgement]:
        """The judgements of these tickets, each handed out once."""
        ...


def outcomes_of(judgements: Iterable[Judgement]) -> list[float]:
    """What dynamic sampling compares within a group: 1 for correct, else 0; where rewards are graded, raw values."""
    known = list(judgements)
    is_graded = any(judgement.graded for judgement in known)
    return [judgement.value if is_graded else judgement.accuracy for judgement in known]


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """How an episode of several turns went: what the model said last, the environment's score, and what was counted."""

    said: str  # the last turn's text, which the verifier judges where the environment gives no score
    judgement: Judgement | None  # the environment's
    turns: int = 1  # of the model
    calls: int = 0  # of tools
    failures: int = 0  # of these calls


@dataclass(frozen=True, slots=True)
class Completion:
    """A response as the engine made it: tokens, how likely each was when drawn, by which weights, why it ended.

    Of an episode it is everything after the prompt; `own` says which tokens the model drew. The others have log-prob 0
    and the version of the token before them.
    """

    tokens: NDArray[np.int32]  # [T], the end token included
    logp: NDArray[np.float32]  # [T], log π_engine(token | prefix) at the sampling temperature
    version: NDArray[np.int32]  # [T], the weight version that drew each token
    stop_reason: StopReason
    text: str
    own: NDArray[np.bool_] | None = None  # [T]; None: all of them
    episode: EpisodeRecord | None = None

    @property
    def is_truncated(self) -> bool:
        return self.stop_reason is StopReason.LENGTH

    @property
    def n_own(self) -> int:
        """Tokens that the model drew."""
        return len(self.tokens) if self.own is None else int(self.own.sum())

    @property
    def judgement(self) -> Judgement | None:
        """The environment's, where it gave one."""
        return None if self.episode is None else self.episode.judgement

    @property
    def answer(self) -> str:
        """What a verifier judges: of an episode the last turn."""
        return self.text if self.episode is None else self.episode.said


@dataclass(frozen=True, slots=True)
class Group:
    """One visit to one problem: its prompt and its G completions with their judgements, in response order."""

    problem: Problem
    visit: int  # how often this problem was submitted before in this run; part of the noise key
    prompt_tokens: tuple[int, ...]
    completions: tuple[Completion, ...]
    judgements: tuple[Judgement, ...]

    @property
    def n_correct(self) -> int:
        return sum(judgement.accuracy for judgement in self.judgements)

    @property
    def is_graded(self) -> bool:
        """Raw values decide, not right and wrong."""
        return any(judgement.graded for judgement in self.judgements)

    @property
    def is_mixed(self) -> bool:
        return is_mixed(outcomes_of(self.judgements))
