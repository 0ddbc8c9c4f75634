"""Rewards in parts: the weighted sum, GDPO's normalisation of each part, and what each part adds to an advantage."""

from typing import Literal

import torch
from torch import Tensor

from dapo.algorithms.advantages import group_advantage
from dapo.algorithms.shapes import check_shapes

Std = Literal["sample", "population", "none"]


def weighted_sum(reward: Tensor, weight: Tensor) -> Tensor:
    """R_i = Σ_k w_k r_{k,i}. [K, P, G], [K] -> [P, G]: the K parts of each response's reward.

    GDPO (arXiv:2601.05242) eq. 1, with weights. One part of weight 1 is its own sum, to the bit.
    """
    check_shapes("K P G", reward)
    return (weight[:, None, None] * reward).sum(dim=0)


def normalize_then_sum(reward: Tensor, weight: Tensor, *, std: Std = "sample", eps: float = 1e-6) -> Tensor:
    """Â_i = (A_i − mean(A)) / (std(A) + ε),  A_i = Σ_k w_k (r_{k,i} − mean({r_k})) / (std({r_k}) + ε).

    GDPO (arXiv:2601.05242) eq. 4–7: each of the K parts is normalised over the G completions of a problem, and their
    weighted sum over all responses of the step. [K, P, G], [K] -> [P, G].

    Conventions are those of `group_advantage` in both places, with its ε, of which the paper has only the second: a
    part that is equal within a group adds exactly 0 there, and a step in which all sums are equal gets exactly 0.
    Responses that leave the loss count in both. TRL's "normalize_then_sum" is this with ε = 1e-4; verl's takes the
    second mean and variance over tokens instead of responses.
    """
    total = normalized_contributions(reward, weight, std=std, eps=eps).sum(dim=0)
    return group_advantage(total.reshape(1, -1), std=std, eps=eps).view_as(total)


def normalized_contributions(reward: Tensor, weight: Tensor, *, std: Std, eps: float) -> Tensor:
    """a_{k,i} = w_k Â_i(r_k): what each part adds in GDPO, before the step's normalisation. [K, P, G] -> [K, P, G]."""
    check_shapes("K P G", reward)
    K, P, G = reward.shape
    return weight[:, None, None] * group_advantage(reward.reshape(K * P, G), std=std, eps=eps).view(K, P, G)


def sum_contributions(reward: Tensor, weight: Tensor, *, std: Std, eps: float) -> Tensor:
    """a_{k,i} = w_k (r_{k,i} − mean({r_k})) / (std({R}) + ε): what each part adds to eq. 9 of the weighted sum R.

    [K, P, G] -> [K, P, G]; their sum over k is `group_advantage(R)`. 0 in a group whose sums are all equal.
    """
    centred = normalized_contributions(reward, weight, std="none", eps=eps)
    total = weighted_sum(reward, weight)
    is_equal = (total == total[:, :1]).all(dim=1, keepdim=True)
    if std != "none":
        centred = centred / (total.std(dim=1, correction=1 if std == "sample" else 0, keepdim=True) + eps)
    return torch.where(is_equal, torch.zeros_like(centred), centred)


def advantage_shares(contribution: Tensor) -> Tensor:
    """s_k = Σ_i a_{k,i} A_i / Σ_i A_i²,  A = Σ_k a_k: the share of the advantages' variance that is due to part k.

    [K, P, G] -> [K]: contributions that are centred in each group. The shares sum to 1; that of a part which pulls
    against the sum is negative, and another is then above 1. All are 0 where every advantage is.
    """
    check_shapes("K P G", contribution)
    total = contribution.sum(dim=0)
    squares = (total * total).sum()
    shares = (contribution * total).sum(dim=(1, 2))
    return shares / squares if squares > 0 else torch.zeros_like(shares)


def fill_missing(reward: Tensor, weight: Tensor) -> Tensor:
    """NaN, a part that could not be measured, counts as the worst that the part has in its group; as 0 where none is.

    [K, P, G], [K] -> [K, P, G]. The worst by the weight: the least, or the greatest of a penalty (w_k < 0). So no
    response gains by a part that fails on it. Ours; TRL adds 0.
    """
    check_shapes("K P G", reward)
    is_missing, sign = reward.isnan(), weight.sign()[:, None, None]
    worst = sign * torch.where(is_missing, torch.inf, sign * reward).amin(dim=2, keepdim=True)
    worst = torch.where(worst.isfinite(), worst, torch.zeros_like(worst))
    return torch.where(is_missing, worst, reward)
