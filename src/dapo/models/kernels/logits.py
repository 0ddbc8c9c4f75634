"""Logits to log-probs and entropies in one read, and logits to their gradient in one read and one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FAR_BELOW = tl.constexpr(-1e30)  # below every logit, yet finite: −inf − (−inf) would be NaN


@triton.jit
def _scores(
    logits, target, logp, normaliser, entropy, V, inverse_temperature, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row. Every lane keeps its own running maximum and sums, joined once at the end of the row."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], FAR_BELOW, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # Σ exp(z − largest)
    weighted = tl.zeros([BLOCK], tl.float32)  # Σ exp(z − largest) z
    for first in range(0, V, BLOCK):
        column = first + lane
        z = tl.load(start + column, mask=column < V, other=float("-inf")) * inverse_temperature
        new = tl.maximum(largest, z)
        shrink = tl.exp(largest - new)
        e = tl.exp(z - new)
        total = total * shrink + e
        if WITH_ENTROPY:
            weighted = weighted * shrink + tl.where(e == 0, 0.0, e * z)  # a token of probability 0 adds nothing
        largest = new
    top = tl.max(largest, 0)
    shrink = tl.exp(largest - top)
    sum_e = tl.sum(total * shrink, 0)
    log_z = top + tl.log(sum_e)
    chosen = tl.load(start + tl.load(target + row)) * inverse_temperature
    tl.store(normaliser + row, log_z)
    tl.store(logp + row, chosen - log_z)
    if WITH_ENTROPY:
        tl.store(entropy + row, log_z - tl.sum(weighted * shrink, 0) / sum_e)


@triton.jit
def _gradient(logits, target, normaliser, grad_logp, grad, V, inverse_temperature, BLOCK: tl.constexpr):
    """(1[target] − p)/τ times the row's incoming gradient, in the gradient's own precision."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    scale = tl.load(grad_logp + row).to(tl.float32) * inverse_temperature
    z = tl.load(logits + row * V + column, mask=inside, other=0.0) * inverse_temperature
    p = tl.exp(z - tl.load(normaliser + row))
    hit = column == tl.load(target + row)
    g = (tl.where(hit, 1.0, 0.0) - p) * scale
    tl.store(grad + row * V + column, g.to(grad.dtype.element_ty), mask=inside)


def logit_scores(
    logits: Tensor, target: Tensor, *, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, log-normaliser, entropy), each [N] float32, of float32 logits [N, V] before the temperature."""
    N, V = logits.shape
    assert logits.is_contiguous(), "rows of logits follow each other"
    logp, normaliser = (torch.empty(N, dtype=torch.float32, device=logits.device) for _ in range(2))
    entropy = torch.zeros_like(logp)
    block = min(4096, triton.next_power_of_2(V))
    if N:
        _scores[(N,)](
            logits, target, logp, normaliser, entropy, V, 1 / temperature, WITH_ENTROPY=with_entropy, BLOCK=block,
            num_warps=8,
        )  # fmt: skip
    return logp, normaliser, entropy


def logit_gradient(
    logits: Tensor, target: Tensor, normaliser: Tensor, grad_logp: Tensor, *, temperature: float, dtype: torch.dtype
) -> Tensor:
    """d(Σ grad_logp · logp)/d(logits) [N, V] in `dtype`; float32 ones take the place of the logits."""
    N, V = logits.shape
    assert logits.is_contiguous(), "rows of logits follow each other"
    grad = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    block = min(4096, triton.next_power_of_2(V))
    if N:
        _gradient[(N, triton.cdiv(V, block))](
            logits, target, normaliser, grad_logp.contiguous(), grad, V, 1 / temperature, BLOCK=block, num_warps=8
        )
    return grad
