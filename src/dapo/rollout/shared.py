"""The engines of all ranks as one: requests wait in one queue and go to whichever rank has a slot for them.

Every rank makes the same calls in the same order and gets the same answers. All ranks tick together. A request is
assigned to a rank only when that rank can start it, so none idles behind another's long tail. A response depends on its
request and the weights alone, so which rank generates it changes nothing but the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dapo.distributed.message import to_bytes
from dapo.distributed.world import World
from dapo.errors import EngineError
from dapo.models.policy import Policy
from dapo.rollout.engine import Engine, EngineState, Finished, SamplingParams, nothing
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.messages import Expected, decode, decode_begun, encode
from dapo.rollout.partial import PartialResponse, completions, from_state, to_state
from dapo.rollout.queue import QueuedEngine
from dapo.rollout.vllm.engine import VllmEngine
from dapo.types import Completion, StopReason


class SharedEngine(QueuedEngine):
    """Implements `Engine` over one engine per rank; `max_concurrent` responses in all.

    Where `ranks_per_engine` neighbours hold one model together, they get the same requests and generate the same
    tokens; the first of them reports.
    """

    def __init__(
        self, own: LocalEngine | VllmEngine, world: World, *, max_concurrent: int, ranks_per_engine: int = 1
    ) -> None:
        super().__init__(max_concurrent=max_concurrent, max_tokens=own.max_tokens)
        self.own, self.world, self.ranks_per_engine = own, world, ranks_per_engine
        own.is_shared = world.size > 1
        self._running: dict[int, tuple[int, PartialResponse]] = {}  # request id -> (rank, as it was handed out)
        self._homes: dict[int, int] = {}  # request id of an episode that waits -> the rank that keeps its KV

    @property
    def policy(self) -> Policy:
        return self.own.policy

    def fork_for_eval(self, sampling: SamplingParams) -> SharedEngine:
        """Another one on the same weights and memory. The two take turns."""
        sizes = {"max_concurrent": self.max_concurrent, "ranks_per_engine": self.ranks_per_engine}
        return SharedEngine(self.own.fork_for_eval(sampling), self.world, **sizes)

    def take_drafted(self) -> tuple[int, int]:
        """Of this rank."""
        return self.own.take_drafted()

    def close(self) -> None:
        """Free what the engine holds besides the policy."""
        self.own.close()

    @property
    def n_in_flight(self) -> int:
        return len(self._running)

    def advance(self, meanwhile: Callable[[], None] = nothing) -> list[Finished]:
        if self._is_paused:
            meanwhile()
            return []
        self.tick += 1
        self._hand_out()
        finished = self._shared(self.own.advance(meanwhile))
        if not self._reports:
            self.own.faults.clear()
        self.faults = self.own.faults  # of this rank
        return finished

    def abort(self, ids: Iterable[int]) -> list[Finished]:
        asked = set(ids)
        wanted = asked & self._ids
        self.own.abort([number for number in asked if self._homes.pop(number, None) is not None])
        if not wanted:
            return []
        dropped = self._drop(wanted)
        unseen = completions(dropped, [StopReason.ABORTED] * len(dropped), None)
        if not wanted & self._running.keys():
            return unseen
        return self._shared(self.own.abort(wanted)) + unseen

    def load_weights(self, policy: Policy, version: int) -> None:
        self.own.load_weights(policy, version)

    def snapshot(self) -> EngineState:
        """The snapshot that one engine of this size would take, so that any number of ranks can resume from it."""
        n_running = len(self._running)
        own = self.own.snapshot()
        self.own.restore(to_state([], self.own.logp_dtype, {**own.meta, "n_running": 0}))
        self._homes.clear()
        started: list[PartialResponse] = []
        sent = to_bytes(own.meta, own.arrays) if n_running and self._reports else b""
        for rank, data in enumerate(self.world.exchange(sent)):
            started += decode_begun(data, self._expected(rank)) if data else []
        self._waiting.extendleft(sorted(started, key=lambda item: item.order, reverse=True))
        self._running.clear()
        waiting, version = self._waiting, self.own.version
        return self._state(waiting, self.own.logp_dtype, version=version, n_running=n_running)

    def restore(self, state: EngineState) -> None:
        items = from_state(state)
        self._checked(items)
        self.own.restore(to_state([], self.own.logp_dtype, {**state.meta, "n_running": 0}))
        self._resume_from(items, state)
        self._running, self._homes = {}, {}

    # ------------------------------------------------------------------ which rank generates what

    @property
    def _reports(self) -> bool:
        return self.world.rank % self.ranks_per_engine == 0

    def _hand_out(self) -> None:
        """Assign waiting requests to free slots, first come, first served: a group goes where most slots are free.

        A later turn goes where the turns before it were, as soon as a slot is free there. Others leave it one if they
        can, so that it seldom waits.
        """
        ranks = range(0, self.world.size, self.ranks_per_engine)  # that report for an engine
        free = dict.fromkeys(ranks, self.own.max_concurrent)
        for rank, _ in self._running.values():
            free[rank] -= 1
        awaited = Counter(self._homes.values())
        mine: list[PartialResponse] = []
        staying: list[PartialResponse] = []
        home, group = 0, None
        while self._waiting and len(self._running) < self.max_concurrent:
            item = self._waiting.popleft()
            number = item.request.id
            if number in self._homes:
                if not free[self._homes[number]]:
                    staying.append(item)
                    continue
                rank = self._homes.pop(number)
                awaited[rank] -= 1
            else:
                if item.request.group != group or free[home] <= awaited[home]:
                    home = max(ranks, key=lambda rank: (free[rank] > 0, free[rank] - awaited[rank], -rank))
                    group = item.request.group
                assert free[home], "the ranks together have at least max_concurrent slots"
                rank = home
            free[rank] -= 1
            self._running[number] = (rank, item)
            self.own.stops.expect(item.request)
            if 0 <= self.world.rank - rank < self.ranks_per_engine:
                mine.append(item)
        self._waiting.extendleft(reversed(staying))
        self.own.take_over(mine)

    def _shared(self, own: Sequence[Finished]) -> list[Finished]:
        """What ended on any rank, in order of submission."""
        ended: list[tuple[int, Finished]] = []
        sent = encode(own, self.own.logp_dtype) if own and self._reports else b""
        for rank, data in enumerate(self.world.exchange(sent)):
            reported = decode(data, self._expected(rank)) if data else []
            if rank == self.world.rank - self.world.rank % self.ranks_per_engine:
                self._check_agreement(rank, own, reported)
            for number, completion in reported:
                home, item = self._running.pop(number)
                if item.request.may_continue and completion.stop_reason is StopReason.EOS:
                    self._homes[number] = home
                ended.append((item.order, (item.request, completion)))
        self._ids -= {request.id for _, (request, _) in ended}
        return [finished for _, finished in sorted(ended, key=lambda pair: pair[0])]

    def _check_agreement(self, first: int, own: Sequence[Finished], reported: Sequence[tuple[int, Completion]]) -> None:
        """Ranks that hold one model together must have sampled the same tokens, or they would diverge unnoticed."""
        here = {request.id: completion.tokens.tolist() for request, completion in own}
        if here != {number: completion.tokens.tolist() for number, completion in reported}:
            raise EngineError(
                f"rollout.tensor_parallel = {self.ranks_per_engine}: rank {self.world.rank} and rank {first} hold "
                "one model together and generated different responses.",
                remedy="Resume from the newest checkpoint with rollout.tensor_parallel = 1 or rollout.engine = local.",
            )

    def _expected(self, rank: int) -> Expected:
        return Expected(
            rank,
            self._running,
            n_vocabulary=self.policy.head.weight.shape[0],
            newest_version=self.own.version,
            logp_dtype=self.own.logp_dtype,
            eos_ids=self.policy.eos_ids,
            stops=self.own.stops,
        )


if TYPE_CHECKING:
    _implements: type[Engine] = SharedEngine
