"""Codes of int8 or NF4 to a matrix in one pass: a byte or half of one is read per weight, and the weight written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 1024  # of codes, a program


@triton.jit
def _from_int8(codes, scales, weight, N, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = at < N
    code = tl.load(codes + at, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + at // BLOCK, mask=inside, other=0.0)
    tl.store(weight + at, (code * scale).to(weight.dtype.element_ty), mask=inside)


@triton.jit
def _from_nf4(codes, scales, pairs, weight, N, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BYTES
    at = first + tl.arange(0, BYTES)
    inside = 2 * at < N
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + 2 * at // BLOCK, mask=inside, other=0.0).to(tl.float32)
    both = tl.interleave(tl.load(pairs + 2 * code) * scale, tl.load(pairs + 2 * code + 1) * scale)
    to = 2 * first + tl.arange(0, 2 * BYTES)
    tl.store(weight + to, both.to(weight.dtype.element_ty), mask=to < N)


def dequantize(codes: Tensor, scales: Tensor, shape: torch.Size, dtype: torch.dtype, pairs: Tensor) -> Tensor:
    """The matrix of `shape` that the codes stand for; `pairs` [256, 2] has NF4's levels of every byte."""
    weight = torch.empty(shape, dtype=dtype, device=codes.device)
    n, programs = weight.numel(), (triton.cdiv(len(codes), BYTES),)
    if codes.dtype == torch.int8:
        _from_int8[programs](codes, scales, weight, n, BYTES=BYTES, BLOCK=len(codes) // len(scales))
    else:
        _from_nf4[programs](codes, scales, pairs, weight, n, BYTES=BYTES, BLOCK=2 * len(codes) // len(scales))
    return weight
