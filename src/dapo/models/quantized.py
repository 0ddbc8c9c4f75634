"""Frozen matrices under an adapter in 8 or 4 bits: int8, and NF4, the NormalFloat of QLoRA (arXiv:2305.14314).

A matrix is flattened into blocks. Of a block one scale is kept, and a code of each weight:

- int8: weight / scale rounded to −127 … 127, where the scale is the largest magnitude / 127. Blocks of 64, scales in
  float32: 8.5 bits a weight.
- NF4: which of 16 levels is nearest to weight / scale, where the scale is fitted for a small squared error; below 0 it
  turns the levels around, which are not symmetric. Blocks of 32, scales in bfloat16: 4.5 bits a weight. Scales in
  float16 would lose those of blocks below 6e-8.

Whoever reads the matrix gets code · scale (NF4: level · scale), so that the policy that samples, the one that is
trained and the reference multiply by the same numbers. NF4's codes should be the same from a CPU and from a GPU: every
operation is rounded by itself, and sums have one order. Not compared on a GPU yet.

Differs from the paper, which has NF4 in blocks of 64 with the largest magnitude as scale, and quantizes the scales a
second time, 4.13 bits a weight. What that is worth on a model of 1.5 B: docs/log.md.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dapo.models.triton_support import runs_triton

Kind = Literal["int8", "nf4"]
BLOCK: dict[Kind, int] = {"int8": 64, "nf4": 32}
# Quantiles of a normal distribution scaled to [−1, 1]: seven below 0, eight above it, and 0 itself (appendix E).
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Times a block's largest magnitude: scales to begin with. Below 0 they turn the levels around.
STARTS = tuple(sign * part for part in (0.95, 0.85, 1.05) for sign in (1, -1))
CHUNK = {"cpu": 1 << 14, "cuda": 1 << 18}  # blocks that are fitted at a time: for a cache; for a busy GPU, in 0.3 GB
BINS = 32  # in a unit; none holds two of the midpoints between levels


def quantize(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Codes and the blocks' scales, of n weights in blocks of B: [⌈n/B⌉].

    int8: a code per weight, int8 [⌈n/B⌉·B]. NF4: two per byte, the first in the high bits, uint8 [⌈n/B⌉·B/2].
    """
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK[kind])).view(-1, BLOCK[kind])
    if kind == "int8":
        scales = blocks.abs().amax(1) / 127
        unit = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        return unit.round().to(torch.int8).flatten(), scales
    parts = [(chunk, fitted_scales(chunk)) for chunk in blocks.split(CHUNK[blocks.device.type])]
    return torch.cat([nf4_codes(*part) for part in parts]), torch.cat([scales for _, scales in parts])


def nf4_codes(blocks: Tensor, scales: Tensor) -> Tensor:
    """[N·B/2] the nearest levels to blocks [N, B], two per byte."""
    first, second = nearest_levels(blocks, scales).to(torch.uint8).view(-1, 2).unbind(1)
    return first << 4 | second


def fitted_scales(blocks: Tensor) -> Tensor:
    """[N] in bfloat16, for blocks [N, B]: of no larger squared error than that of the largest magnitude.

    With the levels q that some scale s gives the weights w, Σ(w − sq)² is least at s = Σwq / Σq²: (Σwq)² / Σq² below
    Σw². Of the starts the one counts that takes off most.
    """
    levels = torch.tensor(LEVELS, device=blocks.device)
    largest = blocks.abs().amax(1)
    best, most = largest, torch.zeros_like(largest)
    for start in STARTS:
        q = of_each(levels, nearest_levels(blocks, start * largest))
        wq, qq = sum_by_halves(blocks * q), sum_by_halves(q * q)
        less = wq * wq / qq
        best = torch.where(less > most, wq / qq, best)
        most = torch.where(less > most, less, most)
    plain, fitted = largest.bfloat16(), best.bfloat16()
    return torch.where(squared_error(blocks, fitted) < squared_error(blocks, plain), fitted, plain)


def squared_error(blocks: Tensor, scales: Tensor) -> Tensor:
    """[N] of NF4, for blocks [N, B]."""
    levels = torch.tensor(LEVELS, device=blocks.device)
    return sum_by_halves((of_each(levels, nearest_levels(blocks, scales)) * scales.float()[:, None] - blocks).square())


def nearest_levels(blocks: Tensor, scales: Tensor) -> Tensor:
    """[N, B] which level is nearest to weight / scale, the lower one of two. In a block of scale 0: that of 0.

    A bin is looked up and its midpoint compared, if it has one; a binary search takes three times as long on a CPU.
    """
    unit = blocks / torch.where(scales == 0, torch.inf, scales).float()[:, None]
    lowest, midpoint = bins(blocks.device)
    bin = ((unit + 1) * BINS).int().clamp(0, 2 * BINS)
    return of_each(lowest, bin) + (unit > of_each(midpoint, bin))


@cache
def bins(device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each bin the lowest level that is nearest to a number in it, and the midpoint above which it is the next."""
    levels = torch.tensor(LEVELS, device=device)
    midpoints = (levels[1:] + levels[:-1]) / 2
    at = ((midpoints + 1) * BINS).int()
    lowest = (at < torch.arange(2 * BINS + 1, device=device)[:, None]).sum(1, dtype=torch.int32)
    return lowest, torch.full_like(lowest, torch.inf, dtype=torch.float32).scatter(0, at.long(), midpoints)


def of_each(table: Tensor, index: Tensor) -> Tensor:
    """table[index], which is several times slower on a CPU."""
    return table.index_select(0, index.flatten()).view(index.shape)


def sum_by_halves(values: Tensor) -> Tensor:
    """[N, 2ⁿ] -> [N], in an order that does not depend on the device."""
    while values.shape[1] > 1:
        one, other = values.chunk(2, dim=1)
        values = one + other
    return values[:, 0]


def dequantize(codes: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """code · scale in float32, rounded to `dtype`: the matrix of `shape` that the codes stand for."""
    if runs_triton(codes.device.type):
        from dapo.models.kernels.quantized import dequantize as by_kernel

        return by_kernel(codes, scales, shape, dtype, level_pairs(codes.device))
    return plain_dequantize(codes, scales, shape, dtype)


def plain_dequantize(codes: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    is_int8 = codes.dtype == torch.int8
    units = codes if is_int8 else F.embedding(codes.int(), level_pairs(codes.device))
    blocks = units.view(len(scales), -1) * scales.float()[:, None]
    return blocks.flatten()[: shape.numel()].view(shape).to(dtype)


@cache  # a graph that is captured cannot copy it to the device
def level_pairs(device: torch.device) -> Tensor:
    """[256, 2] the two levels of every byte of NF4."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.cartesian_prod(levels, levels)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that keeps its codes alone: `weight` is made whenever it is read, and not kept."""

    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, kind: Kind, device: torch.device | str) -> None:
        nn.Module.__init__(self)  # not that of nn.Linear, which makes a matrix
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        codes, scales = quantize(linear.weight.to(device), kind)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().to(device), requires_grad=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        shape = torch.Size((self.out_features, self.in_features))
        return dequantize(self.codes, self.scales, shape, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return product


class _Product(torch.autograd.Function):
    """x Wᵀ + b. The matrix is not saved for the backward pass, which makes it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: QuantizedLinear) -> Tensor:
        ctx.linear = linear
        return F.linear(x, linear.weight, linear.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] @ ctx.linear.weight, None


def quantize_linears(model: nn.Module, head: nn.Module | None, kind: Kind, device: torch.device | str) -> None:
    """Replace every linear layer but the head, one by one: the device never holds more than one matrix as it was."""
    linears = [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    for name, linear in linears:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, QuantizedLinear(linear, kind, device))
