"""The reference engine: continuous batching over a dense KV cache, one token of every running response per tick.

Running responses occupy rows 0..n−1 of the batch. No Python loop runs over them in a tick, only over those that are
admitted or end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dapo.models.policy import Policy
from dapo.rollout.engine import Engine, EngineState, Fault, Finished, SamplingParams
from dapo.rollout.families import PREFILL_TOKENS, rounded_up
from dapo.rollout.noise import uniform
from dapo.rollout.partial import completions
from dapo.rollout.plain.decoder import Decoder
from dapo.rollout.plain.rows import DenseRows
from dapo.rollout.queue import QueuedEngine
from dapo.rollout.sampler import sample
from dapo.types import StopReason


class PlainEngine(QueuedEngine):
    """Generates with the trainer's own weights, in the trainer's process. Implements `Engine`.

    `max_concurrent` responses at a time, each of at most `max_tokens` with its prompt. An update of the weights in
    place must be announced by `load_weights` before the next tick.
    """

    def __init__(
        self, policy: Policy, *, sampling: SamplingParams, max_concurrent: int, max_tokens: int, version: int = 0
    ) -> None:
        super().__init__(max_concurrent=max_concurrent, max_tokens=max_tokens)
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

    def fork_for_eval(self, sampling: SamplingParams) -> PlainEngine:
        sizes = {"max_concurrent": self.max_concurrent, "max_tokens": self.max_tokens}
        return PlainEngine(self.policy, sampling=sampling, version=self.version, **sizes)

    @property
    def n_in_flight(self) -> int:
        return self._n_rows - len(self._gaps)

    @torch.inference_mode()
    def advance(self) -> list[Finished]:
        if self._is_paused:
            return []
        self.tick += 1
        self._admit()
        n = self._n_rows
        if n == 0:
            return []
        rows = self._rows
        # Rows that pad the batch are computed too, at position 0, which the next response there overwrites first.
        rows.length[n : rounded_up(n)] = 1
        token, position = rows.last_tokens(rounded_up(n))
        logits = self._decoder.step(token, position, int(rows.length[:n].max()))[:n]
        drawn, logp = sample(logits, uniform(rows.words[:n], rows.noise_index(n)), self.sampling)
        rows.append(n, position[:n], drawn, logp, self.version)
        is_end, is_bad = torch.stack([self._is_end[drawn], ~logp.isfinite()]).cpu().numpy()  # the tick's only transfer
        rows.length[:n] += ~is_bad
        is_full = rows.length[:n] >= rows.limit[:n]

        reasons = {
            int(row): StopReason.ABORTED if is_bad[row] else StopReason.EOS if is_end[row] else StopReason.LENGTH
            for row in np.flatnonzero(is_end | is_full | is_bad)
        }
        if is_bad.any():
            self._report(np.flatnonzero(is_bad).tolist())
        return self._finish(reasons)

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
        self._rows.put(range(self._n_rows), items[: self._n_rows])
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
        self._rows.put(rows, [self._waiting.popleft() for _ in rows])
        if self._needs_prefill:
            rows = list(range(self._n_rows))
            self._needs_prefill = False
        self._prefill(rows)

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
        self._rows.free(rows)
        self._gaps = sorted([*self._gaps, *rows])
        self._ids -= {item.request.id for item in items}
        return completions(items, [reasons[row] for row in rows], self.policy.tokenizer)


if TYPE_CHECKING:
    _implements: type[Engine] = PlainEngine
