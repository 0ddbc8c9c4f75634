"""Episodes of several turns over any engine: each turn is a request of its own to that engine.

The sequence only grows. What the model drew stays as it was drawn, with its log-probs and versions; what an environment
says is encoded once and added. Nothing is ever decoded and encoded again. An answer takes effect a fixed number of
ticks after the turn ended, however fast it came: only a later one is waited for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dapo.data.prompts import PromptFormat
from dapo.environments.conversation import Answer, Conversation, Environments
from dapo.errors import DataError
from dapo.models.policy import Policy
from dapo.rewards.parts import with_parts
from dapo.rollout.engine import (
    Engine,
    EngineState,
    Fault,
    Finished,
    NoiseKey,
    Request,
    SamplingParams,
    concatenated,
    nothing,
)
from dapo.rollout.partial import PartialResponse, from_state, to_state
from dapo.rollout.turn_marks import TurnMarks
from dapo.types import Completion, EpisodeRecord, Judgement, Problem, StopReason, Verdict

INNER = "inner."  # what the arrays of the engine below are called in a snapshot
Ended = tuple[int, Finished]  # with its place in the order of submission


class TurnJournal(Protocol):
    """Remembers answers that depend on the clock (TIMEOUT, CRASH), so that a resumed run repeats them."""

    def recall_turn(self, key: NoiseKey, turn: int) -> Judgement | None: ...

    def note_turn(self, key: NoiseKey, turn: int, judgement: Judgement) -> None: ...


@dataclass(slots=True)
class Episode:
    """A request under way: what was said until now, by both sides."""

    request: Request
    order: int  # of submission
    problem: Problem
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))  # after the prompt, of past turns
    logp: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.float32))
    version: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    own: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    said: tuple[str, ...] = ()
    answers: tuple[Answer, ...] = ()
    due: int | None = None  # the tick at which the answer takes effect; None: it is the model's turn
    ticket: int | None = None  # of that answer

    @property
    def name(self) -> str:
        key = self.request.key
        return f"{key.stream}/{key.problem}/{key.visit}/{key.response_index}"

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self.request.max_new_tokens - len(self.tokens)

    def conversation(self) -> Conversation:
        return Conversation(self.name, self.problem, seed_of(self.request.key), self.said, self.answers)

    def drew(self, turn: Completion) -> None:
        """Add what the model drew."""
        self.tokens = np.concatenate([self.tokens, turn.tokens])
        self.logp = np.concatenate([self.logp.astype(turn.logp.dtype), turn.logp])
        self.version = np.concatenate([self.version, turn.version])
        self.own = np.concatenate([self.own, np.ones(len(turn.tokens), np.bool_)])

    def heard(self, tokens: Sequence[int]) -> None:
        """Add what the environment said, as far as there is room."""
        new = np.array(tokens[: self.room], np.int32)
        self.tokens = np.concatenate([self.tokens, new])
        self.logp = np.concatenate([self.logp, np.zeros(len(new), self.logp.dtype)])
        self.version = np.concatenate([self.version, np.full(len(new), self.version[-1], np.int32)])
        self.own = np.concatenate([self.own, np.zeros(len(new), np.bool_)])

    def next_turn(self) -> Request:
        """The request for the model's next turn: everything so far is its prompt."""
        return replace(
            self.request,
            prompt=self.request.prompt + tuple(self.tokens.tolist()),
            key=replace(self.request.key, start=len(self.tokens)),
            max_new_tokens=self.room,
        )


class EpisodeEngine:
    """An engine whose requests are episodes. Implements `Engine` over another one.

    A problem without an environment is one turn, which passes through as it is. `problems` are those that requests may
    name by their ids. Further turns of an episode take its place in the batch again; meanwhile it is kept free.
    """

    def __init__(
        self,
        inner: Engine,
        environments: Environments,
        marks: TurnMarks,
        problems: Mapping[str, Problem],
        *,
        max_turns: int,
        journal: TurnJournal | None = None,
        parts: Sequence[str] = (),
    ) -> None:
        self.inner, self.environments, self.marks = inner, environments, marks
        self.problems = problems
        self.max_turns = max_turns
        self.journal = journal
        self.parts = parts  # of the reward, that a score has to carry
        self._episodes: dict[int, Episode] = {}  # by request id, in order of submission
        self._n_submitted = 0
        self._is_paused = False

    # ------------------------------------------------------------------ what the engine below knows

    @property
    def tick(self) -> int:
        return self.inner.tick

    @tick.setter
    def tick(self, value: int) -> None:
        self.inner.tick = value

    @property
    def faults(self) -> list[Fault]:
        return self.inner.faults

    @faults.setter
    def faults(self, value: list[Fault]) -> None:
        self.inner.faults = value

    @property
    def n_in_flight(self) -> int:
        return self.inner.n_in_flight + len(self._waiting())

    @property
    def n_waiting(self) -> int:
        return self.inner.n_waiting

    def capacity(self) -> int:
        return max(0, self.inner.capacity() - len(self._waiting()))

    def load_weights(self, policy: Policy, version: int) -> None:
        self.inner.load_weights(policy, version)

    def pause(self) -> None:
        self._is_paused = True
        self.inner.pause()

    def resume(self) -> None:
        self._is_paused = False
        self.inner.resume()

    def waited_s(self) -> float:
        """Seconds in which nothing went on, for want of an answer, since this was asked last."""
        waited, self.environments.waited_s = self.environments.waited_s, 0.0
        return waited

    def take_drafted(self) -> tuple[int, int]:
        return self.inner.take_drafted()

    def close(self) -> None:
        self.environments.close()
        self.inner.close()

    def fork_for_eval(self, sampling: SamplingParams) -> EpisodeEngine:
        return EpisodeEngine(
            self.inner.fork_for_eval(sampling), self.environments, self.marks, self.problems, max_turns=self.max_turns
        )

    # ------------------------------------------------------------------ turns

    def submit(self, requests: Sequence[Request]) -> None:
        episodes = [
            Episode(request, order, self.problems[request.key.problem])
            for order, request in enumerate(requests, self._n_submitted)
        ]
        self.inner.submit([self._next_turn(episode) for episode in episodes])
        self._episodes |= {episode.request.id: episode for episode in episodes}
        self._n_submitted += len(requests)

    def advance(self, meanwhile: Callable[[], None] = nothing) -> list[Finished]:
        if self._is_paused:
            meanwhile()
            return []
        ended = self._take_answers()
        for request, turn in self.inner.advance(meanwhile):
            ended += self._turn_ended(self._episodes[request.id], turn)
        return in_order(ended)

    def abort(self, ids: Iterable[int]) -> list[Finished]:
        wanted = [self._episodes[i] for i in set(ids) if i in self._episodes]
        for request, turn in self.inner.abort([episode.request.id for episode in wanted]):
            self._episodes[request.id].drew(turn)
        return in_order([self._ended(episode, StopReason.ABORTED) for episode in wanted])

    def under_way(self) -> list[Episode]:
        """In order of submission; each stays as it ended for whoever holds it."""
        return list(self._episodes.values())

    def _waiting(self) -> list[Episode]:
        """Those whose environment is to answer."""
        return [episode for episode in self._episodes.values() if episode.due is not None]

    def _next_turn(self, episode: Episode) -> Request:
        """The request for the model's next turn. The engine keeps what it ends with, unless it is the last one."""
        environment = episode.problem.environment
        if not environment:
            return episode.next_turn()
        is_last = len(episode.said) + 1 >= self.max_turns
        return replace(episode.next_turn(), may_continue=not is_last, stop=self.environments.stop(environment))

    def _turn_ended(self, episode: Episode, turn: Completion) -> list[Ended]:
        """The environment is asked; where there is none, or nothing more fits, the episode is over."""
        if not episode.problem.environment:
            del self._episodes[episode.request.id]
            return [(episode.order, (episode.request, turn))]
        episode.drew(turn)
        episode.said += (turn.text,)
        if turn.stop_reason is not StopReason.EOS:
            return [self._ended(episode, turn.stop_reason)]
        self._ask(episode, self.tick + self.environments.answer_after_ticks(episode.problem.environment))
        return []

    def _ask(self, episode: Episode, due: int) -> None:
        """Let the environment answer what was said last, unless a run before this one has seen it fail there."""
        episode.due = due
        is_known = self._recall(episode) is not None
        episode.ticket = None if is_known else self.environments.ask(episode.conversation())

    def _recall(self, episode: Episode) -> Judgement | None:
        return None if self.journal is None else self.journal.recall_turn(episode.request.key, len(episode.said))

    def _take_answers(self) -> list[Ended]:
        """Every answer that is due takes effect: the model's next turn begins, or the episode is over."""
        due = [episode for episode in self._waiting() if episode.due is not None and episode.due <= self.tick]
        if not due:
            return []
        answers = self.environments.wait([episode.ticket for episode in due if episode.ticket is not None])
        ended: list[Ended] = []
        going_on: list[Episode] = []
        for episode in due:
            answer = Answer(judgement=self._recall(episode)) if episode.ticket is None else answers[episode.ticket]
            episode.due = episode.ticket = None
            ended += self._answered(episode, answer)
            if episode.request.id in self._episodes:
                going_on.append(episode)
        self.inner.submit([self._next_turn(episode) for episode in going_on])
        return ended

    def _answered(self, episode: Episode, answer: Answer) -> list[Ended]:
        """Add what the environment said. What it leaves no room for, or no turn, is truncated."""
        tokens: tuple[int, ...] = ()
        if not answer.is_over:
            try:
                tokens = self.marks.encode(answer.text, answer.role, after=int(episode.tokens[-1]))
            except DataError as error:
                answer = replace(answer, judgement=crash(episode, f"role {answer.role!r}: {error.message}"))
        if answer.judgement is not None:
            answer = replace(answer, judgement=with_parts(answer.judgement, {}, self.parts))
        episode.answers += (answer,)
        judged = answer.judgement
        if self.journal is not None and judged is not None and judged.verdict in (Verdict.TIMEOUT, Verdict.CRASH):
            self.journal.note_turn(episode.request.key, len(episode.said), judged)
        if answer.is_over:
            return [self._ended(episode, StopReason.EOS)]
        episode.heard(tokens)
        if episode.room < 1 or len(episode.said) >= self.max_turns:
            return [self._ended(episode, StopReason.LENGTH)]
        return []

    def _ended(self, episode: Episode, reason: StopReason) -> Ended:
        del self._episodes[episode.request.id]
        self.inner.abort([episode.request.id])  # it is not continued
        if episode.problem.environment:
            self.environments.end(episode.name)
        return episode.order, (episode.request, self._completion(episode, reason))

    def _completion(self, episode: Episode, reason: StopReason) -> Completion:
        told = episode.answers[-1].judgement if episode.answers else None
        record = EpisodeRecord(
            said=episode.said[-1] if episode.said else "",
            judgement=replace(told, reference=episode.problem.answer) if told is not None else None,
            turns=len(episode.said),
            calls=sum(answer.called or answer.failed for answer in episode.answers),
            failures=sum(answer.failed for answer in episode.answers),
        )
        tokens = episode.tokens
        text = self.marks.decode(tokens)
        return Completion(tokens, episode.logp, episode.version, reason, text, episode.own, record)

    # ------------------------------------------------------------------ in and out of a snapshot

    def snapshot(self) -> EngineState:
        """Of the engine below, and of each episode what was said. Environments are made again from that."""
        below = self.inner.snapshot()
        episodes = list(self._episodes.values())
        meta = {
            "tick": self.tick,
            "n_submitted": self._n_submitted,
            "is_paused": self._is_paused,
            "inner": dict(below.meta),
            "episodes": [
                {
                    "said": list(episode.said),
                    "answers": [asdict(answer) for answer in episode.answers],
                    "due": episode.due,
                }
                for episode in episodes
            ],
        }
        items = [PartialResponse(e.request, e.order, e.tokens, e.logp, e.version) for e in episodes]
        dtype = np.float64 if any(episode.logp.dtype == np.float64 for episode in episodes) else np.float32
        state = to_state(items, dtype, meta)
        own = concatenated([episode.own for episode in episodes], np.bool_)
        arrays = {**state.arrays, "own": own, **{f"{INNER}{name}": array for name, array in below.arrays.items()}}
        return EngineState(state.meta, arrays)

    def restore(self, state: EngineState) -> None:
        """Continue from a snapshot; environments that were to answer are asked again, with all that was said."""
        below = {name.removeprefix(INNER): x for name, x in state.arrays.items() if name.startswith(INNER)}
        self.abort(list(self._episodes))
        self.inner.restore(EngineState(state.meta["inner"], below))
        self._n_submitted, self._is_paused = state.meta["n_submitted"], state.meta["is_paused"]
        at = 0
        for item, saved in zip(from_state(state), state.meta["episodes"], strict=True):
            problem = self.problems[item.request.key.problem]
            episode = Episode(item.request, item.order, problem, item.tokens, item.logp, item.version)
            episode.own = state.arrays["own"][at : at + len(item.tokens)]
            at += len(item.tokens)
            episode.said, episode.answers = tuple(saved["said"]), tuple(Answer(**one) for one in saved["answers"])
            self._episodes[item.request.id] = episode
            if saved["due"] is not None:
                self._ask(episode, saved["due"])


def opened(
    engine: Engine, key: NoiseKey, prompt: tuple[int, ...], shape: PromptFormat, *, max_prompt_tokens: int
) -> tuple[int, ...]:
    """What becomes of a prompt: what its environment adds is encoded with it; else it stays as it is."""
    if not isinstance(engine, EpisodeEngine) or not engine.problems[key.problem].environment:
        return prompt
    problem = engine.problems[key.problem]
    added = engine.environments.opening(problem, seed_of(key))
    if not added:
        return prompt
    longer = shape.encode(problem, engine.marks.tokenizer, added)
    if len(longer) > max_prompt_tokens:
        raise DataError(
            f"limits.max_prompt_tokens = {max_prompt_tokens}: with what environment {problem.environment} adds, the "
            f"prompt of problem {problem.id} has {len(longer)} tokens.",
            remedy=f"Raise it to {len(longer)} or more, or take longer problems out of the set.",
        )
    return longer


def in_order(ended: list[Ended]) -> list[Finished]:
    return [finished for _, finished in sorted(ended, key=lambda one: one[0])]


def crash(episode: Episode, why: str) -> Judgement:
    return Judgement(Verdict.CRASH, -1.0, reference=episode.problem.answer, message=f"data.environment: {why}")


def seed_of(key: NoiseKey) -> int:
    """Of (problem, visit): all responses of a group meet the same environment."""
    name = f"environment/{key.seed}/{key.stream}/{key.problem}/{key.visit}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())


if TYPE_CHECKING:
    _implements: type[Engine] = EpisodeEngine
