"""Frozen matrices under an adapter in 8 or 4 bits: int8, and NF4, the NormalFloat of QLoRA (arXiv:2305.14314).

A matrix is flattened into blocks of 64 weights. Of a block one scale is kept in float32, and a code of each weight:

- int8: weight / scale rounded to −127 … 127, where the scale is the largest magnitude / 127. 8.5 bits a weight.
- NF4: which of 16 levels is nearest to weight / scale, where the scale is the largest magnitude. 4.5 bits a weight.

Whoever reads the matrix gets code · scale (NF4: level · scale), so that the policy that samples, the one that is
trained and the reference multiply by the same numbers. Scales in float16 would save 0.25 bits, and lose those of blocks
below 6e-8.

Differs from the paper: NF4's scales are not quantized a second time, which would save 0.37 bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dapo.models.triton_support import runs_triton

Kind = Literal["int8", "nf4"]
BLOCK = 64
# Quantiles of a normal distribution scaled to [−1, 1]: seven below 0, eight above it, and 0 itself (appendix E).
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def quantize(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Codes and the blocks' scales [⌈n/64⌉].

    int8: a code per weight, int8 [⌈n/64⌉·64]. NF4: two per byte, the first in the high bits, uint8 [⌈n/64⌉·32].
    """
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1) / {"int8": 127, "nf4": 1}[kind]
    unit = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    if kind == "int8":
        return unit.round().to(torch.int8).flatten(), scales
    levels = torch.tensor(LEVELS, device=weight.device)
    nearest = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    return nearest.view(-1, 2)[:, 0] << 4 | nearest.view(-1, 2)[:, 1], scales


def dequantize(codes: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """code · scale in float32, rounded to `dtype`: the matrix of `shape` that the codes stand for."""
    if runs_triton(codes.device.type):
        from dapo.models.kernels.quantized import dequantize as by_kernel

        return by_kernel(codes, scales, shape, dtype, level_pairs(codes.device))
    return plain_dequantize(codes, scales, shape, dtype)


def plain_dequantize(codes: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    is_int8 = codes.dtype == torch.int8
    units = codes if is_int8 else F.embedding(codes.int(), level_pairs(codes.device))
    blocks = units.view(-1, BLOCK) * scales[:, None]
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
