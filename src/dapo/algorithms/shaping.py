"""Overlong reward shaping: what happens to responses that reach the length limit."""

import torch
from torch import Tensor

from dapo.algorithms.shapes import check_shapes


def soft_overlong_penalty(length: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """R_len = 0 up to L_max − L_cache, then falling linearly to −1 at L_max, and −1 beyond.

    DAPO (arXiv:2503.14476) eq. 13: ((L_max − L_cache) − |y|)/L_cache for L_max − L_cache < |y| ≤ L_max. Added to the
    ±1 reward of right and wrong answers alike. [B] -> [B]. |y| counts response tokens, the end token included;
    `max_length` is the limit of the response alone, not of prompt and response.
    """
    if not 0 < buffer < max_length:
        raise ValueError(f"buffer must lie between 0 and max_length = {max_length}, got {buffer}")
    return (((max_length - buffer) - length) / buffer).clamp(-1, 0)


def overlong_filter(is_in_loss: Tensor, is_truncated: Tensor) -> Tensor:
    """The rows of the loss without the truncated ones: "Overlong Filtering", DAPO section 3.4.

    [B], [B] -> [B]. Such rows leave the loss and every denominator; their rewards stay in the group's mean and standard
    deviation (the paper does not say; this is our decision).
    """
    check_shapes("B", is_in_loss, is_truncated)
    return is_in_loss & ~is_truncated


def token_rewards(reward: Tensor, mask: Tensor, kl: Tensor | None = None, *, kl_coefficient: float = 0.0) -> Tensor:
    """What each token is paid: the response's reward on its last token, and −β·KL on every token where `kl` is given.

    [B], [B, T] and perhaps [B, T] -> [B, T], 0 where `mask` is False. A row without tokens is paid nothing.
    """
    check_shapes("B", reward, mask.any(dim=1))
    mask = mask.bool()
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    paid = torch.where(is_last, reward[:, None], torch.zeros_like(reward)[:, None])
    if kl is None:
        return paid
    return paid - kl_coefficient * torch.where(mask, kl, torch.zeros_like(kl))
