"""From per-token losses [N] to one number: all tokens of the loss end to end, each with its row or group.

The denominator is always an argument. It counts the whole update, over all micro-batches and all ranks; a micro-batch's
own count would make the gradient depend on how the batch was split. Sum the results over micro-batches and ranks, and
divide nothing else. A denominator of 0 (nothing to train on) gives 0, never NaN. A token that is not in the loss is not
among the N: there is no mask that could be forgotten.
"""

import torch
from torch import Tensor

from dapo.algorithms.shapes import check_shapes

Count = int | float | Tensor


def token_mean(loss: Tensor, *, total_tokens: Count) -> Tensor:
    """Σ_i Σ_t ℓ_{i,t} / Σ_i |o_i|: every token of the update weighs the same.

    DAPO (arXiv:2503.14476) eq. 12, "Token-Level Loss"; VAPO (arXiv:2504.05118) eq. 7. Differs from DAPO eq. 8 read to
    the letter, which divides per prompt group and averages over groups: that reading is `prompt_mean`.
    """
    check_shapes("N", loss)
    return _divide(loss.sum(), total_tokens)


def sequence_mean(loss: Tensor, row: Tensor, *, row_tokens: Tensor, total_sequences: Count) -> Tensor:
    """(1/N) Σ_i (1/|o_i|) Σ_t ℓ_{i,t}: every response weighs the same, whatever its length.

    GRPO's sample-level loss, DAPO paper eq. 5. `row` [N] is the response of each token, `row_tokens` [B] is |o_i|. A
    response without loss tokens adds 0 and must not be counted in `total_sequences`.
    """
    check_shapes("N", loss, row)
    return _divide((loss / row_tokens[row]).sum(), total_sequences)


def prompt_mean(loss: Tensor, group: Tensor, *, group_tokens: Tensor, total_prompts: Count) -> Tensor:
    """(1/P) Σ_p (1/Σ_{i∈p}|o_i|) Σ_{i∈p} Σ_t ℓ_{i,t}: token mean inside each prompt group, then the mean over prompts.

    DAPO eq. 8 read literally. `group` [N] is the group of each token; `group_tokens` [P] counts each group's
    loss tokens over the whole update, so that a group may be split over micro-batches (not over updates). A group
    without loss tokens adds 0 and must not be counted in `total_prompts`.
    """
    check_shapes("N", loss, group)
    return _divide((loss / group_tokens[group]).sum(), total_prompts)


def constant_norm(loss: Tensor, *, constant: Count) -> Tensor:
    """Σ_i Σ_t ℓ_{i,t} / constant.

    With constant = N · L (responses times a fixed length) it is Dr. GRPO (arXiv:2503.20783); with N the sequence mean
    of token sums; with 1 the plain sum.
    """
    check_shapes("N", loss)
    return _divide(loss.sum(), constant)


def _divide(total: Tensor, denominator: Count) -> Tensor:
    denominator = torch.as_tensor(denominator, dtype=total.dtype, device=total.device)
    return total / torch.where(denominator == 0, torch.ones_like(denominator), denominator) * (denominator != 0)
