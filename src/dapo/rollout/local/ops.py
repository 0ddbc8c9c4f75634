"""The parts of a decode step other than its matrix products: in plain torch, and as Triton kernels.

The plain operations run on any device and type and are the kernels' reference. The kernels are for CUDA in half
precision; under Triton's interpreter they run on a CPU too, which is how their logic is tested there.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dapo.rollout.families import causal_mask, rotate, rounded_up
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.rows import BAD, ENDED, FULL, RUNNING, DeviceRows
from dapo.rollout.noise import MASK, uniform
from dapo.rollout.sampler import SamplingParams, sample


class Ops(Protocol):
    """The parts of a decode step. n is the number of rows computed; NQ query heads share NK key heads of D numbers."""

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x += y in place, then RMSNorm(x) · weight; x and y [n, H]."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) · up of [n, 2·I] -> [n, I]."""
        ...

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
        """Attention of the newest tokens over their rows' keys: qkv [n, (NQ + 2 NK)·D] -> [n, NQ·D].

        Queries and keys are normalised where the family does so and rotated to their positions; the new keys and values
        go into the cache. `longest` bounds the rows' lengths.
        """
        ...

    def draw(self, logits: Tensor, sampling: SamplingParams, is_end: Tensor, rows: DeviceRows) -> None:
        """Sample one token for each row into `rows`; a row that ends, or whose logits are not finite, stops."""
        ...


class PlainOps:
    """The reference. Implements `Ops`."""

    def __init__(self, cache: PagedCache, cos: Tensor, sin: Tensor, scaling: float, n_query_heads: int) -> None:
        self.cache, self.cos, self.sin, self.scaling = cache, cos, sin, scaling
        self.n_query_heads = n_query_heads
        self.place = torch.arange(len(cos) + cache.page_tokens, device=cos.device)

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if y is not None:
            x += y
        wide = x.float()  # as Hugging Face does, for float64 weights too
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

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
        return self.attend(self.rotate_and_store(qkv, layer, norms, eps, rows), layer, window, rows, longest)

    def rotate_and_store(
        self, qkv: Tensor, layer: int, norms: tuple[Tensor, Tensor] | None, eps: float, rows: DeviceRows
    ) -> Tensor:
        """Queries [n, NQ·D] of the newest tokens, rotated; their keys and values go into the cache."""
        n, cache = len(qkv), self.cache
        position = rows.position(n)
        sizes = [self.n_query_heads, cache.n_heads, cache.n_heads]
        q, k, v = qkv.view(n, -1, cache.head_dim).split(sizes, dim=1)
        if norms is not None:
            q, k = (
                self.add_norm(q.contiguous(), None, norms[0], eps),
                self.add_norm(k.contiguous(), None, norms[1], eps),
            )
        cos, sin = self.cos[position, None], self.sin[position, None]
        page = rows.table[:n].gather(1, (position // cache.page_tokens)[:, None])[:, 0].long()
        is_alive = rows.is_alive(n)
        page = torch.where(is_alive, page, 0)
        k, v = (torch.where(is_alive[:, None, None], x, 0) for x in (rotate(k, cos, sin), v))  # page 0 stays finite
        cache.keys[layer][page, :, position % cache.page_tokens] = k
        cache.values[layer][page, :, position % cache.page_tokens] = v
        return rotate(q, cos, sin).reshape(n, -1)

    def attend(self, q: Tensor, layer: int, window: int | None, rows: DeviceRows, longest: int) -> Tensor:
        """Attention of q [n, NQ·D] over each row's keys -> [n, NQ·D]."""
        n, cache = len(q), self.cache
        n_pages = -(-rounded_up(longest) // cache.page_tokens)
        table = rows.table[:n, :n_pages].long()
        keys, values = cache.gathered(layer, table)  # [n, NK, L, D]
        mask = causal_mask(rows.position(n), self.place[: keys.shape[2]], window, q.dtype)
        # Grouped-query attention: the queries that share a key head are passed as several queries of one head.
        out = F.scaled_dot_product_attention(
            q.view(n, cache.n_heads, -1, cache.head_dim),
            keys,
            values,
            attn_mask=mask,
            scale=self.scaling,
        )
        return out.reshape(n, -1)

    def draw(self, logits: Tensor, sampling: SamplingParams, is_end: Tensor, rows: DeviceRows) -> None:
        n = len(logits)
        token_row, start, length, limit, stop = (part[:n] for part in rows.state[:5])
        words = rows.words[:, :n].t().long() & MASK
        token, logp = sample(logits, uniform(words, (length - start).long()), sampling)
        is_alive = stop == RUNNING
        is_good = logp.isfinite()
        is_new = is_alive & is_good
        tick = int(rows.clock) if not rows.clock.is_cuda else rows.clock.long()
        rows.out_token[tick, :n] = token.to(torch.int32)
        rows.out_logp[tick, :n] = logp.to(rows.out_logp.dtype)
        token_row.copy_(torch.where(is_new, token.to(torch.int32), token_row))
        length += is_new.to(torch.int32)
        ended = torch.where(is_end[token], ENDED, (length >= limit).int() * FULL)
        stop.copy_(torch.where(is_alive, torch.where(is_good, ended, BAD), stop).to(torch.int32))


class TritonOps:
    """One kernel each. Implements `Ops`.

    Exact: a row's numbers do not depend on the other rows, and the trainer's pass over the same tokens has the same
    (`exact.py`). Keys are not split, and all of them are read from the cache.
    """

    def __init__(
        self,
        cache: PagedCache,
        cos: Tensor,
        sin: Tensor,
        scaling: float,
        n_query_heads: int,
        *,
        n_rows: int,
        n_tokens: int,
        is_exact: bool = False,
    ) -> None:
        self.cache, self.cos, self.sin, self.scaling = cache, cos.contiguous(), sin.contiguous(), scaling
        self.n_query_heads = n_query_heads
        self.is_exact = is_exact
        self.has_drafts = False  # several rows of a pass are tokens of one response
        self.n_processors = (
            torch.cuda.get_device_properties(cos.device).multi_processor_count if cos.is_cuda else MOST_SPLITS
        )
        most = PROGRAMS_PER_PROCESSOR * self.n_processors // cache.n_heads  # rows whose keys are split, or more
        cells = max((n * self.splits(n) for n in range(1, most + 1) if self.splits(n) > 1), default=1)
        device = cos.device
        self.part = torch.empty(cells, n_query_heads, cache.head_dim, device=device)
        self.part_max, self.part_sum = torch.empty(2, cells, n_query_heads, device=device)
        self.chunks = -(-n_tokens // DRAW_BLOCK)
        self.weights = torch.empty(3, n_rows * self.chunks, device=device)
        self.cut, self.normaliser = torch.empty(2, n_rows, device=device)

    def splits(self, n: int) -> int:
        """Parts into which each row's keys are split, so that a small batch still fills the GPU; a power of 2."""
        if self.is_exact:
            return 1
        wanted = PROGRAMS_PER_PROCESSOR * self.n_processors / (n * self.cache.n_heads)
        splits = 1
        while 2 * splits <= min(wanted, MOST_SPLITS):
            splits *= 2
        return splits

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        from dapo.rollout.local.kernels import add_norm_kernel

        n, width = x.shape
        out = torch.empty_like(x)
        block = power_of_2(width)
        warps = 4 if block <= 2048 else 8
        add_norm_kernel[(n,)](
            x, x if y is None else y, weight, out, eps, H=width, HAS_Y=y is not None, BLOCK=block, num_warps=warps
        )
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        from dapo.rollout.local.kernels import gate_kernel

        n, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(n, width, dtype=gate_up.dtype, device=gate_up.device)
        gate_kernel[(n, -(-width // 1024))](gate_up, out, width, BLOCK=1024, num_warps=4)
        return out

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
        del longest  # the kernel reads each row's own length
        if self.has_drafts or self.is_exact:  # a token attends to those drafted before it: they have to be stored
            self.store(qkv, layer, norms, eps, rows)
        return self.attend(qkv, layer, norms, eps, window, rows)

    def attend(
        self,
        qkv: Tensor,
        layer: int,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        window: int | None,
        rows: DeviceRows,
    ) -> Tensor:
        from dapo.rollout.local.kernels import attend_kernel, combine_kernel

        n, cache, heads = len(qkv), self.cache, self.n_query_heads
        out = torch.empty(n, heads * cache.head_dim, dtype=qkv.dtype, device=qkv.device)
        keys, values = cache.keys[layer], cache.values[layer]
        query_norm, key_norm = norms if norms is not None else (qkv, qkv)
        splits, dim = self.splits(n), max(16, power_of_2(cache.head_dim))
        group = heads // cache.n_heads
        attend_kernel[(cache.n_heads // ATTEND_HEADS * n, splits)](
            qkv, self.cos, self.sin, query_norm, key_norm, keys, values, rows.table, rows.length, rows.stop,
            out, self.part, self.part_max, self.part_sum, eps, self.scaling, rows.table.stride(0), *keys.stride()[:3],
            NQ=heads, NK=cache.n_heads, G=group, D=cache.head_dim, PAGE=cache.page_tokens, HAS_NORM=norms is not None,
            WINDOW=window or 0, SPLITS=splits, HEADS=ATTEND_HEADS, BLOCK=ATTEND_BLOCK if dim <= 128 else 16,
            GROUP=max(16, power_of_2(group)), DIM=dim, IS_STORED=self.is_exact, num_warps=ATTEND_WARPS,
            num_stages=ATTEND_STAGES,
        )  # fmt: skip
        if splits > 1:
            combine_kernel[(n, heads)](
                self.part, self.part_max, self.part_sum, out, NQ=heads, D=cache.head_dim, SPLITS=splits, DIM=dim,
                num_warps=1,
            )  # fmt: skip
        return out

    def store(self, qkv: Tensor, layer: int, norms: tuple[Tensor, Tensor] | None, eps: float, rows: DeviceRows) -> None:
        """Put the newest tokens' keys and values into the cache."""
        from dapo.rollout.local.kernels import store_kernel

        cache = self.cache
        keys, values = cache.keys[layer], cache.values[layer]
        store_kernel[(cache.n_heads * len(qkv),)](
            qkv, self.cos, self.sin, qkv if norms is None else norms[1], keys, values, rows.table, rows.length,
            rows.stop, eps, rows.table.stride(0), *keys.stride()[:3], NQ=self.n_query_heads, NK=cache.n_heads,
            D=cache.head_dim, PAGE=cache.page_tokens, HAS_NORM=norms is not None,
            DIM=max(16, power_of_2(cache.head_dim)), num_warps=1,
        )  # fmt: skip

    def draw(self, logits: Tensor, sampling: SamplingParams, is_end: Tensor, rows: DeviceRows) -> None:
        from dapo.rollout.local.kernels import cut_kernel, draw_kernel, score_kernel, weigh_kernel

        n, vocabulary = logits.shape
        inverse = 1.0 / (sampling.temperature or 1.0)
        is_greedy = sampling.temperature == 0
        has_cut = not is_greedy and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
        if has_cut:
            cut_kernel[(n,)](
                logits, self.cut, vocabulary, inverse, sampling.top_k, sampling.top_p, sampling.min_p, logits.stride(0),
                HAS_TOP_K=sampling.top_k > 0, HAS_TOP_P=sampling.top_p < 1, HAS_MIN_P=sampling.min_p > 0,
                BLOCK=DRAW_BLOCK, num_warps=8,
            )  # fmt: skip
        part_max, part_all, part_kept = self.weights
        weigh_kernel[(n, self.chunks)](
            logits, self.cut, part_max, part_all, part_kept, vocabulary, inverse, logits.stride(0),
            HAS_CUT=has_cut, CHUNKS=self.chunks, BLOCK=DRAW_BLOCK, num_warps=8,
        )  # fmt: skip
        draw_kernel[(n,)](
            logits, self.cut, part_max, part_all, part_kept, rows.state, is_end, rows.out_token, rows.out_logp,
            rows.clock, vocabulary, inverse, logits.stride(0), rows.state.stride(0),
            HAS_CUT=has_cut, IS_GREEDY=is_greedy, CHUNKS=self.chunks, CHUNKS_UP=power_of_2(self.chunks),
            BLOCK=DRAW_BLOCK, num_warps=8,
        )  # fmt: skip
        if self.is_exact:
            score_kernel[(n,)](
                logits, part_max, part_all, rows.out_token, rows.out_logp, self.normaliser, rows.clock, inverse,
                logits.stride(0), rows.state.stride(0), CHUNKS=self.chunks, CHUNKS_UP=power_of_2(self.chunks),
                num_warps=1,
            )  # fmt: skip


# Measured on an H200 (docs/log.md): keys a program reads at a time, and the pipeline that hides the memory's latency.
ATTEND_BLOCK, ATTEND_WARPS, ATTEND_STAGES = 32, 1, 3
ATTEND_HEADS = 1  # key heads a program attends with, one after the other
PROGRAMS_PER_PROCESSOR = 8
MOST_SPLITS = 32
DRAW_BLOCK = 4096


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is not below n."""
    return 1 << (n - 1).bit_length()
