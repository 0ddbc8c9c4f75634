"""The parts of a decode step for a CPU: over dense blocks of rows, with as few calls as possible.

For a small model the calls themselves take most of the time. So what all layers share is computed once per step, and
the rows' bookkeeping is in numpy, which is faster on a few dozen numbers.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dapo.rollout.families import SAME_SUMS, causal_mask, rotate, rounded_up
from dapo.rollout.local.blocks import Blocks, Span
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.ops import PlainOps
from dapo.rollout.local.rows import BAD, ENDED, FULL, RUNNING, DeviceRows
from dapo.rollout.noise import uniform_on_host
from dapo.rollout.sampler import SamplingParams, sample


class BlockOps(PlainOps):
    """Rows are in the order of `blocks`, which hold the running responses' keys and values; pages stay as they are.

    Implements `Ops`.
    """

    def __init__(self, cache: PagedCache, cos: Tensor, sin: Tensor, scaling: float, n_query_heads: int) -> None:
        super().__init__(cache, cos, sin, scaling, n_query_heads)
        self.blocks = Blocks(cache, len(cos))
        self.spans: list[Span] = []  # of the step
        self.rotary = (cos[:0, None], sin[:0, None])  # cos and sin at the rows' newest tokens
        self.cells: list[Tensor] = []  # where each span's newest keys go
        self.lengths: list[int] = []  # tokens that each span attends over
        self.masks: dict[int | None, list[Tensor]] = {}
        self.averages: dict[int, Tensor] = {}  # [H, 1] of 1 / H
        self.position = self.place[:0]

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32:
            return super().add_norm(x, y, weight, eps)
        if y is not None:
            x += y
        width = x.shape[-1]
        if width not in self.averages:
            self.averages[width] = x.new_full((width, 1), 1 / width)
        # As a product the mean is the quickest, and bit for bit the same however many rows there are.
        mean = torch.mm((x * x).view(-1, width), self.averages[width]).view(*x.shape[:-1], 1)
        return (x * mean.add_(eps).rsqrt_()).mul_(weight)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def begin_step(self, n: int, rows: DeviceRows) -> None:
        """Positions of the newest tokens and what each block attends over: the same in all layers."""
        self.position = position = rows.position(n)
        self.rotary = (self.cos.index_select(0, position)[:, None], self.sin.index_select(0, position)[:, None])
        self.masks.clear()
        self.cells.clear()
        self.lengths.clear()
        head = torch.arange(self.cache.n_heads)[None]
        for span in self.spans:
            capacity = span.block.capacity
            own = position[span.first : span.end]
            slot = torch.arange(span.block.n)[span.slots][:, None]
            cell = torch.add((slot * self.cache.n_heads + head) * capacity, own[:, None])
            self.cells.append(cell.view(-1))
            # Beyond SAME_SUMS the width decides the last bits: it must follow from a row's own length, as blocks do.
            self.lengths.append(capacity if capacity > SAME_SUMS else min(rounded_up(int(own.max()) + 1), capacity))

    def rotate_and_store(
        self, qkv: Tensor, layer: int, norms: tuple[Tensor, Tensor] | None, eps: float, rows: DeviceRows
    ) -> Tensor:
        n, cache = qkv.shape[0], self.cache
        if layer == 0:
            self.begin_step(n, rows)
        n_rotated = self.n_query_heads + cache.n_heads
        heads = qkv.view(n, -1, cache.head_dim)
        rotated, v = heads[:, :n_rotated], heads[:, n_rotated:]
        if norms is not None:
            q, k = rotated.split([self.n_query_heads, cache.n_heads], dim=1)
            rotated = torch.cat(
                [self.add_norm(x.contiguous(), None, weight, eps) for x, weight in zip((q, k), norms, strict=True)],
                dim=1,
            )
        rotated = rotate(rotated, *self.rotary)
        k = rotated[:, self.n_query_heads :]
        for span, cell in zip(self.spans, self.cells, strict=True):
            keys, values = span.block.cells[layer]
            keys.index_copy_(0, cell, k[span.first : span.end].reshape(-1, cache.head_dim))
            values.index_copy_(0, cell, v[span.first : span.end].reshape(-1, cache.head_dim))
        return rotated[:, : self.n_query_heads].reshape(n, cache.n_heads, -1, cache.head_dim)

    def attend(self, q: Tensor, layer: int, window: int | None, rows: DeviceRows, longest: int) -> Tensor:
        del rows, longest  # every block has its own
        n = q.shape[0]
        if window not in self.masks:
            self.masks[window] = [
                causal_mask(self.position[span.first : span.end], self.place[:length], window, q.dtype)
                for span, length in zip(self.spans, self.lengths, strict=True)
            ]
        parts = []
        for span, length, mask in zip(self.spans, self.lengths, self.masks[window], strict=True):
            keys, values = span.block.layers[layer]
            slots = span.slots
            # Grouped-query attention: the queries that share a key head are passed as several queries of one head.
            part = F.scaled_dot_product_attention(
                q[span.first : span.end],
                keys[slots, :, :length],
                values[slots, :, :length],
                attn_mask=mask,
                scale=self.scaling,
            )
            parts.append(part.reshape(span.end - span.first, -1))
        n_idle = n - self.spans[-1].end  # rows that pad the batch
        if n_idle:
            parts.append(parts[0].new_zeros(n_idle, parts[0].shape[1]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def draw(self, logits: Tensor, sampling: SamplingParams, is_end: Tensor, rows: DeviceRows) -> None:
        n, tick = len(logits), int(rows.clock)
        state = rows.state.numpy()[:, :n]
        newest, start, length, limit, stop = state[:5]
        words = state[5:9].view(np.uint32).astype(np.uint64)
        noise = uniform_on_host(words, (length - start).astype(np.uint64))
        drawn, chance = sample(logits, torch.from_numpy(noise), sampling)
        token, logp = drawn.numpy(), chance.numpy()
        rows.out_token.numpy()[tick, :n], rows.out_logp.numpy()[tick, :n] = token, logp
        is_alive, is_good = stop == RUNNING, np.isfinite(logp)
        is_new = is_alive & is_good
        newest[is_new] = token[is_new]
        length += is_new
        ended = np.where(is_end.numpy()[token], ENDED, (length >= limit) * FULL)
        stop[is_alive] = np.where(is_good, ended, BAD)[is_alive]
