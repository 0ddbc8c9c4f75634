"""The local engine: continuous batching over a paged KV cache, on the trainer's own weights.

Running responses sit on rows 0..n−1 and hold pages as they grow. When pages run out, the responses submitted last give
theirs up: their keys and values wait on the host and come back as they were. Nothing loops over the running responses
but what happens once per response: beginning, end, and being put aside.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo.errors import EngineError
from dapo.models.policy import Policy
from dapo.rollout.engine import Engine, EngineState, Fault, Finished, Request, SamplingParams
from dapo.rollout.families import STEP, check_family, rounded_up
from dapo.rollout.local.cache import affordable_pages
from dapo.rollout.local.decoder import OpsKind, PagedDecoder
from dapo.rollout.local.pages import PagePool, Pages, pages_for
from dapo.rollout.local.prefixes import Prefix, prefill, prefix_of_prompt, prefixes_of, tail_of
from dapo.rollout.local.prompts import Prompts
from dapo.rollout.local.running import BAD, ENDED, RUNNING, RunningBatch
from dapo.rollout.partial import PartialResponse, completions
from dapo.rollout.queue import QueuedEngine
from dapo.types import StopReason


class LocalEngine(QueuedEngine):
    """Writes responses with the trainer's own weights, in the trainer's process. Implements `Engine`.

    `max_concurrent` responses at a time, each of at most `max_tokens` with its prompt, in a cache of `kv_gib` GiB or
    `kv_tokens` tokens (None: enough for all at their full length, as far as memory allows). A tick writes up to
    `tokens_per_tick` tokens of each. An update of the weights in place must be announced by `load_weights` before the
    next tick.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        sampling: SamplingParams,
        max_concurrent: int,
        max_tokens: int,
        version: int = 0,
        kv_gib: float | None = None,
        kv_tokens: int | None = None,
        tokens_per_tick: int | None = None,
        page_tokens: int | None = None,
        ops: OpsKind = "auto",
    ) -> None:
        super().__init__(max_concurrent=max_concurrent, max_tokens=max_tokens)
        is_cuda = policy.device.type == "cuda"
        self.sampling = sampling
        self.version = version
        # On a GPU the host looks in every few tokens; on a CPU looking costs nothing.
        self.tokens_per_tick = tokens_per_tick or (8 if is_cuda else 1)
        self.page_tokens = page_tokens or (64 if is_cuda else 16)
        self._kv_gib, self._kv_tokens = kv_gib, kv_tokens
        self._ops: OpsKind = ops
        self._is_stale = False  # the KV of every row is void
        self._is_crowded = False  # a response was put aside; none begins until another ends
        self._bind(policy)

    def _bind(self, policy: Policy) -> None:
        self.policy = policy
        n_rows = rounded_up(self.max_concurrent)
        check_family(policy)
        n_pages = 1 + affordable_pages(
            policy,
            max_concurrent=self.max_concurrent,
            max_tokens=self.max_tokens,
            page_tokens=self.page_tokens,
            kv_gib=self._kv_gib,
            kv_tokens=self._kv_tokens,
        )
        self._decoder = PagedDecoder(
            policy,
            n_rows=n_rows,
            max_tokens=self.max_tokens,
            n_pages=n_pages,
            page_tokens=self.page_tokens,
            tokens_per_tick=self.tokens_per_tick,
            ops=self._ops,
        )
        self.logp_dtype = np.float64 if policy.dtype == torch.float64 else np.float32
        self._clear()

    def _clear(self) -> None:
        """Nobody waits, nobody runs, all pages are free."""
        decoder = self._decoder
        decoder.forget()
        self._pool = PagePool(decoder.cache.n_pages)
        self._running = RunningBatch(decoder.n_rows, self.max_tokens, decoder.rows.table.shape[1], self.logp_dtype)
        self._waiting, self._ids = deque(), set()
        self._prompts = Prompts(self._pool, decoder.cache)
        self._put_aside: dict[int, Tensor] = {}  # request id -> keys and values of its own pages, on the host
        self._n_rows = 0  # rows in use, gaps included
        self._gaps: list[int] = []  # rows below _n_rows whose response has ended

    def fork_for_eval(self, sampling: SamplingParams) -> LocalEngine:
        """Another engine on the same cache and graphs, with its own sampling parameters: an evaluation amid training.

        What is in flight here stands up and goes on, on fresh keys and values, when the other one is done.
        """
        self.snapshot()
        self._decoder.refresh()
        other = copy.copy(self)
        other.sampling, other.faults = sampling, []
        other.tick = other._n_submitted = 0
        other._is_paused = other._is_crowded = other._is_stale = False
        other._clear()
        return other

    @property
    def n_in_flight(self) -> int:
        return self._n_rows - len(self._gaps)

    @torch.inference_mode()
    def advance(self) -> list[Finished]:
        if self._is_paused:
            return []
        self.tick += 1
        try:
            return self._advance()
        except BaseException:  # what was half done has no keys and values one could trust
            self._is_stale = True
            raise

    def _advance(self) -> list[Finished]:
        self._admit()
        n, running = self._n_rows, self._running
        if n == 0:
            return []
        longest = int(running.length[:n].max())
        pages = running.table[:n, : int(running.n_pages[:n].max()) + STEP]  # zeros behind: no page of an earlier tenant
        length, stop, token, logp = self._decoder.tick(
            running.state(n),
            pages,
            self.sampling,
            n_steps=self.tokens_per_tick,
            longest=longest,
            serial=running.serial[:n],
        )
        running.append(n, np.where(running.is_taken[:n], length - running.length[:n], 0), token, logp, self.version)
        ended = np.flatnonzero(running.is_taken[:n] & (stop != RUNNING)).tolist()
        self._report([row for row in ended if stop[row] == BAD])
        reasons = {ENDED: StopReason.EOS, BAD: StopReason.ABORTED}
        return self._finish({row: reasons.get(int(stop[row]), StopReason.LENGTH) for row in ended})

    @torch.inference_mode()
    def abort(self, ids: Iterable[int]) -> list[Finished]:
        wanted = set(ids) & self._ids
        dropped = self._drop(wanted)
        for item in dropped:
            self._put_aside.pop(item.request.id, None)
            self._prompts.leave(self._prompts.of(item.request.prompt))
        rows = [
            row
            for row, request in enumerate(self._running.requests[: self._n_rows])
            if request and request.id in wanted
        ]
        running = self._finish(dict.fromkeys(rows, StopReason.ABORTED))
        return running + completions(dropped, [StopReason.ABORTED] * len(dropped), self.policy.tokenizer)

    def load_weights(self, policy: Policy, version: int) -> None:
        """Bump the version and void all KV. The weights are the trainer's own tensors, so nothing is transferred."""
        if policy is not self.policy:
            state = self.snapshot()
            self._bind(policy)
            self.restore(state)
        self._decoder.refresh()
        self.version = version
        self._is_stale = True

    @torch.inference_mode()
    def snapshot(self) -> EngineState:
        """Everybody stands up and queues again without KV, here too, so that going on and being restored are one."""
        rows = np.flatnonzero(self._running.is_taken[: self._n_rows])
        standing = [self._stand_up(int(row)) for row in sorted(rows, key=lambda row: self._running.order[row])]
        self._waiting.extendleft(reversed(standing))
        self._n_rows, self._gaps = 0, []
        self._put_aside.clear()
        self._is_stale, self._is_crowded = True, False
        return self._state(self._waiting, self.logp_dtype, version=self.version, n_running=len(rows))

    @torch.inference_mode()
    def restore(self, state: EngineState) -> None:
        items = self._items_of(state)
        self._clear()
        self._go_on([], state)
        for item in items:
            self._enqueue(item)
        self.version = state.meta["version"]
        self._is_stale, self._is_crowded = True, False

    # ------------------------------------------------------------------ who sits where

    def _check(self, request: Request, seen: set[int]) -> None:
        super()._check(request, seen)
        need = pages_for(len(request.prompt) + request.max_new_tokens, self.page_tokens) + 1
        if need > self._pool.n_pages:
            raise EngineError(
                f"request {request.id} (problem {request.key.problem!r}): alone it needs {need} pages of "
                f"{self.page_tokens} tokens, and the KV cache has {self._pool.n_pages}.",
                remedy="Raise rollout.kv_cache_gib, or lower limits.max_response_tokens.",
            )

    def _enqueue(self, item: PartialResponse) -> None:
        self._prompts.join(item.request.prompt)
        super()._enqueue(item)

    def _admit(self) -> None:
        """Pages for the tokens of this tick; free rows to waiting requests; KV for what has none."""
        prefixes: list[Prefix] = []
        copies: list[tuple[Pages, Pages]] = []
        if self._is_stale:
            self._decoder.forget()
            self._prompts.void()
            self._put_aside.clear()
        self._grow()
        if self._is_stale:
            running = np.flatnonzero(self._running.is_taken[: self._n_rows]).tolist()
            self._running.renew(running)
            for row in running:
                prefixes += prefixes_of(self._running, row)
                copies += tail_of(self._running, row)
        self._is_stale = False
        returns: list[tuple[Pages, Tensor]] = []
        while self._waiting and not (self._is_crowded and self.n_in_flight):
            seat = self._begin(self._waiting[0])
            if seat is None:
                break
            row, item = seat, self._waiting.popleft()
            aside = self._put_aside.pop(item.request.id, None)
            prompt = self._running.prompt(row)
            if aside is not None:
                returns.append((self._running.own_pages(row)[: aside.shape[2]], aside))
                prefixes += prefix_of_prompt(prompt)
            else:
                prefixes += prefixes_of(self._running, row)
                copies += tail_of(self._running, row)
        self._close_gaps()
        prefill(self._decoder, prefixes)
        if prefixes:  # padding may have left numbers on page 0 that are not finite, and 0 times those is not 0
            self._decoder.cache.clear(np.zeros(1, np.int32))
        if copies:
            source, target = (np.concatenate(parts) for parts in zip(*copies, strict=True))
            self._decoder.cache.copy(source, target)
        for pages, content in returns:
            self._decoder.cache.write(pages, content)

    def _grow(self) -> None:
        """Pages for the next tokens of all running responses; the youngest make room where there are none."""
        running = self._running
        while True:
            rows = np.flatnonzero(running.is_taken[: self._n_rows])
            counts = np.maximum(
                self._pages_wanted(running.length[rows], running.limit[rows]) - running.n_pages[rows], 0
            )
            missing = int(counts.sum()) - self._pool.n_free
            if missing <= 0:
                break
            if not self._prompts.evict_idle():
                self._make_way(int(rows[np.argmax(running.order[rows])]))
        if counts.any():
            running.add_pages(rows, counts.astype(np.int64), self._pool.take(int(counts.sum())))

    def _pages_wanted(self, length: NDArray[np.int32], limit: NDArray[np.int32]) -> NDArray[np.int32]:
        """Pages that hold the keys of all tokens which a tick reads. The last token before the limit is never read."""
        return -(-np.minimum(length + self.tokens_per_tick - 1, limit - 1) // self.page_tokens)

    def _begin(self, item: PartialResponse) -> int | None:
        """Seat a waiting request if there is a row and pages for it; its row."""
        if not self._gaps and self._n_rows == self.max_concurrent:
            return None
        request = item.request
        prompt = self._prompts.of(request.prompt)
        length = np.array(len(request.prompt) + len(item.tokens), np.int32)
        limit = np.array(len(request.prompt) + request.max_new_tokens, np.int32)
        own = max(int(self._pages_wanted(length, limit)), prompt.n_pages) - prompt.n_shared
        need = own + (0 if len(prompt.pages) else prompt.n_pages)
        # Running responses keep what they will want over the next ticks, lest the newcomer be put aside at once.
        reserve = pages_for(4 * self.n_in_flight * self.tokens_per_tick, self.page_tokens)
        while self.n_in_flight and need + reserve > self._pool.n_free:
            if not self._prompts.evict_idle(but=prompt):
                return None
        while need > self._pool.n_free:
            if not self._prompts.evict_idle(but=prompt):
                return None
        if not len(prompt.pages):
            prompt.pages = self._pool.take(prompt.n_pages)
        if self._gaps:
            row = self._gaps.pop(0)
        else:
            row, self._n_rows = self._n_rows, self._n_rows + 1
        prompt.n_seated += 1
        self._running.put(row, item, prompt, np.concatenate([prompt.shared, self._pool.take(own)]))
        return row

    def _make_way(self, row: int) -> None:
        """Put a running response aside, its keys and values with it, to the front of the queue."""
        request = self._running.request(row)
        assert self.n_in_flight > 1, "a response alone always fits: `submit` refuses others"
        if not self._is_stale:
            # Only what is filled: the newest token's page may be there already, empty.
            n_tokens, n_shared = int(self._running.length[row]) - 1, self._running.prompt(row).n_shared
            pages = self._running.own_pages(row)[: pages_for(n_tokens, self.page_tokens) - n_shared]
            self._decoder.write_back(
                int(self._running.serial[row]), pages, slice(n_shared * self.page_tokens, n_tokens)
            )
            self._put_aside[request.id] = self._decoder.cache.read(pages)
        self._waiting.appendleft(self._stand_up(row))
        self._gaps = sorted([*self._gaps, row])
        self._is_crowded = True

    def _stand_up(self, row: int) -> PartialResponse:
        """Free a row and its pages; what was written there."""
        item, prompt = self._running.read(row), self._running.prompt(row)
        self._pool.give(self._running.own_pages(row))
        prompt.n_seated -= 1
        self._running.free(row)
        return item

    def _close_gaps(self) -> None:
        """Move the last responses into rows that ended, so that rows in use have no gap."""
        n = self.n_in_flight
        target = sorted(gap for gap in self._gaps if gap < n)
        if target:
            source = (n + np.flatnonzero(self._running.is_taken[n : self._n_rows])).tolist()
            self._running.move(source, target)
        self._n_rows, self._gaps = n, []

    # ------------------------------------------------------------------ ends

    def _report(self, bad: Sequence[int]) -> None:
        """Note responses whose logits were not finite, and clean their pages for the next tenant."""
        for row in bad:
            position = int(self._running.length[row] - self._running.start[row])
            self.faults.append(Fault(self.tick, self._running.request(row), position, "logits are not finite"))
            self._decoder.cache.clear(np.append(self._running.own_pages(row), 0).astype(np.int32))
            self._running.prompt(row).is_suspect = True

    def _finish(self, reasons: dict[int, StopReason]) -> list[Finished]:
        """Free these rows and return their completions in order of submission."""
        if not reasons:
            return []
        rows = sorted(reasons, key=lambda row: self._running.order[row])
        items = []
        for row in rows:
            prompt = self._running.prompt(row)
            items.append(self._stand_up(row))
            self._prompts.leave(prompt)
        self._gaps = sorted([*self._gaps, *rows])
        self._ids -= {item.request.id for item in items}
        self._is_crowded = False
        return completions(items, [reasons[row] for row in rows], self.policy.tokenizer)


if TYPE_CHECKING:
    _implements: type[Engine] = LocalEngine
