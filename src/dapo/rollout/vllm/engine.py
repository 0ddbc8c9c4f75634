"""The streaming protocol on a vLLM that runs in this process, step by step, with its own weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from dapo.models.policy import Policy
from dapo.rollout.engine import Engine, EngineState, Fault, Finished, SamplingParams, nothing
from dapo.rollout.partial import completions
from dapo.rollout.queue import QueuedEngine
from dapo.rollout.stops import Stops
from dapo.rollout.vllm.check import check_weights
from dapo.rollout.vllm.core import NewTokens, VllmCore
from dapo.rollout.vllm.response import Response
from dapo.types import StopReason


class VllmEngine(QueuedEngine):
    """Generates with vLLM on a copy of the policy's weights. Implements `Engine`, as far as vLLM can.

    The noise is vLLM's own, seeded per response from its `NoiseKey`: the same requests, submitted in the same order,
    give the same responses, but a response may change in its last bits, and then in its tokens, with what else is in
    the batch. A tick is one step of vLLM: prompts that do not fit into one step start later, and a response that vLLM
    preempts under memory pressure gets no token in that tick. Under top-p or top-k the log-probs are those of the
    truncated, renormalised distribution; training refuses both.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        sampling: SamplingParams,
        max_concurrent: int,
        max_tokens: int,
        version: int = 0,
        memory_fraction: float = 0.4,
        tensor_parallel: int = 1,
        core: VllmCore | None = None,
    ) -> None:
        if core is None:
            core = VllmCore(
                policy,
                max_concurrent=max_concurrent,
                max_tokens=max_tokens,
                memory_fraction=memory_fraction,
                tensor_parallel=tensor_parallel,
            )
            try:
                core.load(policy)
                check_weights(core, policy, max_tokens)
            except BaseException:  # whatever stopped it: leave no vLLM behind
                core.close()
                raise
        super().__init__(max_concurrent=max_concurrent, max_tokens=max_tokens)
        self.core = core
        self.policy = policy
        self.sampling = sampling
        self.logp_dtype = np.float32
        self.stops = Stops(policy.tokenizer, policy.head.weight.shape[0])
        self.version = version
        self._running: dict[int, Response] = {}  # by request id, in order of submission

    def fork_for_eval(self, sampling: SamplingParams) -> VllmEngine:
        """Another engine on the same vLLM, with its own sampling parameters, to evaluate during training.

        The two take turns: the one that ticks owns the vLLM. What the other has in flight waits and continues later.
        """
        sizes = {"max_concurrent": self.max_concurrent, "max_tokens": self.max_tokens}
        other = VllmEngine(self.policy, sampling=sampling, version=self.version, core=self.core, **sizes)
        other.stops = self.stops
        return other

    @property
    def n_in_flight(self) -> int:
        return len(self._running)

    def advance(self, meanwhile: Callable[[], None] = nothing) -> list[Finished]:
        meanwhile()
        if self._is_paused:
            return []
        self.tick += 1
        while self._waiting and len(self._running) < self.max_concurrent:
            item = Response.of(self._waiting.popleft())
            self._running[item.request.id] = item
        if not self._running:
            return []
        self.core.set_owner(self)
        self._send()
        ended: dict[int, StopReason] = {}
        by_tag = {item.tag: item for item in self._running.values()}
        for new in self.core.step():
            item = by_tag[new.tag]
            reason = self._append(item, new)
            if reason is not None:
                ended[item.request.id] = reason
        if StopReason.ABORTED in ended.values():
            # The KV cache now holds NaN or inf, and 0 times those is not 0.
            self.withdraw()
            self.core.clear_kv()
        return self._finish(ended)

    def abort(self, ids: Iterable[int]) -> list[Finished]:
        wanted = set(ids)
        dropped = self._drop(wanted)
        running = [i for i in self._running if i in wanted]
        self.core.abort([tag for i in running if (tag := self._running[i].tag)])
        finished = self._finish(dict.fromkeys(running, StopReason.ABORTED))
        return finished + completions(dropped, [StopReason.ABORTED] * len(dropped), self.policy.tokenizer)

    def load_weights(self, policy: Policy, version: int) -> None:
        """Copy the policy's tensors into vLLM's model. What is in flight is sent again, to recompute its KV."""
        self.core.set_owner(self)
        self._void_kv()
        self.core.load(policy)
        self.policy = policy
        self.version = version

    def close(self) -> None:
        """Free vLLM's memory. Neither this engine nor a fork can be used afterwards."""
        self.core.close()

    def snapshot(self) -> EngineState:
        """Drops the KV here too: a restored engine recomputes it, and both must do the same computation."""
        self.core.set_owner(self)
        self._void_kv()
        items = [*(item.partial() for item in self._running.values()), *self._waiting]
        return self._state(items, self.logp_dtype, version=self.version, n_running=len(self._running))

    def restore(self, state: EngineState) -> None:
        items = self._items_of(state)
        self.core.set_owner(self)
        self._void_kv()
        n = state.meta["n_running"]
        self._running = {item.request.id: Response.of(item) for item in items[:n]}
        self._resume_from(items[n:], state)
        self.version = state.meta["version"]

    def withdraw(self) -> None:
        """Take everything in flight out of vLLM. The next tick sends it again, with its tokens so far as prompt."""
        self.core.abort([item.tag for item in self._running.values() if item.tag])
        for item in self._running.values():
            item.tag = None

    def _void_kv(self) -> None:
        self.withdraw()
        self.core.forget_prefixes()

    def _send(self) -> None:
        for item in self._running.values():
            if item.tag is None:
                self.stops.expect(item.request)
                item.tag = self.core.add(item, self.sampling, self.policy.eos_ids)

    def _append(self, item: Response, new: NewTokens) -> StopReason | None:
        """Append a step's new tokens. Returns the stop reason, if the response ended."""
        n_known = len(item.tokens)
        for token, logp in zip(new.tokens, new.logp, strict=True):
            if not math.isfinite(logp):
                self._fault(item, "logits are not finite")
                return StopReason.ABORTED
            item.tokens.append(token)
            item.logp.append(logp)
            item.version.append(self.version)
        n_kept = self.stops.end(item.request, np.array(item.tokens, np.int32), n_known)
        if n_kept is not None:
            self.core.abort([] if new.is_finished else [new.tag])
            item.keep(n_kept)
            return StopReason.EOS
        if not new.is_finished:
            return None
        item.tag = None
        if item.tokens and item.tokens[-1] in self.policy.eos_ids:
            return StopReason.EOS
        if len(item.tokens) >= item.request.max_new_tokens:
            return StopReason.LENGTH
        self._fault(item, f"vLLM gave it up ({new.why})")
        return StopReason.ABORTED

    def _fault(self, item: Response, reason: str) -> None:
        self.faults.append(Fault(self.tick, item.request, len(item.tokens), reason))

    def _finish(self, reasons: dict[int, StopReason]) -> list[Finished]:
        """Completions in order of submission."""
        items = sorted((self._running.pop(i) for i in reasons), key=lambda item: item.order)
        self._ids -= reasons.keys()
        partial = [item.partial() for item in items]
        return completions(partial, [reasons[item.request.id] for item in items], self.policy.tokenizer)


if TYPE_CHECKING:
    _implements: type[Engine] = VllmEngine
