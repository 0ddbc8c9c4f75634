"""Gradients of rows that were taken more than once, summed in one launch: where each went, row after row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024  # of a row, that one program sums


@triton.jit
def _sum_taken(grad, order, starts, total, W, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < W
    s = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.load(starts + row), tl.load(starts + row + 1)):
        place = tl.load(order + i).to(tl.int64)
        s += tl.load(grad + place * W + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row * W + column, s.to(total.dtype.element_ty), mask=inside)


def sum_taken(grad: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """[M, ...] -> [T, ...]: row t is the sum of grad[order[starts[t] : starts[t + 1]]], in that order, in float32."""
    grad, T = grad.contiguous(), len(starts) - 1
    total = torch.empty(T, *grad.shape[1:], dtype=grad.dtype, device=grad.device)
    W = total[0].numel() if T else 0
    if W:
        block = min(COLUMNS, triton.next_power_of_2(W))
        _sum_taken[(T, triton.cdiv(W, block))](
            grad, order, starts, total, W, BLOCK=block, num_warps=max(1, block // 256)
        )
    return total
