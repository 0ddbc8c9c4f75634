"""From hidden states to log-probs and entropies of given tokens, without the [tokens, vocabulary] matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Elements of the largest block of logits, 2^24: 64 MiB in float32, one chunk of 110 tokens at a vocabulary of 152,000.
CHUNK_ELEMENTS = 1 << 24


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [N, H] @ weight [V, H]ᵀ + bias -> logits [N, V], in float32 for half precisions, else in their own."""
    if hidden.dtype in (torch.float32, torch.float64):
        logits = hidden @ weight.t()
    elif hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().t()
    return logits if bias is None else logits + bias


def plain_logprobs(
    hidden: Tensor, weight: Tensor, target: Tensor, *, temperature: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`linear_logprobs` as one reads it, with all logits at once. The reference."""
    logp = torch.log_softmax(head_logits(hidden, weight, bias) / temperature, dim=-1)  # [N, V]
    entropy = -torch.xlogy(logp.exp(), logp.exp()).sum(-1)
    return logp.gather(-1, target[:, None])[:, 0], entropy.detach()


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float,
    chunk_tokens: int | None = None,
    bias: Tensor | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden Wᵀ / τ)[target] and the entropy of that softmax, per token.

    hidden [N, H], weight [V, H], target [N]. Returns (logp [N], entropy [N]); the entropy carries no gradient and is 0
    when it is not asked for. Logits are float32 (float64 for float64 inputs) and exist for `chunk_tokens` tokens at a
    time, in the backward pass too, where they are made again. Gradients flow to hidden, weight and bias.
    """
    assert temperature > 0, f"temperature {temperature}: log-probs of greedy decoding are not defined"
    chunk = chunk_tokens or max(1, CHUNK_ELEMENTS // weight.shape[0])
    logp, entropy = _LinearLogprobs.apply(hidden, weight, bias, target, temperature, chunk, with_entropy)  # type: ignore[no-untyped-call]
    return logp, entropy


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logp = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        normaliser = torch.empty_like(logp)
        entropy = torch.zeros_like(logp)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = head_logits(hidden[part], weight, bias).div_(temperature)
            normaliser[part] = torch.logsumexp(logits, dim=-1)
            logp[part] = logits.gather(-1, target[part, None])[:, 0] - normaliser[part]
            if with_entropy:  # H = log Z − Σ p z; a token of probability 0 (z = −inf) adds nothing
                p = (logits - normaliser[part, None]).exp_()
                entropy[part] = normaliser[part] - p.mul_(logits.masked_fill_(p == 0, 0)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, target, normaliser)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, normaliser = ctx.saved_tensors
        grad_logp = grad_outputs[0]
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # Sums over tokens are kept in float32 (float64), whatever the weights are.
        grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if wants_bias else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = head_logits(hidden[part], weight, bias).div_(ctx.temperature)
            # d logp / d logits = (1[target] − p) / τ
            grad = (logits - normaliser[part, None]).exp_().mul_(-grad_logp[part, None])
            grad.scatter_add_(1, target[part, None], grad_logp[part, None])
            grad.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            half = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = half @ weight
            if grad_weight is not None:
                if half.dtype == grad_weight.dtype:
                    grad_weight.addmm_(half.t(), hidden[part])
                else:
                    grad_weight += head_logits(half.t(), hidden[part].t())
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )
