"""The local engine: continuous batching over a paged KV cache, on the trainer's own weights.

Running responses occupy rows 0..n−1 of the batch and take pages as they grow. When pages run out, the responses
submitted last are preempted: their keys and values are swapped out to the host and swapped in again bit for bit. An
episode that waits for its environment keeps its pages, or is swapped out too, and its next turn costs a prefill of the
new tokens only. No Python loop runs over the responses in a tick, only over those that are admitted, end or are
preempted.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dapo.errors import EngineError
from dapo.models.policy import Policy
from dapo.rollout.draft import Drafter, Drafting
from dapo.rollout.engine import Engine, EngineState, Fault, Finished, Request, SamplingParams, nothing
from dapo.rollout.families import STEP, check_family, rounded_up
from dapo.rollout.local.cache import affordable_pages
from dapo.rollout.local.decoder import OpsKind, PagedDecoder
from dapo.rollout.local.float8 import float8_bytes
from dapo.rollout.local.kept import Kept, KeptResponses
from dapo.rollout.local.pages import NO_PAGES, PagePool, Pages, default_page_tokens, pages_for
from dapo.rollout.local.persistent.step import MOST_ROWS
from dapo.rollout.local.prefixes import (
    Extension,
    Prefix,
    extend,
    extension_of,
    prefill,
    prefix_of_prompt,
    prefixes_of,
    tail_of,
)
from dapo.rollout.local.prompts import Prompts
from dapo.rollout.local.rows import BAD, ENDED, RUNNING, HostRows
from dapo.rollout.partial import PartialResponse, completions
from dapo.rollout.queue import QueuedEngine
from dapo.rollout.stops import Stops
from dapo.types import StopReason

TAIL_TICKS = 4  # ticks that are one where few rows are left; and how many have to pass in which nothing is submitted


class LocalEngine(QueuedEngine):
    """Generates with the trainer's own weights, in the trainer's process. Implements `Engine`.

    `max_concurrent` responses at a time, each of at most `max_tokens` with its prompt, in a cache of `kv_gib` GiB or
    `kv_tokens` tokens (None: enough for all at their full length, as far as memory allows). A tick generates up
    to `tokens_per_tick` tokens of each (in the tail of a rollout on a GPU those of TAIL_TICKS such ticks, and `tick`
    counts as many), or those of one pass over drafts (`drafting`). An update of the weights in place must be announced
    by `load_weights` before the next tick. `is_exact`: by kernels whose log-probs an `ExactPass` of the policy repeats
    to the last bit. `is_float8`: products of the layers in FP8.
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
        drafting: Drafting | None = None,
        is_exact: bool = False,
        is_float8: bool = False,
    ) -> None:
        super().__init__(max_concurrent=max_concurrent, max_tokens=max_tokens, drafting=drafting)
        is_cuda = policy.device.type == "cuda"
        self.sampling = sampling
        self.version = version
        # On a GPU the host reads results back every few tokens; on a CPU reading costs nothing.
        self.tokens_per_tick = tokens_per_tick or (8 if is_cuda else 1)
        self.page_tokens = page_tokens or default_page_tokens(policy.device)
        self._n_steps = self.tokens_per_tick  # of this tick
        self._quiet_ticks = 0  # since something was submitted
        self._kv_gib, self._kv_tokens = kv_gib, kv_tokens
        self._ops: OpsKind = ops
        self.is_exact, self.is_float8 = is_exact, is_float8
        self._is_stale = False  # the KV of every row is void
        self._has_memory_pressure = False  # a response was preempted; none is admitted until another ends
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
            set_aside=float8_bytes(policy) if self.is_float8 else 0,
        )
        self._decoder = PagedDecoder(
            policy,
            n_rows=max(n_rows, rounded_up(self.drafter.drafting.rows)),
            max_tokens=self.max_tokens,
            n_pages=n_pages,
            page_tokens=self.page_tokens,
            tokens_per_tick=self.tokens_per_tick * TAIL_TICKS,
            ops=self._ops,
            is_exact=self.is_exact,
            is_float8=self.is_float8,
        )
        self.logp_dtype = np.float64 if policy.dtype == torch.float64 else np.float32
        self.stops = Stops(policy.tokenizer, policy.head.weight.shape[0])
        self._clear()

    def _clear(self) -> None:
        """Empty queue, empty batch, all pages free."""
        self._quiet_ticks = 0
        decoder = self._decoder
        decoder.forget()
        self._pool = PagePool(decoder.cache.n_pages)
        self._rows = HostRows(
            rounded_up(self.max_concurrent), self.max_tokens, decoder.rows.table.shape[1], self.logp_dtype
        )
        self._waiting, self._ids = deque(), set()
        self._prompts = Prompts(self._pool, decoder.cache)
        self._kept = KeptResponses(self._pool, self._prompts, decoder.cache)
        self._n_rows = 0  # rows in use, gaps included
        self._gaps: list[int] = []  # rows below _n_rows whose response has ended

    def fork_for_eval(self, sampling: SamplingParams) -> LocalEngine:
        """Another engine on the same cache and graphs, with its own sampling parameters, to evaluate during training.

        Everything in flight here is preempted, and resumes on recomputed KV once the evaluation is over.
        """
        self.snapshot()
        self._decoder.refresh()
        other = copy.copy(self)
        other.sampling, other.faults, other.drafter = sampling, [], Drafter(self.drafter.drafting)
        other.tick = other._n_submitted = 0
        other._is_paused = other._has_memory_pressure = other._is_stale = False
        other._clear()
        return other

    @property
    def n_in_flight(self) -> int:
        return self._n_rows - len(self._gaps)

    @torch.inference_mode()
    def advance(self, meanwhile: Callable[[], None] = nothing) -> list[Finished]:
        if self._is_paused:
            meanwhile()
            return []
        self.tick += 1
        try:
            return self._advance(meanwhile)
        except BaseException:  # the tick may have stopped anywhere: recompute all keys and values
            self._is_stale = True
            raise

    def _advance(self, meanwhile: Callable[[], None]) -> list[Finished]:
        self._n_steps = self._tick_steps()
        self.tick += self._n_steps // self.tokens_per_tick - 1
        self._quiet_ticks += 1
        self._admit()
        n, rows = self._n_rows, self._rows
        if n == 0:
            meanwhile()
            return []

        def while_it_works() -> None:
            rows.settle()
            meanwhile()

        longest = int(rows.length[:n].max())
        # A few columns of zeros behind the last page overwrite those of an earlier response on the device.
        pages = rows.table[:n, : int(rows.n_pages[:n].max()) + STEP]
        state, serial = rows.state(n), rows.serial[:n]
        if any(drafts := self._drafts(n)):
            drawn = self._decoder.verify(
                state, pages, self.sampling, drafts, longest=longest, serial=serial, meanwhile=while_it_works
            )
            self.drafter.count(drafts, int((drawn[0] - rows.length[:n] - (drawn[1] != BAD)).sum()))
        else:
            drawn = self._decoder.tick(
                state,
                pages,
                self.sampling,
                n_steps=self._n_steps,
                longest=longest,
                serial=serial,
                meanwhile=while_it_works,
            )
        length, stop, token, logp = drawn
        n_new = np.where(rows.is_taken[:n], length - rows.length[:n], 0)
        rows.append(n, n_new, token, logp, self.version)
        is_drawn = np.arange(len(token))[:, None] < n_new  # [K, n]
        for row in np.flatnonzero((self.stops.may_complete[token] & is_drawn).any(axis=0) & (stop != BAD)).tolist():
            item = rows.read(row)
            n_kept = self.stops.end(item.request, item.tokens, len(item.tokens) - int(n_new[row]))
            if n_kept is not None:  # the tick's tokens after it were never drawn
                rows.length[row], stop[row] = rows.start[row] + n_kept, ENDED
        ended = np.flatnonzero(rows.is_taken[:n] & (stop != RUNNING)).tolist()
        self._report([row for row in ended if stop[row] == BAD])
        reasons = {ENDED: StopReason.EOS, BAD: StopReason.ABORTED}
        return self._finish({row: reasons.get(int(stop[row]), StopReason.LENGTH) for row in ended})

    def _tick_steps(self) -> int:
        """Tokens of the next tick: more in the tail, where steps are short beside the host's work.

        The tail is where few rows are left and nothing was submitted for a while: others may keep the queue.
        """
        is_tail = not self._waiting and not self._has_memory_pressure and self._quiet_ticks >= TAIL_TICKS
        has_few = 0 < self.n_in_flight <= MOST_ROWS and self._decoder.few is not None
        is_long = is_tail and has_few and not self.is_shared and not self.drafter.is_due(self.n_in_flight)
        return self.tokens_per_tick * (TAIL_TICKS if is_long else 1)

    def _drafts(self, n: int) -> list[list[int]]:
        """Guesses for rows 0..n−1, where drafting is due."""
        if not self.drafter.is_due(n):
            return []
        room = self._decoder.draft_room(self._rows.length[:n]).tolist()
        running = [self._rows.running(row) for row in range(n)]
        return self.drafter.drafts([replace(one, room=min(one.room, room[i])) for i, one in enumerate(running)])

    @torch.inference_mode()
    def abort(self, ids: Iterable[int]) -> list[Finished]:
        asked = set(ids)
        self._kept.drop(asked)
        wanted = asked & self._ids
        dropped = self._drop(wanted)
        for item in dropped:
            self._prompts.leave(self._prompts.of(item.request))
        rows = [
            row for row, request in enumerate(self._rows.requests[: self._n_rows]) if request and request.id in wanted
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
        """Preempts every running response and drops all KV.

        A restored engine has to recompute the KV. This one does so too, so that both continue with the same bits.
        """
        rows = np.flatnonzero(self._rows.is_taken[: self._n_rows])
        preempted = [self._release(int(row)) for row in sorted(rows, key=lambda row: self._rows.order[row])]
        self._waiting.extendleft(reversed(preempted))
        self._n_rows, self._gaps, self._quiet_ticks = 0, [], 0
        self._kept.clear()
        self._is_stale, self._has_memory_pressure = True, False
        return self._state(self._waiting, self.logp_dtype, version=self.version, n_running=len(rows))

    @torch.inference_mode()
    def restore(self, state: EngineState) -> None:
        items = self._items_of(state)
        self._clear()
        self._resume_from([], state)
        for item in items:
            self._enqueue(item, len(self._waiting))
        self.version = state.meta["version"]
        self._is_stale, self._has_memory_pressure = True, False

    # ------------------------------------------------------------------ admission, growth, preemption

    def _check(self, request: Request, seen: set[int]) -> None:
        super()._check(request, seen)
        need = pages_for(len(request.prompt) + request.max_new_tokens, self.page_tokens) + 1
        if need > self._pool.n_pages:
            raise EngineError(
                f"request {request.id} (problem {request.key.problem!r}): alone it needs {need} pages of "
                f"{self.page_tokens} tokens, and the KV cache has {self._pool.n_pages}.",
                remedy="Raise rollout.kv_cache_gib, or lower limits.max_response_tokens.",
            )

    def _enqueue(self, item: PartialResponse, place: int) -> None:
        self._prompts.join(item.request)
        self._quiet_ticks = 0
        super()._enqueue(item, place)

    def _admit(self) -> None:
        """Take pages for the tokens of this tick, admit waiting requests to free rows, prefill what has no KV."""
        prefixes: list[Prefix] = []
        extensions: list[Extension] = []
        copies: list[tuple[Pages, Pages]] = []
        if self._is_stale:
            self._decoder.forget()
            self._prompts.void()
            self._kept.clear()
        self._grow()
        if self._is_stale:
            taken = np.flatnonzero(self._rows.is_taken[: self._n_rows]).tolist()
            self._rows.renew(taken)
            for row in taken:
                prefixes += prefixes_of(self._rows, row)
                copies += tail_of(self._rows, row)
        self._is_stale = False
        swapped_in: list[tuple[Pages, Tensor]] = []
        while self._waiting and not (self._has_memory_pressure and self.n_in_flight):
            admitted = self._begin(self._waiting[0])
            if admitted is None:
                break
            self._waiting.popleft()
            row, kept = admitted
            if kept is None:
                prefixes += prefixes_of(self._rows, row)
                copies += tail_of(self._rows, row)
                continue
            if kept.content is not None:
                swapped_in.append((self._rows.own_pages(row)[: kept.content.shape[2]], kept.content))
                prefixes += prefix_of_prompt(self._rows.prompt(row))
            extensions += extension_of(self._rows, row, len(kept.tokens))
        self._close_gaps()
        prefill(self._decoder, prefixes)
        if prefixes:  # padding may have left NaN or inf on page 0, and 0 times those is not 0
            self._decoder.cache.clear(np.zeros(1, np.int32))
        if copies:
            source, target = (np.concatenate(parts) for parts in zip(*copies, strict=True))
            self._decoder.cache.copy(source, target)
        for pages, content in swapped_in:
            self._decoder.cache.write(pages, content)
        extend(self._decoder, extensions)
        if extensions:
            self._decoder.cache.clear(np.zeros(1, np.int32))

    def _grow(self) -> None:
        """Take pages for the next tokens of all running responses. Where none are free, preempt the youngest."""
        batch = self._rows
        while True:
            rows = np.flatnonzero(batch.is_taken[: self._n_rows])
            last = np.minimum(batch.length[rows] + self._ahead, batch.limit[rows] - 1)
            counts = np.maximum(-(-last // self.page_tokens) - batch.n_pages[rows], 0)
            missing = int(counts.sum()) - self._pool.n_free
            if missing <= 0:
                break
            if self._n_steps > self.tokens_per_tick:
                self.tick -= self._n_steps // self.tokens_per_tick - 1
                self._n_steps = self.tokens_per_tick
                continue
            if not self._make_room():
                self._preempt(int(rows[np.argmax(batch.order[rows])]))
        if counts.any():
            batch.add_pages(rows, counts.astype(np.int64), self._pool.take(int(counts.sum())))

    @property
    def _ahead(self) -> int:
        """Tokens behind the newest whose keys a tick reads. The last one before a response's limit is never read."""
        return max(self._n_steps - 1, self.drafter.drafting.tokens)

    def _make_room(self, but: PartialResponse | None = None) -> bool:
        """Free the pages of a prompt without running responses, or of a response that does not run."""
        if but is None:
            return self._prompts.evict_idle() or self._kept.swap_out_last()
        return self._prompts.evict_idle(but=self._prompts.of(but.request)) or self._kept.swap_out_last(but.request.id)

    def _begin(self, item: PartialResponse) -> tuple[int, Kept | None] | None:
        """Admit a waiting request, if a row and enough pages are free. Returns its row, and what was kept of it."""
        if not self._gaps and self._n_rows == self.max_concurrent:
            return None
        request = item.request
        prompt, kept = self._prompts.of(request), self._kept.of(item)
        length = len(request.prompt) + len(item.tokens)
        last = min(length + self._ahead, len(request.prompt) + request.max_new_tokens - 1)
        pages = NO_PAGES if kept is None else kept.pages
        own = max(pages_for(last, self.page_tokens), prompt.n_pages) - prompt.n_shared - len(pages)
        need = own + (0 if len(prompt.pages) else prompt.n_pages)
        # A reserve for what running responses need over the next ticks: else the new one would be preempted at once.
        reserve = pages_for(4 * self.n_in_flight * self.tokens_per_tick, self.page_tokens)
        while need + (reserve if self.n_in_flight else 0) > self._pool.n_free:
            if not self._make_room(but=item):
                return None
        if not len(prompt.pages):
            prompt.pages = self._pool.take(prompt.n_pages)
        if self._gaps:
            row = self._gaps.pop(0)
        else:
            row, self._n_rows = self._n_rows, self._n_rows + 1
        prompt.n_running += 1
        self.stops.expect(request)
        self._rows.put(row, item, prompt, np.concatenate([prompt.shared, pages, self._pool.take(own)]))
        if kept is not None:
            self._kept.hand_over(request.id)
        return row, kept

    def _preempt(self, row: int) -> None:
        """Swap out a running response and put it at the front of the queue."""
        assert self.n_in_flight > 1, "a response alone always fits: `submit` refuses others"
        if not self._is_stale:
            self._keep(row)
            self._kept.swap_out(self._rows.request(row).id)
        self._waiting.appendleft(self._release(row))
        self._gaps = sorted([*self._gaps, row])
        self._has_memory_pressure = True

    def _keep(self, row: int) -> None:
        """Keep the keys and values of a row that is about to be released: all but those of its newest token."""
        rows, prompt = self._rows, self._rows.prompt(row)
        n_tokens = int(rows.length[row]) - 1
        # The page for the newest token may have been taken already and is empty.
        n_pages = pages_for(n_tokens, self.page_tokens) - prompt.n_shared
        pages = rows.own_pages(row)[:n_pages]
        known = slice(prompt.n_shared * self.page_tokens, n_tokens)
        self._decoder.write_back(int(rows.serial[row]), pages, known)
        self._kept.keep(rows.request(row).id, prompt, rows.tokens[row, :n_tokens].copy(), pages)
        rows.give_up(row, n_pages)

    def _release(self, row: int) -> PartialResponse:
        """Free a row and its own pages. Returns what it has generated."""
        item, prompt = self._rows.read(row), self._rows.prompt(row)
        self._pool.give(self._rows.own_pages(row))
        prompt.n_running -= 1
        self._rows.free(row)
        return item

    def _close_gaps(self) -> None:
        """Move the last responses into rows that ended, so that rows in use have no gap."""
        n = self.n_in_flight
        target = sorted(gap for gap in self._gaps if gap < n)
        if target:
            source = (n + np.flatnonzero(self._rows.is_taken[n : self._n_rows])).tolist()
            self._rows.move(source, target)
        self._n_rows, self._gaps = n, []

    # ------------------------------------------------------------------ ends

    def _report(self, bad: Sequence[int]) -> None:
        """Record faults for logits that were not finite, and zero the pages, which other responses will reuse."""
        for row in bad:
            position = int(self._rows.length[row] - self._rows.start[row])
            self.faults.append(Fault(self.tick, self._rows.request(row), position, "logits are not finite"))
            self._decoder.cache.clear(np.append(self._rows.own_pages(row), 0).astype(np.int32))
            self._rows.prompt(row).is_suspect = True

    def _finish(self, reasons: dict[int, StopReason]) -> list[Finished]:
        """Free these rows and return their completions in order of submission."""
        if not reasons:
            return []
        rows = sorted(reasons, key=lambda row: self._rows.order[row])
        if self.drafter.drafting.tokens:
            others = [row for row in range(self._n_rows) if self._rows.is_taken[row] and row not in reasons]
            going_on = [*(item.request for item in self._waiting), *map(self._rows.request, others)]
            self.drafter.keep(map(self._rows.running, rows), (request.group for request in going_on))
        items = []
        for row in rows:
            prompt = self._rows.prompt(row)
            if self._rows.request(row).may_continue and reasons[row] is StopReason.EOS:
                self._keep(row)
            items.append(self._release(row))
            self._prompts.leave(prompt)
        self._gaps = sorted([*self._gaps, *rows])
        self._ids -= {item.request.id for item in items}
        self._has_memory_pressure = False
        return completions(items, [reasons[row] for row in rows], self.policy.tokenizer)


if TYPE_CHECKING:
    _implements: type[Engine] = LocalEngine
