"""Engine and verifier together: problems go in, groups with completions and verdicts come out, tick by tick."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dapo.algorithms.mixed_groups import is_mixed
from dapo.errors import VerifierError, VerifierStopped
from dapo.rollout.engine import Engine, NoiseKey, Request
from dapo.types import Completion, Group, Judge, Judgement, Problem, StopReason, Verdict, engine_fault, outcomes_of
from dapo.waiting.registry import NEVER, waiting

JournalWriter = Callable[[str, Judgement], None]
Opening = Callable[[NoiseKey, tuple[int, ...]], tuple[int, ...]]  # a prompt with what its environment adds
MOST_FAILURES = 64
TAIL_SHARE = 8  # the tail is what runs with at most an eighth of the most responses that ran together


@dataclass(slots=True)
class PendingGroup:
    """A group in flight: which of its responses have ended, and which of those have their verdict."""

    number: int  # order of submission in this run
    problem: Problem
    visit: int
    prompt: tuple[int, ...]
    completions: list[Completion | None]
    judgements: list[Judgement | None]
    is_dropped: bool = False  # given up
    n_verdicts: int = 0
    is_mixed: bool = False  # known already: one correct and one wrong, or two different raw values, suffice
    overtaken: int = 0  # so many steps went on without it, while it was unfinished

    @property
    def is_resolved(self) -> bool:
        return self.n_verdicts == len(self.judgements)

    def add_verdict(self, index: int, judgement: Judgement) -> None:
        assert self.judgements[index] is None, "a response is verified once"
        self.judgements[index] = judgement
        self.n_verdicts += 1
        if not self.is_mixed:
            self.is_mixed = is_mixed(outcomes_of(j for j in self.judgements if j is not None))

    @property
    def n_tokens(self) -> int:
        return sum(completion.n_own for completion in self.completions if completion is not None)

    def finished(self) -> Group:
        completions = tuple(completion for completion in self.completions if completion is not None)
        judgements = tuple(judgement for judgement in self.judgements if judgement is not None)
        assert len(completions) == len(judgements) == len(self.judgements), "a group is finished once all is verified"
        return Group(self.problem, self.visit, self.prompt, completions, judgements)


@dataclass(slots=True)
class Due:
    """A response that has ended: its verdict takes effect at this tick."""

    tick: int
    request: Request
    ticket: int | None = None  # the verifier's; None where it has not been asked, or need not be


@dataclass(slots=True)
class Spent:
    """Seconds in which sampling could do little: few responses were left to generate, or a verdict was late."""

    tail: float = 0.0
    verdicts: float = 0.0
    most: int = 0  # responses that ran together

    def count_tick(self, n: int, seconds: float) -> None:
        """A tick in which n responses ran."""
        self.most = max(self.most, n)
        if n * TAIL_SHARE <= self.most:
            self.tail += seconds


class VerdictJournal:
    """Verdicts that depend on the clock (TIMEOUT, CRASH), which a resumed run reuses instead of timing again.

    `write` puts a new entry on disk before the verdict takes effect. The key holds the weights' version: the same visit
    under other weights is another response.
    """

    def __init__(self, known: Mapping[str, Judgement] | None = None, write: JournalWriter | None = None) -> None:
        self.known = dict(known or {})
        self.write = write
        self.version = 0

    def recall(self, request: Request) -> Judgement | None:
        return self.known.get(self.key_of(request))

    def note(self, request: Request, judgement: Judgement) -> None:
        key = self.key_of(request)
        if judgement.verdict in (Verdict.TIMEOUT, Verdict.CRASH) and key not in self.known:
            self.known[key] = judgement
            if self.write is not None:
                self.write(key, judgement)

    def key_of(self, request: Request) -> str:
        return f"{self.version}/{request.key.problem}/{request.key.visit}/{request.key.response_index}"

    def recall_turn(self, key: NoiseKey, turn: int) -> Judgement | None:
        """How an environment failed to answer this turn."""
        return self.known.get(self.key_of_turn(key, turn))

    def note_turn(self, key: NoiseKey, turn: int, judgement: Judgement) -> None:
        name = self.key_of_turn(key, turn)
        if name not in self.known:
            self.known[name] = judgement
            if self.write is not None:
                self.write(name, judgement)

    def key_of_turn(self, key: NoiseKey, turn: int) -> str:
        return f"{self.version}/{key.problem}/{key.visit}/{key.response_index}/turn {turn}"


def in_words(requests: Sequence[Request]) -> str:
    """The first of them, and how many there are."""
    first = requests[0].key
    more = f" and {len(requests) - 1} more" if len(requests) > 1 else ""
    return f"problem {first.problem}, visit {first.visit}, response {first.response_index}{more}"


class Collector:
    """Submits groups to the engine, sends what ends to the verifier, and applies each verdict at its own tick.

    The verdict of a response that ended at tick t takes effect at tick t + delay; if it is late, the engine waits. So
    the verifier works while the engine decodes, and yet no decision depends on how fast it was. Responses are handed in
    while the device computes the next tick. `opening` adds to a prompt what its environment begins with.
    """

    def __init__(
        self,
        engine: Engine,
        verifier: Judge,
        *,
        responses_per_prompt: int,
        max_new_tokens: int,
        seed: int,
        delay_ticks: int = 4,
        journal: VerdictJournal | None = None,
        opening: Opening = lambda _key, prompt: prompt,
    ) -> None:
        self.engine = engine
        self.verifier = verifier
        self.responses_per_prompt = responses_per_prompt
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.delay_ticks = delay_ticks
        self.journal = journal or VerdictJournal()
        self.opening = opening
        self.n_submitted = 0
        self.n_failures: Counter[str] = Counter()  # failures in a row, by verifier
        self.groups: dict[int, PendingGroup] = {}
        self.due: list[Due] = []  # in order of tick
        self._to_hand_in: list[Due] = []  # those of them that the verifier has not got yet
        self.spent = Spent()

    @property
    def is_idle(self) -> bool:
        return self.engine.n_in_flight == 0 and self.engine.n_waiting == 0 and not self.due

    def room(self) -> int:
        """Groups the engine could start on its next tick; at least one when idle, even if a group does not fit."""
        return self.engine.capacity() // self.responses_per_prompt or int(self.is_idle)

    def submit(self, problem: Problem, visit: int, prompt: tuple[int, ...]) -> PendingGroup:
        G = self.responses_per_prompt
        prompt = self.opening(NoiseKey(self.seed, "train", problem.id, visit, 0), prompt)
        group = PendingGroup(self.n_submitted, problem, visit, prompt, [None] * G, [None] * G)
        self.n_submitted += 1
        self.groups[group.number] = group
        self.engine.submit([self.request_of(group, i) for i in range(G)])
        return group

    def request_of(self, group: PendingGroup, index: int) -> Request:
        return Request(
            id=group.number * self.responses_per_prompt + index,
            prompt=group.prompt,
            key=NoiseKey(self.seed, "train", group.problem.id, group.visit, index),
            max_new_tokens=self.max_new_tokens,
            group=group.number,
        )

    def advance(self) -> None:
        """One engine tick; then every verdict that is due by now takes effect."""
        if self.engine.n_in_flight or self.engine.n_waiting:
            start = time.perf_counter()
            with waiting("the engine's next tick"):
                finished = self.engine.advance(self._hand_in)
            self.spent.count_tick(self.engine.n_in_flight + len(finished), time.perf_counter() - start)
            for request, completion in finished:
                self._ended(request, completion)
            now = self.engine.tick
        else:  # nothing to decode: only verdicts are outstanding, so jump to the next one
            self._hand_in()
            now = self.due[0].tick if self.due else self.engine.tick
        self._apply_due(now)

    def take_spent(self) -> Spent:
        """What was spent since this was asked last."""
        spent, self.spent = self.spent, Spent()
        return spent

    def drop(self, groups: Sequence[PendingGroup]) -> int:
        """Give up groups: abort their running responses and forget their verdicts. Returns the tokens aborted."""
        numbers = set()
        for group in groups:
            group.is_dropped = True
            numbers.add(group.number)
        G = self.responses_per_prompt
        running = [n * G + i for n in numbers for i, done in enumerate(self.groups[n].completions) if done is None]
        aborted_tokens = sum(completion.n_own for _, completion in self.engine.abort(running))
        gone = [entry for entry in self.due if entry.request.group in numbers]
        self.due = [entry for entry in self.due if entry.request.group not in numbers]
        self._to_hand_in = [entry for entry in self._to_hand_in if entry.request.group not in numbers]
        with suppress(VerifierStopped):  # nobody needs these verdicts
            self._verdicts_on(gone)  # leave no ticket behind
        for number in numbers:
            del self.groups[number]
        return aborted_tokens

    def forget_all(self) -> None:
        """Give up everything in flight."""
        self.drop(list(self.groups.values()))

    def forget(self, group: PendingGroup) -> None:
        """Stop tracking a resolved group."""
        del self.groups[group.number]

    def _ended(self, request: Request, completion: Completion) -> None:
        group = self.groups[request.group]
        group.completions[request.key.response_index] = completion
        self.await_verdict(self.engine.tick + self.delay_ticks, group, request.key.response_index)

    def await_verdict(self, tick: int, group: PendingGroup, index: int) -> None:
        """The verdict on a response that has ended takes effect at `tick`."""
        entry = Due(tick, self.request_of(group, index))
        self.due.append(entry)
        self._to_hand_in.append(entry)

    def _hand_in(self, until: float = math.inf) -> None:
        """Hand to the verifier what has ended and is due by this tick, unless its verdict is known."""
        for entry in self._to_hand_in:
            if entry.tick > until or entry.ticket is not None:
                continue
            group, completion = self._ended_by(entry)
            is_open = completion.stop_reason is not StopReason.ABORTED and completion.judgement is None
            if is_open and self.journal.recall(entry.request) is None:
                entry.ticket = self.verifier.submit(group.problem.task(completion.answer, completion.stop_reason))
        self._to_hand_in = [entry for entry in self._to_hand_in if entry.tick > until]

    def _ended_by(self, entry: Due) -> tuple[PendingGroup, Completion]:
        group = self.groups[entry.request.group]
        completion = group.completions[entry.request.key.response_index]
        assert completion is not None, "only what has ended is due"
        return group, completion

    def _apply_due(self, now: int) -> None:
        due = [entry for entry in self.due if entry.tick <= now]
        if not due:
            return
        self.due = [entry for entry in self.due if entry.tick > now]
        self._hand_in(now)  # what is due before another tick
        with waiting(lambda: f"verdicts on {in_words([entry.request for entry in due])}", patience=NEVER):
            answers = self._verdicts_on(due)
        for entry in due:
            request, ticket = entry.request, entry.ticket
            group, completion = self._ended_by(entry)
            known = completion.judgement or self.journal.recall(request)
            judgement = known or (engine_fault(group.problem) if ticket is None else answers[ticket])
            if ticket is not None:
                self.journal.note(request, judgement)
                if completion.stop_reason is StopReason.EOS:  # only what ended by itself tells of the verifier
                    self._count_failure(judgement, group.problem.verifier)
            elif completion.judgement is not None:
                self._count_failure(judgement, f"data.environment = {group.problem.environment}")
            group.add_verdict(request.key.response_index, judgement)

    def _verdicts_on(self, due: Sequence[Due]) -> Mapping[int, Judgement]:
        start = time.perf_counter()
        try:
            return self.verifier.wait([entry.ticket for entry in due if entry.ticket is not None])
        finally:
            self.spent.verdicts += time.perf_counter() - start

    def _count_failure(self, judgement: Judgement, verifier: str) -> None:
        """A verifier that fails on every response does not measure them: stop instead of training on its verdicts."""
        has_failed = judgement.verdict in (Verdict.TIMEOUT, Verdict.CRASH)
        self.n_failures[verifier] = self.n_failures[verifier] + 1 if has_failed else 0
        if self.n_failures[verifier] >= MOST_FAILURES:
            is_part = judgement.message.startswith("rewards.parts.")  # a part's message begins with its own key
            of = verifier or "rewards.verifier"
            key, message = judgement.message.split(": ", 1) if is_part else (of, judgement.message)
            raise VerifierError(
                f"{key}: {MOST_FAILURES} verdicts in a row were {judgement.verdict.value}, "
                f"the last: {message or 'no message'}",
                remedy="Try it with `dapo verify`. Once fixed, resume from the newest checkpoint: dapo resume RUN",
            )
