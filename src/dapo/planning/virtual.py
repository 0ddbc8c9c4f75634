"""A virtual clock for the real sampling code: an engine without a model, and a verifier to match.

Lengths, pass rates and the cost of a tick are given. All decisions are made by the code that trains.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, cast

import numpy as np

from dapo.rollout.engine import EngineState, Fault, Finished, Request, SamplingParams, nothing
from dapo.rollout.noise import uniform_of
from dapo.types import Completion, Judgement, Problem, StopReason, Task, Verdict


@dataclass(frozen=True, slots=True)
class TickCost:
    """Seconds of one decode step: a part for the weights, a part for each running response."""

    base: float = 1.5e-3
    per_response: float = 8e-6

    def of(self, running: int) -> float:
        return self.base + self.per_response * running


class VirtualEngine:
    """Implements `Engine` on a virtual clock; `length_of` says how long each response gets."""

    def __init__(
        self, *, max_concurrent: int, length_of: Callable[[Request], int], cost: TickCost | None = None
    ) -> None:
        self.tick = 0
        self.seconds = 0.0
        self.faults: list[Fault] = []
        self.max_concurrent = max_concurrent
        self.length_of = length_of
        self.cost = cost or TickCost()
        self.version = 0
        self._waiting: deque[Request] = deque()
        self._running: dict[int, tuple[Request, int, int]] = {}  # id -> (request, length, tick it began)
        self._ends: list[tuple[int, int, int]] = []  # heap of (tick it ends, order it began, id), aborted ones included
        self._n_begun = 0
        self._loaded: list[tuple[int, int]] = [(0, 0)]  # (tick, version) of every change of weights

    def fork_for_eval(self, _sampling: SamplingParams) -> VirtualEngine:
        return VirtualEngine(max_concurrent=self.max_concurrent, length_of=self.length_of, cost=self.cost)

    def take_drafted(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        """Holds nothing."""

    @property
    def n_in_flight(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def capacity(self) -> int:
        return max(0, self.max_concurrent - len(self._running) - len(self._waiting))

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)

    def advance(self, meanwhile: Callable[[], None] = nothing) -> list[Finished]:
        """Jump to the next tick at which a response ends: nothing is decided in between."""
        meanwhile()
        while self._waiting and len(self._running) < self.max_concurrent:
            request = self._waiting.popleft()
            length = max(1, min(self.length_of(request), request.max_new_tokens))
            self._running[request.id] = (request, length, self.tick)
            heapq.heappush(self._ends, (self.tick + length, self._n_begun, request.id))
            self._n_begun += 1
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        if not self._running:
            return []
        ticks = self._ends[0][0] - self.tick
        self.seconds += ticks * self.cost.of(len(self._running))
        self.tick += ticks
        ended = []
        while self._ends and self._ends[0][0] == self.tick:
            entry = self._running.pop(heapq.heappop(self._ends)[2], None)
            if entry is not None:
                ended.append(entry)
        return [(request, self._completion(request, began, length)) for request, length, began in ended]

    def abort(self, ids: Iterable[int]) -> list[Finished]:
        gone = set(ids)
        self._waiting = deque(request for request in self._waiting if request.id not in gone)
        ended = [self._running.pop(i) for i in sorted(gone) if i in self._running]
        return [
            (request, self._completion(request, began, self.tick - began, StopReason.ABORTED))
            for request, _, began in ended
        ]

    def load_weights(self, policy: Any, version: int) -> None:  # noqa: ARG002
        self.version = version
        self._loaded.append((self.tick, version))

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def snapshot(self) -> EngineState:
        raise NotImplementedError("a virtual engine is never checkpointed")

    def restore(self, state: EngineState) -> None:
        raise NotImplementedError("a virtual engine is never checkpointed")

    def _completion(self, request: Request, began: int, length: int, stop: StopReason | None = None) -> Completion:
        reason = stop or (StopReason.LENGTH if length >= request.max_new_tokens else StopReason.EOS)
        version = np.empty(length, np.int32)
        for tick, loaded in self._loaded:  # the last change before a token was sampled counts
            if tick < began + length:
                version[max(0, tick - began) :] = loaded
        tokens, logp = np.zeros(length, np.int32), np.zeros(length, np.float32)
        return Completion(tokens, logp, version, reason, name_of(request))


def name_of(request: Request) -> str:
    """What a virtual response says: its own name, by which it is verified."""
    return f"{request.key.problem}/{request.key.visit}/{request.key.response_index}"


class VirtualJudge:
    """Right with the problem's pass rate, by a hash of the response's name; a truncated response is never right."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._answers: dict[int, Judgement] = {}
        self._next = 0

    def submit(self, task: Task) -> int:
        passes = uniform_of(f"{self.seed}/verdict/{task.response}") < cast(float, task.meta["pass_rate"])
        is_right = passes and task.stop_reason is not StopReason.LENGTH
        verdict = Verdict.CORRECT if is_right else Verdict.WRONG
        self._next += 1
        self._answers[self._next] = Judgement(verdict, 1.0 if is_right else -1.0, reference=task.answer)
        return self._next

    def wait(self, tickets: Iterable[int]) -> dict[int, Judgement]:
        return {ticket: self._answers.pop(ticket) for ticket in tickets}


class EndlessSource:
    """Problems 0, 1, 2, … with a spread of pass rates."""

    def __init__(self, pass_rate_of: Callable[[int], float]) -> None:
        self.pass_rate_of = pass_rate_of
        self.start = self.at = 0

    def start_step(self) -> None:
        self.start = self.at

    def next(self) -> tuple[Problem, int, tuple[int, ...]] | None:
        problem = Problem(str(self.at), "", "", meta={"pass_rate": self.pass_rate_of(self.at)})
        self.at += 1
        return problem, 0, (0,)

    def rewind(self, n_used: int) -> None:
        self.at = self.start + n_used

    def observe(self, group: Any) -> None:
        """Nothing to learn from: problems do not come back."""


def log_normal_lengths(mu: float, sigma: float, seed: int = 0) -> Callable[[Request], int]:
    """exp(N(mu, sigma²)) tokens, fixed for each response by its name."""

    def length_of(request: Request) -> int:
        u = uniform_of(f"{seed}/length/{name_of(request)}")
        return round(math.exp(mu + sigma * NormalDist().inv_cdf(u)))

    return length_of


def half_mixed(problem: int, seed: int = 0) -> float:
    """A quarter of the problems is never solved, a quarter always, the rest 10 % to 90 % of the time."""
    u = uniform_of(f"{seed}/pass-rate/{problem}")
    return 0.0 if u < 0.25 else 1.0 if u < 0.5 else 0.1 + 0.8 * (u - 0.5) / 0.5
