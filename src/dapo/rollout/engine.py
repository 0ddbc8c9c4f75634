"""The streaming protocol of an inference engine, and its data.

Submit requests, advance tick by tick, receive completions as they end. All scheduling is in ticks, never in seconds,
so that a run is a function of its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dapo.models.policy import Policy
from dapo.rollout.noise import NoiseKey
from dapo.rollout.sampler import SamplingParams
from dapo.types import Completion

__all__ = ["Engine", "EngineState", "Fault", "Finished", "NoiseKey", "Request", "SamplingParams", "nothing"]


def nothing() -> None:
    """Does nothing: the default of `meanwhile`."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one response."""

    id: int  # unique in a run
    prompt: tuple[int, ...]
    key: NoiseKey
    max_new_tokens: int  # the end token included
    group: int  # requests of one group share a prompt
    may_continue: bool = False  # a turn of an episode: what it ends with may be the beginning of the next request
    stop: tuple[tuple[str, str], ...] = ()  # (begin, end): `end` after `begin` ends it as an end token does


Finished = tuple[Request, Completion]


@dataclass(frozen=True, slots=True)
class Fault:
    """A response the engine gave up; it came back with stop reason ABORTED."""

    tick: int
    request: Request
    position: int  # of the token in the response that could not be drawn
    reason: str


@dataclass(frozen=True)
class EngineState:
    """In-flight and waiting sequences, without their KV: `meta` goes into JSON, `arrays` into safetensors."""

    meta: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]


class Engine(Protocol):
    """Generates responses. Each depends on its request, the weights and the sampling parameters, on nothing else."""

    tick: int  # advances by one with every `advance` that is not paused
    faults: list[Fault]  # responses given up so far; the caller may clear it

    @property
    def n_in_flight(self) -> int:
        """Responses being generated."""
        ...

    @property
    def n_waiting(self) -> int:
        """Requests submitted that have not begun."""
        ...

    def capacity(self) -> int:
        """How many more requests could begin at the next tick."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, first come, first served. If one can never fit, an error names it, and none is queued.

        A later turn of an episode, under the id of the turn before it, goes before requests that have not begun.
        """
        ...

    def advance(self, meanwhile: Callable[[], None] = nothing) -> list[Finished]:
        """One tick: admit waiting requests, generate for all. Returns what ended, in order of submission.

        `meanwhile` is called exactly once, also by an engine that is empty or paused: where a device generates, while
        it does. It must leave the engine alone.
        """
        ...

    def abort(self, ids: Iterable[int]) -> list[Finished]:
        """End these now, with the tokens they have. Ids that have ended already are ignored, and not continued."""
        ...

    def load_weights(self, policy: Policy, version: int) -> None:
        """Sample all further tokens from these weights. In-flight responses continue on recomputed KV."""
        ...

    def pause(self) -> None:
        """Until `resume`, `advance` does nothing and the tick does not change. Submitting and aborting still work."""
        ...

    def resume(self) -> None: ...

    def snapshot(self) -> EngineState:
        """Everything needed to continue. This engine and one restored from the state then generate the same bits."""
        ...

    def restore(self, state: EngineState) -> None:
        """Continue from a snapshot and drop whatever is in flight. The weights must be loaded already."""
        ...

    def fork_for_eval(self, sampling: SamplingParams) -> Engine:
        """Another engine on the same weights and memory, with its own sampling parameters. The two take turns."""
        ...

    def take_drafted(self) -> tuple[int, int]:
        """Tokens that were drafted, and those of them that were accepted, since this was asked last."""
        ...

    def close(self) -> None:
        """Free what the engine holds besides the policy. Neither it nor a fork can be used afterwards."""
        ...


def concatenated(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any] | type) -> NDArray[Any]:
    """One array from many, also from none."""
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
