"""The parts of a decode step for a CPU, compiled: of each row only its own tokens are read, so nothing is masked."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dapo.models.kernels.compiled import at, by_rows, host
from dapo.rollout.local.block_ops import BlockOps
from dapo.rollout.local.blocks import Span
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.rows import DeviceRows
from dapo.rollout.sampler import SamplingParams


class HostOps(BlockOps):
    """`BlockOps` in float32 by host.c. Implements `Ops`."""

    def __init__(self, cache: PagedCache, cos: Tensor, sin: Tensor, scaling: float, n_query_heads: int) -> None:
        assert cos.shape == sin.shape == (len(cos), cache.head_dim), "C turns all values of a head"
        super().__init__(cache, cos.contiguous(), sin.contiguous(), scaling, n_query_heads)
        self.c = host()
        self.weight = torch.empty(0)  # of every token, while one is drawn

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        n, width = x.shape
        out = torch.empty_like(x)
        self.c.norm_forward(at(x), at(y), at(weight), eps, at(x), at(out), None, n, width)
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        n, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(n, width)
        work = partial(self._gate, gate_up, out, width)
        by_rows(n, gate_up.numel(), work)
        return out

    def _gate(self, gate_up: Tensor, out: Tensor, width: int, first: int, end: int) -> None:
        gate = at(gate_up, first)
        self.c.gated_forward(gate, gate + 4 * width, at(out, first), end - first, width, 2 * width)

    def mix(
        self,
        qkv: Tensor,
        layer: int,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        window: int | None,
        rows: DeviceRows,
        longest: int,
    ) -> Tensor:
        del longest  # every row has its own
        n, spans = len(qkv), self.spans
        if layer == 0:
            self.position = rows.position(n)
        out = qkv.new_empty(n, self.n_query_heads * self.cache.head_dim)
        for span in spans:
            work = partial(self._mix, qkv, out, span, layer, norms or (None, None), eps, window or 0)
            by_rows(span.block.n, span.block.layers[layer][0][: span.block.n].numel(), work)
        out[spans[-1].end :] = 0  # rows that pad the batch
        return out

    def _mix(
        self,
        qkv: Tensor,
        out: Tensor,
        span: Span,
        layer: int,
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        window: int,
        first: int,
        end: int,
    ) -> None:
        """`mix` of the slots first..end−1 of a span."""
        n_rows, capacity = span.n_rows, span.block.capacity
        row = span.first + (first if n_rows is None else int(n_rows[:first].sum()))
        heads, size = self.cache.n_heads, self.cache.head_dim
        keys, values = span.block.layers[layer]
        scratch = qkv.new_empty(capacity + size)
        self.c.mix(
            at(qkv, row), self.position.data_ptr() + 8 * row, None if n_rows is None else n_rows[first:].ctypes.data,
            at(self.cos), at(self.sin), at(norms[0]), at(norms[1]), eps, self.scaling, at(keys, first),
            at(values, first), at(scratch), at(out, row), end - first, self.n_query_heads, heads, size, capacity,
            window,
        )  # fmt: skip

    def draw(self, logits: Tensor, sampling: SamplingParams, is_end: Tensor, rows: DeviceRows) -> None:
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
            super().draw(logits, sampling, is_end, rows)
            return
        n, n_tokens = logits.shape
        if len(self.weight) != n_tokens:
            self.weight = logits.new_empty(n_tokens)
        tick = int(rows.clock)
        self.c.draw(
            at(logits), sampling.temperature, is_end.data_ptr(), rows.state.data_ptr(), at(rows.out_token, tick),
            at(rows.out_logp, tick), at(self.weight), n, n_tokens, rows.state.stride(0),
        )  # fmt: skip
