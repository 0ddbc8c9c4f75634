"""The queue in front of an engine, first come, first served: what all our engines have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

from dapo.errors import EngineError
from dapo.rollout.draft import Drafter, Drafting
from dapo.rollout.engine import EngineState, Fault, Request
from dapo.rollout.partial import PartialResponse, check_request, from_state, to_state


class QueuedEngine(ABC):
    """Waiting requests and the tick; `max_concurrent` responses at a time, each of at most `max_tokens`."""

    def __init__(self, *, max_concurrent: int, max_tokens: int, drafting: Drafting | None = None) -> None:
        self.max_concurrent, self.max_tokens = max_concurrent, max_tokens
        self.drafter = Drafter(drafting or Drafting())
        self.tick = 0
        self.is_shared = False  # other ranks' engines advance with this one
        self.faults: list[Fault] = []
        self._waiting: deque[PartialResponse] = deque()
        self._ids: set[int] = set()  # waiting or in flight
        self._n_submitted = 0
        self._is_paused = False

    @property
    @abstractmethod
    def n_in_flight(self) -> int: ...

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def capacity(self) -> int:
        return max(0, self.max_concurrent - self.n_in_flight - self.n_waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        self.take_over([PartialResponse(request, order) for order, request in enumerate(requests, self._n_submitted)])
        self._n_submitted += len(requests)

    def take_over(self, items: Sequence[PartialResponse]) -> None:
        """Queue partial responses, perhaps of another engine; each keeps its place in the order of submission.

        Later turns of episodes go before what has not begun: else more and more episodes would be under way.
        """
        self._ids = self._checked(items, self._ids)
        for item in items:
            n_begun = sum(1 for _ in takewhile(lambda other: other.has_begun, self._waiting))
            self._enqueue(item, n_begun if item.request.key.start else len(self._waiting))

    def take_drafted(self) -> tuple[int, int]:
        return self.drafter.take_counts()

    def close(self) -> None:
        """Nothing to free: weights and cache end with the process."""
        return

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def _checked(self, items: Sequence[PartialResponse], ids: Collection[int] = ()) -> set[int]:
        """`ids` with those of the items; an error names the first request that can never be served."""
        seen = set(ids)
        for item in items:
            self._check(item.request, seen)
            seen.add(item.request.id)
        return seen

    def _check(self, request: Request, seen: set[int]) -> None:
        check_request(request, seen, self.max_tokens)

    def _enqueue(self, item: PartialResponse, place: int) -> None:
        self._waiting.insert(place, item)

    def _drop(self, ids: Collection[int]) -> list[PartialResponse]:
        """Take these out of the queue."""
        dropped = [item for item in self._waiting if item.request.id in ids]
        if dropped:
            self._waiting = deque(item for item in self._waiting if item.request.id not in ids)
            self._ids -= {item.request.id for item in dropped}
        return dropped

    # ------------------------------------------------------------------ in and out of a snapshot

    def _state(
        self, items: Sequence[PartialResponse], logp_dtype: type, *, version: int, n_running: int, **more: Any
    ) -> EngineState:
        """A snapshot with these items, running ones first."""
        meta = {
            "tick": self.tick,
            "version": version,
            "n_submitted": self._n_submitted,
            "n_running": n_running,
            "is_paused": self._is_paused,
            **more,
        }
        self.drafter.forget()
        return to_state(items, logp_dtype, meta)

    def _items_of(self, state: EngineState) -> list[PartialResponse]:
        """The items of a snapshot; an error names what cannot continue here."""
        n_running = state.meta["n_running"]
        if n_running > self.max_concurrent:
            raise EngineError(
                f"rollout.max_concurrent_sequences = {self.max_concurrent}: the snapshot has {n_running} "
                "responses in flight.",
                remedy="Resume with at least as many.",
            )
        items = from_state(state)
        self._checked(items)
        return items

    def _resume_from(self, items: Sequence[PartialResponse], state: EngineState) -> None:
        """Continue from a snapshot, with these of its items in the queue and the others in flight."""
        self._waiting, self._ids = deque(items), {raw["id"] for raw in state.meta["requests"]}
        self.tick, self._n_submitted = state.meta["tick"], state.meta["n_submitted"]
        self._is_paused = state.meta["is_paused"]
        self.drafter.forget()
