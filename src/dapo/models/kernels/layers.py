"""RMS norm with its residual sum, the gated feed-forward's product, and rotary positions: one read and one write each.

Rounding follows the Hugging Face modules step by step (a 16-bit value is rounded where theirs is), so that log-probs
stay comparable; sums are float32 throughout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs of the norm's backward pass: each sums the weight's gradient over its rows, the host adds the sums up.
NORM_PROGRAMS = 1024


@triton.jit
def _norm_forward(
    x, residual, weight, total, normed, inverse_rms, H, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    s = tl.load(x + row * H + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        s += tl.load(residual + row * H + column, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(total.dtype.element_ty)
        tl.store(total + row * H + column, rounded, mask=inside)
        s = rounded.to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(s * s, 0) / H + eps)
    tl.store(inverse_rms + row, r)
    unit = (s * r).to(normed.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * H + column, (unit * w).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    grad_normed, grad_total, total, weight, inverse_rms, grad_x, grad_weight, N, H,
    HAS_TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < H
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    row_length = tl.zeros([BLOCK], tl.int64) + H
    for i in range(program, N, programs):
        at = i * row_length + column
        dy = tl.load(grad_normed + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(inverse_rms + i)
        unit = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * r
        weight_sum += dy * unit
        dunit = dy * w
        dx = r * (dunit - unit * (tl.sum(dunit * unit, 0) / H))
        if HAS_TOTAL:
            dx += tl.load(grad_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + at, dx.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(grad_weight + program * H + column, weight_sum, mask=inside)


def norm_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + residual, its RMS norm times weight, 1/RMS [N]); x [N, H] contiguous. Without residual the sum is x."""
    N, H = x.shape
    total = x if residual is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    inverse_rms = torch.empty(N, dtype=torch.float32, device=x.device)
    if N:
        _norm_forward[(N,)](
            x, x if residual is None else residual, weight, total, normed, inverse_rms, H, eps,
            HAS_RESIDUAL=residual is not None, BLOCK=triton.next_power_of_2(H), num_warps=_norm_warps(H),
        )  # fmt: skip
    return total, normed, inverse_rms


def norm_backward(
    grad_normed: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    """(gradient of the sum, and so of each of its terms; gradient of the weight in float32)."""
    N, H = total.shape
    grad_x = torch.empty_like(total)
    programs = min(N, NORM_PROGRAMS)
    grad_weight = torch.zeros(programs, H, dtype=torch.float32, device=total.device)
    if N:
        _norm_backward[(programs,)](
            grad_normed, grad_normed if grad_total is None else grad_total, total, weight, inverse_rms, grad_x,
            grad_weight, N, H,
            HAS_TOTAL=grad_total is not None, BLOCK=triton.next_power_of_2(H), num_warps=_norm_warps(H),
        )  # fmt: skip
    return grad_x, grad_weight.sum(0)


def _norm_warps(H: int) -> int:
    return int(min(16, max(1, triton.next_power_of_2(H) // 512)))


@triton.jit
def _gated_forward(gate, up, product, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    swish = (g * tl.sigmoid(g)).to(product.dtype.element_ty).to(tl.float32)
    tl.store(product + at, (swish * u).to(product.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(grad, gate, up, grad_gate, grad_up, product, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    swish = (g * sigmoid).to(product.dtype.element_ty).to(tl.float32)
    tl.store(product + at, (swish * u).to(product.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, (d * swish).to(grad_up.dtype.element_ty), mask=inside)
    dg = d * u * (sigmoid + swish * (1 - sigmoid))
    tl.store(grad_gate + at, dg.to(grad_gate.dtype.element_ty), mask=inside)


GATED_BLOCK = 2048


def gated_forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, contiguous tensors of one shape."""
    product = torch.empty_like(gate)
    n = gate.numel()
    if n:
        _gated_forward[(triton.cdiv(n, GATED_BLOCK),)](gate, up, product, n, BLOCK=GATED_BLOCK, num_warps=8)
    return product


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate, gradient of up, the product once more: the next matrix wants it for its own gradient)."""
    grad_gate, grad_up, product = (torch.empty_like(gate) for _ in range(3))
    n = gate.numel()
    if n:
        _gated_backward[(triton.cdiv(n, GATED_BLOCK),)](
            grad, gate, up, grad_gate, grad_up, product, n, BLOCK=GATED_BLOCK, num_warps=8
        )
    return grad_gate, grad_up, product


@triton.jit
def _rotate_rows(
    x, out, row_of_x, row_of_out, c1, c2, s1, s2, HEADS: tl.constexpr, HALF: tl.constexpr,
    IS_BACKWARD: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    head, j = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS) & (j < HALF)
    at = head * (2 * HALF) + j
    element = out.dtype.element_ty
    a = tl.load(x + row_of_x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + row_of_x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if IS_BACKWARD:
        first = (a * c1).to(element).to(tl.float32) + (b * s2).to(element).to(tl.float32)
        second = (b * c2).to(element).to(tl.float32) - (a * s1).to(element).to(tl.float32)
    else:
        first = (a * c1).to(element).to(tl.float32) - (b * s1).to(element).to(tl.float32)
        second = (b * c2).to(element).to(tl.float32) + (a * s2).to(element).to(tl.float32)
    tl.store(out + row_of_out + at, first.to(element), mask=inside)
    tl.store(out + row_of_out + at + HALF, second.to(element), mask=inside)


@triton.jit
def _rotate(
    q, k, q_out, k_out, cos, sin, q_stride, k_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, IS_BACKWARD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """One program per token: all heads of its query and key share the angles."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_HALF)[None, :]
    angles = token * (2 * HALF) + j
    c1 = tl.load(cos + angles, mask=j < HALF, other=0.0).to(tl.float32)
    c2 = tl.load(cos + angles + HALF, mask=j < HALF, other=0.0).to(tl.float32)
    s1 = tl.load(sin + angles, mask=j < HALF, other=0.0).to(tl.float32)
    s2 = tl.load(sin + angles + HALF, mask=j < HALF, other=0.0).to(tl.float32)
    q_row, k_row = token * Q_HEADS * 2 * HALF, token * K_HEADS * 2 * HALF
    _rotate_rows(q, q_out, token * q_stride, q_row, c1, c2, s1, s2, Q_HEADS, HALF, IS_BACKWARD, BLOCK_Q, BLOCK_HALF)
    _rotate_rows(k, k_out, token * k_stride, k_row, c1, c2, s1, s2, K_HEADS, HALF, IS_BACKWARD, BLOCK_K, BLOCK_HALF)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, is_backward: bool) -> tuple[Tensor, Tensor]:
    """Rotary positions: q [T, Hq, D] and k [T, Hk, D] rotated by the angles of cos and sin [T, D]; or back."""
    T, q_heads, D = q.shape
    k_heads = k.shape[1]
    q, k = (x if x.stride()[1:] == (D, 1) else x.contiguous() for x in (q, k))
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if T:
        _rotate[(T,)](
            q, k, q_out, k_out, cos, sin, q.stride(0), k.stride(0),
            Q_HEADS=q_heads, K_HEADS=k_heads, HALF=D // 2, IS_BACKWARD=is_backward,
            BLOCK_Q=triton.next_power_of_2(q_heads), BLOCK_K=triton.next_power_of_2(k_heads),
            BLOCK_HALF=triton.next_power_of_2(D // 2), num_warps=4,
        )  # fmt: skip
    return q_out, k_out
