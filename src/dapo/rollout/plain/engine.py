"""The reference engine: continuous batching over a dense KV cache, one token of every running response per tick.

Running responses occupy rows 0..n−1 of the batch. No Python loop runs over them in a tick, only over those that are
admitted or end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dapo.models.policy import Policy
from dapo.rollout.draft import Drafting, last_counting, spread
from dapo.rollout.engine import Engine, EngineState, Fault, Finished, SamplingParams, nothing
from dapo.rollout.families import PREFILL_TOKENS, rounded_up
from dapo.rollout.noise import uniform
from dapo.rollout.partial import PartialResponse, completions
from dapo.rollout.plain.decoder import Decoder
from dapo.rollout.plain.rows import DenseRows
from dapo.rollout.queue import QueuedEngine
from dapo.rollout.sampler import sample
from dapo.rollout.stops import Stops
from dapo.types import StopReason

Flags = NDArray[np.bool_]


class PlainEngine(QueuedEngine):
    """Generates with the trainer's own weights, in the trainer's process. Implements `Engine`.

    `max_concurrent` responses at a time, each of at most `max_tokens` with its prompt. An update of the weights in
    place must be announced by `load_weights` before the next tick.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        sampling: SamplingParams,
        max_concurrent: int,
        max_tokens: int,
        version: int = 0,
        drafting: Drafting | None = None,
    ) -> None:
        super().__init__(max_concurrent=max_concurrent, max_tokens=max_tokens, drafting=drafting)
        self.sampling = sampling
        self.version = version
        self._n_rows = 0  # rows in use, gaps included
        self._gaps: list[int] = []  # rows below _n_rows whose response has ended
        self._needs_prefill = False  # the KV of every row is void
        self._bind(policy)

    def _bind(self, policy: Policy) -> None:
        self.policy = policy
        self._decoder = Decoder(policy, rows=self.max_concurrent, max_tokens=self.max_tokens)
        logp_dtype = torch.float64 if policy.dtype == torch.float64 else torch.float32
        self._rows = DenseRows(rounded_up(self.max_concurrent), self.max_tokens, logp_dtype, policy.device)
        self._is_end = torch.zeros(policy.head.weight.shape[0], dtype=torch.bool, device=policy.device)
        self._is_end[list(policy.eos_ids)] = True
        self._stops = Stops(policy.tokenizer, len(self._is_end))
        self._may_stop = torch.from_numpy(self._stops.may_complete).to(policy.device)

    def fork_for_eval(self, sampling: SamplingParams) -> PlainEngine:
        other = PlainEngine(
            self.policy,
            sampling=sampling,
            max_concurrent=self.max_concurrent,
            max_tokens=self.max_tokens,
            version=self.version,
            drafting=self.drafter.drafting,
        )
        other._stops, other._may_stop = self._stops, self._may_stop
        return other

    @property
    def n_in_flight(self) -> int:
        return self._n_rows - len(self._gaps)

    @torch.inference_mode()
    def advance(self, meanwhile: Callable[[], None] = nothing) -> list[Finished]:
        meanwhile()
        if self._is_paused:
            return []
        self.tick += 1
        self._admit()
        n = self._n_rows
        if n == 0:
            return []
        is_end, is_full, is_bad = self._verify(drafts) if any(drafts := self._drafts(n)) else self._step(n)
        reasons = {
            int(row): StopReason.ABORTED if is_bad[row] else StopReason.EOS if is_end[row] else StopReason.LENGTH
            for row in np.flatnonzero(is_end | is_full | is_bad)
        }
        if is_bad.any():
            self._report(np.flatnonzero(is_bad).tolist())
        return self._finish(reasons)

    def _step(self, n: int) -> tuple[Flags, Flags, Flags]:
        """One token of rows 0..n−1. Returns which of them ended, are full, have logits that are not finite."""
        rows = self._rows
        # Rows that pad the batch are computed too, at position 0, which the next response there overwrites first.
        rows.length[n : rounded_up(n)] = 1
        token, position = rows.last_tokens(rounded_up(n))
        logits = self._decoder.step(token, position, int(rows.length[:n].max()))[:n]
        drawn, logp = sample(logits, uniform(rows.words[:n], rows.noise_index(n)), self.sampling)
        rows.append(n, position[:n], drawn, logp, self.version)
        signs = [self._is_end[drawn], ~logp.isfinite(), self._may_stop[drawn]]
        is_end, is_bad, may_stop = torch.stack(signs).cpu().numpy()  # the tick's only transfer
        rows.length[:n] += ~is_bad
        is_end |= self._ends_at_a_stop(np.flatnonzero(may_stop & ~is_bad), np.ones(n, np.int64))
        return is_end, rows.length[:n] >= rows.limit[:n], is_bad

    def _drafts(self, n: int) -> list[list[int]]:
        """Guesses for rows 0..n−1; the token behind a draft still has to fit."""
        if not self.drafter.is_due(n):
            return []
        return self.drafter.drafts(self._rows.running(range(n)))

    def _verify(self, drafts: Sequence[Sequence[int]]) -> tuple[Flags, Flags, Flags]:
        """`_step` over the newest token of each row and the draft behind it: all tokens that count."""
        rows, n = self._rows, len(drafts)
        row, ahead = spread(drafts)
        place = rows.length[row] - 1 + ahead
        for i, draft in enumerate(drafts):  # beyond a row's end: not read before it is written again
            rows.tokens[i, rows.length[i] : rows.length[i] + len(draft)] = torch.tensor(draft, device=rows.device)
        m = len(row)
        # Rows that pad the batch repeat the last one, which changes nothing.
        of, at = (torch.from_numpy(np.pad(x, (0, rounded_up(m) - m), "edge")).to(rows.device) for x in (row, place))
        logits = self._decoder.step(rows.tokens[of, at], at, int(place.max()) + 1, of)[:m]
        index = torch.from_numpy(place + 1 - rows.start[row]).to(rows.device)
        drawn, logp = sample(logits, uniform(rows.words[of[:m]], index), self.sampling)
        is_end, is_bad = torch.stack([self._is_end[drawn], ~logp.isfinite()]).cpu().numpy()
        last = last_counting(drafts, drawn.cpu().numpy(), is_end | is_bad)
        self.drafter.count(drafts, int(ahead[last].sum()))
        for i, end in enumerate(last.tolist()):
            part = slice(end - int(ahead[end]), end + 1)
            rows.extend(i, drawn[part], logp[part], self.version)
        rows.length[:n] += ahead[last] + ~is_bad[last]
        by_string = self._ends_at_a_stop(np.flatnonzero(~is_bad[last]), ahead[last] + 1)
        return is_end[last] | by_string, rows.length[:n] >= rows.limit[:n], is_bad[last]

    def _ends_at_a_stop(self, rows: NDArray[np.int64], n_new: NDArray[np.int64]) -> Flags:
        """[n] Whether one of its newest tokens ends a response by a string of its request, which drops what follows."""
        ends = np.zeros(len(n_new), np.bool_)
        running = [row for row in rows.tolist() if (request := self._rows.requests[row]) is not None and request.stop]
        for row, item in zip(running, self._rows.read(running), strict=True):
            n_kept = self._stops.end(item.request, item.tokens, len(item.tokens) - int(n_new[row]))
            if n_kept is not None:
                self._rows.length[row], ends[row] = self._rows.start[row] + n_kept, True
        return ends

    @torch.inference_mode()
    def abort(self, ids: Iterable[int]) -> list[Finished]:
        wanted = set(ids) & self._ids
        dropped = self._drop(wanted)
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
        self.version = version
        self._needs_prefill = True

    @torch.inference_mode()
    def snapshot(self) -> EngineState:
        """Drops the KV here too: a restored engine recomputes it, and both must continue with the same bits."""
        self._close_gaps()
        self._needs_prefill = True
        items = self._rows.read(range(self._n_rows)) + list(self._waiting)
        return self._state(items, self._logp_dtype, version=self.version, n_running=self._n_rows)

    @torch.inference_mode()
    def restore(self, state: EngineState) -> None:
        items = self._items_of(state)
        self._rows.free(range(len(self._rows.requests)))
        self._n_rows, self._gaps = state.meta["n_running"], []
        self._put(range(self._n_rows), items[: self._n_rows])
        self._resume_from(items[self._n_rows :], state)
        self.version = state.meta["version"]
        self._needs_prefill = True

    @property
    def _logp_dtype(self) -> type:
        return np.float64 if self._rows.logp.dtype == torch.float64 else np.float32

    def _admit(self) -> None:
        """Give free rows to waiting requests, close the gaps that remain, and prefill what has no KV."""
        rows = self._gaps[: len(self._waiting)]  # the lowest: whatever gap is closed lies behind them
        self._gaps = self._gaps[len(rows) :]
        self._close_gaps()
        n_new = min(len(self._waiting) - len(rows), self.max_concurrent - self._n_rows)
        rows += range(self._n_rows, self._n_rows + n_new)
        self._n_rows += n_new
        self._put(rows, [self._waiting.popleft() for _ in rows])
        if self._needs_prefill:
            rows = list(range(self._n_rows))
            self._needs_prefill = False
        self._prefill(rows)

    def _put(self, rows: Sequence[int], items: Sequence[PartialResponse]) -> None:
        """Give rows to responses; what may end them is known on the device from now on."""
        self._rows.put(rows, items)
        if self._stops.expect(*(item.request for item in items)):
            self._may_stop.copy_(torch.from_numpy(self._stops.may_complete))

    def _close_gaps(self) -> None:
        """Move the last responses into rows that ended, so that rows in use have no gap."""
        n = self.n_in_flight
        target = sorted(gap for gap in self._gaps if gap < n)
        source = [row for row in range(n, self._n_rows) if self._rows.requests[row] is not None]
        if target:
            self._decoder.cache.move(source, target, int(self._rows.length[source].max()))
            self._rows.move(source, target)
        self._n_rows, self._gaps = n, []

    def _prefill(self, rows: Sequence[int]) -> None:
        """Compute the KV of everything but the newest token of these rows; equal prefixes are computed once."""
        if not rows:
            return
        width = int(self._rows.length[list(rows)].max())
        tokens = self._rows.tokens[list(rows), :width].cpu().numpy()
        members: dict[bytes, list[int]] = {}
        prefixes: list[NDArray[np.int64]] = []
        for i, row in enumerate(rows):
            prefix = tokens[i, : self._rows.length[row] - 1]
            if len(prefix) == 0:
                continue
            known = members.setdefault(prefix.tobytes(), [])
            if not known:
                prefixes.append(prefix)
            known.append(row)
        prefixes.sort(key=len, reverse=True)
        device = self.policy.device
        while prefixes:
            width = len(prefixes[0])
            chunk = prefixes[: max(1, PREFILL_TOKENS // width)]
            prefixes = prefixes[len(chunk) :]
            ids = np.empty((len(chunk), rounded_up(width)), np.int64)
            for i, prefix in enumerate(chunk):
                # Padded with its own last token: another could bring a non-finite embedding into a healthy row.
                ids[i, : len(prefix)], ids[i, len(prefix) :] = prefix, prefix[-1]
            pairs = [(row, i) for i, prefix in enumerate(chunk) for row in members[prefix.tobytes()]]
            target, source = torch.tensor(pairs, device=device).unbind(1)
            self._decoder.prefill(torch.from_numpy(ids).to(device), target, source)

    def _report(self, bad: Sequence[int]) -> None:
        """Record faults for logits that were not finite, and zero their rows, which other responses will reuse."""
        for row in bad:
            request = self._rows.requests[row]
            assert request is not None, f"row {row} holds no response"
            position = int(self._rows.length[row] - self._rows.start[row])
            self.faults.append(Fault(self.tick, request, position, "logits are not finite"))
        self._decoder.cache.clear(bad)

    def _finish(self, reasons: dict[int, StopReason]) -> list[Finished]:
        """Free these rows and return their completions in order of submission."""
        if not reasons:
            return []
        rows = sorted(reasons, key=lambda row: self._rows.order[row])
        items = self._rows.read(rows)
        if self.drafter.drafting.tokens:
            others = (one for row, one in enumerate(self._rows.requests) if one is not None and row not in reasons)
            going_on = [*(item.request for item in self._waiting), *others]
            self.drafter.keep(self._rows.running(rows), (request.group for request in going_on))
        self._rows.free(rows)
        self._gaps = sorted([*self._gaps, *rows])
        self._ids -= {item.request.id for item in items}
        return completions(items, [reasons[row] for row in rows], self.policy.tokenizer)


if TYPE_CHECKING:
    _implements: type[Engine] = PlainEngine
