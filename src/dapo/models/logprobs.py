"""From hidden states to log-probs and entropies of given tokens, without the [tokens, vocabulary] matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor

from dapo.algorithms import diagnostics
from dapo.models.device import device_memory
from dapo.models.kernels import compiled
from dapo.models.kernels.build import library
from dapo.models.triton_support import runs_triton

# Elements of the largest block of logits. On a CPU 2^24 (64 MiB in float32, 110 tokens at a vocabulary of 152,000); on
# CUDA 2^28 (1 GiB, 1,766 tokens), for a matrix product of 110 rows is bound by reading the weights.
CHUNK_ELEMENTS = 1 << 24
CUDA_CHUNK_ELEMENTS = 1 << 28

# All logits of a micro-batch stay for the backward pass, which saves their second computation: on CUDA if they take at
# most this share of the device's memory (the second, where layers make activations again to save memory) and this share
# of what is free of it, on a CPU if they are one block.
KEPT_FRACTION_OF_DEVICE = 0.15
KEPT_FRACTION_WHERE_SHORT = 0.05
KEPT_FRACTION_OF_FREE = 0.25


class ExactHead(Protocol):
    """Logits and log-probs with an engine's bits."""

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What `head_logits` computes."""
        ...

    def scores(self, logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets [N], and log-normalisers."""
        ...


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [N, H] @ weight [V, H]ᵀ + bias -> logits [N, V], in float32 for half precisions, else in their own."""
    if hidden.dtype in (torch.float32, torch.float64):
        logits = hidden @ weight.t()
    elif hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().t()
    return logits if bias is None else logits.add_(bias) if not logits.requires_grad else logits + bias


def plain_logprobs(
    hidden: Tensor, weight: Tensor, target: Tensor, *, temperature: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`linear_logprobs` as one reads it, with all logits at once. The reference."""
    logits = head_logits(hidden, weight, bias) / temperature  # [N, V]
    return torch.log_softmax(logits, dim=-1).gather(-1, target[:, None])[:, 0], diagnostics.entropy(logits)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float,
    chunk_tokens: int | None = None,
    bias: Tensor | None = None,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
    keeps_logits: bool | None = None,
    is_short_of_memory: bool = False,
    is_fused: bool | None = None,
    exact: ExactHead | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden Wᵀ / τ)[target] and the entropy of that softmax, per token.

    hidden [N, H], weight [V, H], target [N]. Returns (logp [N], entropy [N]); the entropy is 0 when it is not asked
    for, and carries a gradient only with `entropy_gradient`, which takes the plain passes on CUDA too. Logits are
    float32 (float64 for float64 inputs) and exist for `chunk_tokens` tokens at a time, in the backward pass too, where
    they are made again unless memory is plenty. Gradients flow to hidden, weight and bias. The passes over the logits
    are one kernel each, on CUDA and where there is a C compiler; `is_fused` False takes the plain ones. With `exact`
    logits and log-probs are its own, and gradients the same as without, up to rounding.
    """
    assert temperature > 0, f"temperature {temperature}: log-probs of greedy decoding are not defined"
    if entropy_gradient:
        is_fused = False
    if is_fused is None:
        is_fused = hidden.dtype != torch.float64 and has_kernels(hidden.device.type)
    wants_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    if keeps_logits is None:
        keeps_logits = (
            is_fused and wants_grad and _fits(len(hidden) * weight.shape[0], hidden.device, is_short=is_short_of_memory)
        )
    settings = _Settings(
        temperature=temperature,
        chunk=chunk_tokens or chunk_size(len(hidden), weight.shape[0], hidden.device.type),
        with_entropy=with_entropy or entropy_gradient,
        entropy_gradient=entropy_gradient,
        keeps_logits=keeps_logits and wants_grad,
        is_fused=is_fused,
        exact=exact,
    )
    logp, entropy = _LinearLogprobs.apply(hidden, weight, bias, target, settings)  # type: ignore[no-untyped-call]
    return logp, entropy


def has_kernels(device_type: str) -> bool:
    return runs_triton(device_type) or (device_type == "cpu" and library() is not None)


def logit_kernels(logits: Tensor) -> Any:
    """The module of the kernels: Triton's or, for a CPU, those compiled."""
    if runs_triton(logits.device.type):
        from dapo.models.kernels import logits as triton_kernels

        return triton_kernels
    return compiled


def chunk_size(N: int, V: int, device_type: str) -> int:
    """Tokens at a time: what the largest block holds, in chunks of nearly equal size."""
    if device_type != "cuda":
        return max(1, CHUNK_ELEMENTS // V)
    most = max(128, CUDA_CHUNK_ELEMENTS // V // 128 * 128)
    n_chunks = ceil(N / most)
    return ceil(N / n_chunks / 128) * 128 if N else 1


def _fits(n_logits: int, device: torch.device, *, is_short: bool) -> bool:
    """All logits in float32 are a small part of the device and of what is free of it; on a CPU one block."""
    if device.type != "cuda":
        return n_logits <= CHUNK_ELEMENTS
    free, total = device_memory(device)
    share = KEPT_FRACTION_WHERE_SHORT if is_short else KEPT_FRACTION_OF_DEVICE
    return 4 * n_logits <= min(share * total, KEPT_FRACTION_OF_FREE * free)


@dataclass(frozen=True, slots=True)
class _Settings:
    temperature: float
    chunk: int
    with_entropy: bool
    entropy_gradient: bool
    keeps_logits: bool
    is_fused: bool
    exact: ExactHead | None

    def parts(self, N: int) -> Iterator[slice]:
        return (slice(start, min(start + self.chunk, N)) for start in range(0, N, self.chunk))


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logp = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        normaliser = torch.empty_like(logp)
        entropy = torch.zeros_like(logp)
        kept = []
        for part in settings.parts(len(hidden)):
            product = head_logits if settings.exact is None else settings.exact.logits
            logits = product(hidden[part], weight, bias)
            logp[part], normaliser[part], entropy[part] = _scores(logits, target[part], settings)
            if settings.keeps_logits:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, bias, target, normaliser, entropy)
        ctx.settings, ctx.kept = settings, kept
        if not settings.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, normaliser, entropy = ctx.saved_tensors
        settings: _Settings = ctx.settings
        kept: list[Tensor | None] = ctx.kept
        grad_logp, grad_entropy = grad_outputs
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Sums over tokens are kept in float32 (float64), whatever the weights are.
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if wants_bias else None
        gradient = _fused_gradient if settings.is_fused else _plain_gradient
        for i, part in enumerate(settings.parts(len(hidden))):
            logits = kept[i] if kept else head_logits(hidden[part], weight, bias)
            assert logits is not None, "a gradient is taken once: the kept logits are gone"
            scores = target[part], normaliser[part], grad_logp[part]
            if settings.entropy_gradient:
                scores_of_entropy = entropy[part], grad_entropy[part]
                grad = _entropy_gradient(logits, *scores, *scores_of_entropy, settings.temperature, hidden.dtype)
            else:
                grad = gradient(logits, *scores, settings.temperature, hidden.dtype)
            if kept:
                kept[i] = None
            del logits
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if wants_weight:
                grad_weight = _add_product(grad_weight, grad.t(), hidden[part], normaliser.dtype)
            del grad
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _scores(logits: Tensor, target: Tensor, settings: _Settings) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, log-normaliser, entropy) of logits before the temperature, which may be used up unless they are kept."""
    scores = _fused_scores if settings.is_fused else _plain_scores
    if settings.exact is None:
        return scores(logits, target, settings)
    logp, normaliser = settings.exact.scores(logits, target, settings.temperature)
    return logp, normaliser, scores(logits, target, settings)[2] if settings.with_entropy else torch.zeros_like(logp)


def _plain_scores(logits: Tensor, target: Tensor, settings: _Settings) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, log-normaliser, entropy) of logits before the temperature; they stay as they are if they are kept."""
    scaled = logits / settings.temperature if settings.keeps_logits else logits.div_(settings.temperature)
    normaliser = torch.logsumexp(scaled, dim=-1)
    logp = scaled.gather(-1, target[:, None])[:, 0] - normaliser
    if not settings.with_entropy:
        return logp, normaliser, torch.zeros_like(logp)
    p = (scaled - normaliser[:, None]).exp_()
    # H = log Z − Σ p z; a token of probability 0 (z = −inf) adds nothing
    return logp, normaliser, normaliser - p.mul_(scaled.masked_fill_(p == 0, 0)).sum(-1)


def _fused_scores(logits: Tensor, target: Tensor, settings: _Settings) -> tuple[Tensor, Tensor, Tensor]:
    scores: tuple[Tensor, Tensor, Tensor] = logit_kernels(logits).logit_scores(
        logits, target, temperature=settings.temperature, with_entropy=settings.with_entropy
    )
    return scores


def _plain_gradient(
    logits: Tensor, target: Tensor, normaliser: Tensor, grad_logp: Tensor, temperature: float, dtype: torch.dtype
) -> Tensor:
    """d logp / d logits = (1[target] − p) / τ, times the incoming gradient; the logits are used up."""
    grad = logits.div_(temperature).sub_(normaliser[:, None]).exp_().mul_(-grad_logp[:, None])
    grad.scatter_add_(1, target[:, None], grad_logp[:, None])
    return grad.div_(temperature).to(dtype)


def _entropy_gradient(
    logits: Tensor,
    target: Tensor,
    normaliser: Tensor,
    grad_logp: Tensor,
    entropy: Tensor,
    grad_entropy: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """`_plain_gradient` and d H / d logits = −p (log p + H) / τ, times the entropy's own incoming gradient."""
    logp = logits / temperature - normaliser[:, None]
    p = logp.exp()
    of_entropy = -p * (logp.masked_fill(p == 0, 0) + entropy[:, None]) * grad_entropy[:, None] / temperature
    of_logp = _plain_gradient(logits, target, normaliser, grad_logp, temperature, logits.dtype)
    return of_logp.add_(of_entropy).to(dtype)


def _fused_gradient(
    logits: Tensor, target: Tensor, normaliser: Tensor, grad_logp: Tensor, temperature: float, dtype: torch.dtype
) -> Tensor:
    grad: Tensor = logit_kernels(logits).logit_gradient(
        logits, target, normaliser, grad_logp, temperature=temperature, dtype=dtype
    )
    return grad


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b in `dtype`, in place where there is a total."""
    if total is None:
        return head_logits(a, b.t())
    if a.dtype == dtype:
        return total.addmm_(a, b)
    if a.is_cuda and _adds_in_float32():
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    return total.add_(head_logits(a, b.t()))


@cache
def _adds_in_float32() -> bool:
    """This torch adds a product of 16-bit matrices onto a float32 one in place; older ones refuse."""
    ones = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    total = torch.ones(16, 16, device="cuda")
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())
