"""Overlong reward shaping: what happens to responses that reach the length limit."""

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


def overlong_mask(mask: Tensor, is_truncated: Tensor) -> Tensor:
    """`mask` with the rows of truncated responses switched off: "Overlong Filtering", DAPO section 3.4.

    [B, T], [B] -> [B, T]. Such rows leave the loss and every denominator; their rewards stay in the group's mean and
    standard deviation (the paper does not say; this is our decision).
    """
    check_shapes("B", is_truncated, mask.any(dim=1))
    return mask.bool() & ~is_truncated.bool()[:, None]
