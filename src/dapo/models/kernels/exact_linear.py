"""A matrix product whose rows do not depend on how many there are: every element is one sum, in one order.

A library chooses another algorithm for another number of rows, and so other last bits. Here a sum goes over K from its
first to its last step of BLOCK_K, in one accumulator and by one kind of instruction, whatever the tile's size. On
Hopper that is wgmma, which takes 64 rows: a smaller tile would be computed by another instruction, with other bits.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """The part of the result that a program computes."""

    rows: int
    columns: int
    warps: int
    stages: int  # steps of K under way at once: what hides the memory's latency

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self.rows + self.columns) * BLOCK_K * 2

    def programs(self, rows: int, columns: int) -> int:
        return -(-rows // self.rows) * -(-columns // self.columns)


# From the one that reads least to the one that spreads a small product over the most processors. One tile alone is
# right as well, and slower at one end.
TILES = (
    Tile(128, 256, 8, 3),
    Tile(128, 128, 8, 3),
    Tile(64, 128, 4, 4),
    Tile(64, 64, 4, 5),
    Tile(64, 32, 4, 6),
    Tile(64, 16, 4, 8),
)
FEWEST_ROWS = 64  # wgmma's
BLOCK_K = 64
GROUP_ROWS = 8  # tiles of rows that pass over the same columns together, while those are in the L2 cache


# Another number of rows is not another program.
@triton.jit(do_not_specialize=["T"])
def exact_linear_kernel(
    x, weight, bias, out, T, N, K,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """out [T, N] = x [T, K] weight [N, K]ᵀ + bias, in float32 until it is stored."""
    program, row_tiles, column_tiles = tl.program_id(0), tl.cdiv(T, BLOCK_T), tl.cdiv(N, BLOCK_N)
    group = program // (GROUP * column_tiles)
    first = group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    rows = (first + within % height) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = (within // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row, is_column = (rows < T)[:, None], (columns < N)[:, None]
    a = x + rows.to(tl.int64)[:, None] * K + k[None, :]
    b = weight + columns.to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            left, right = tl.load(a, mask=is_row, other=0.0), tl.load(b, mask=is_column, other=0.0)
        else:
            is_inside = (start + k < K)[None, :]
            left = tl.load(a, mask=is_row & is_inside, other=0.0)
            right = tl.load(b, mask=is_column & is_inside, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        a += BLOCK_K
        b += BLOCK_K
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    place = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_row & (columns < N)[None, :])


def exact_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None, tile: Tile | None = None
) -> Tensor:
    """x [T, K] · weight [N, K]ᵀ + bias -> [T, N], in the type of x or in `dtype`; a row has the same bits in any T."""
    (T, K), N = x.shape, len(weight)
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty(T, N, dtype=dtype or x.dtype, device=x.device)
    chosen = tile or tile_for(T, N, x.device)
    if out.numel():
        exact_linear_kernel[(chosen.programs(T, N),)](
            x, weight, weight if bias is None else bias, out, T, N, K,
            HAS_BIAS=bias is not None, EVEN_K=K % BLOCK_K == 0, BLOCK_T=chosen.rows, BLOCK_N=chosen.columns,
            BLOCK_K=BLOCK_K, GROUP=GROUP_ROWS, num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip
    return out


def tile_for(rows: int, columns: int, device: torch.device) -> Tile:
    """The largest that is not mostly empty, fits the device and gives each of its processors something to do."""
    processors, shared_bytes = limits(device)
    fitting = [tile for tile in TILES if tile.shared_bytes <= shared_bytes and tile.rows <= max(rows, FEWEST_ROWS)]
    return next((tile for tile in fitting if tile.programs(rows, columns) >= processors), fitting[-1])


@cache
def limits(device: torch.device) -> tuple[int, int]:
    """How many processors, and the shared memory of one; a CPU is the interpreter, slow by the program."""
    if device.type != "cuda":
        return 1, TILES[0].shared_bytes
    index = torch.cuda.current_device() if device.index is None else device.index
    card = triton.runtime.driver.active.utils.get_device_properties(index)
    return card["multiprocessor_count"], card["max_shared_mem"]
