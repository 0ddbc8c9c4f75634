"""What a step shows about itself. Per-token quantities are tensors [B, T]; `masked_mean` averages them.

Ranks and micro-batches add sums and counts, then divide: pass the step's total to `masked_mean`, and add its results.
No gradient flows through anything here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.algorithms.aggregate import Count, token_mean
from dapo.algorithms.losses import policy_ratio
from dapo.algorithms.shapes import check_shapes


def masked_mean(quantity: Tensor, mask: Tensor, *, total_tokens: Count | None = None) -> Tensor:
    """Σ x·mask / total; `total_tokens` None takes the mask's own count. An empty mask gives 0."""
    count = mask.sum() if total_tokens is None else total_tokens
    return token_mean(quantity.detach(), mask, total_tokens=count)


@torch.no_grad()
def entropy(logits: Tensor) -> Tensor:
    """H = −Σ_v p_v log p_v of softmax(logits), in nats. [..., V] -> [...]."""
    logp = torch.log_softmax(logits, dim=-1)
    return -(logp.exp() * logp).nan_to_num(nan=0.0).sum(dim=-1)  # p = 0 adds 0, its limit


@torch.no_grad()
def mean_probability(logp: Tensor, mask: Tensor, *, total_tokens: Count | None = None) -> Tensor:
    """Mean of π_θ(o_t) over the sampled tokens, the second curve of DAPO Fig. 7."""
    return masked_mean(logp.exp(), mask, total_tokens=total_tokens)


@torch.no_grad()
def approximate_kl(logp: Tensor, logp_old: Tensor, mask: Tensor, *, total_tokens: Count | None = None) -> Tensor:
    """Mean of log π_old − log π_θ over tokens drawn from π_old: how far the updates of this step have moved (k1)."""
    return masked_mean(logp_old - logp, mask, total_tokens=total_tokens)


@dataclass(frozen=True, slots=True)
class ClippedTokens:
    """Which tokens the clip stopped, [B, T] each; a token is in at most one of them."""

    low: Tensor  # Â < 0 and r < 1 − ε_low: no further push down
    high: Tensor  # Â > 0 and r > 1 + ε_high: no further push up; the tokens clip-higher is about
    dual: Tensor  # Â < 0 and r > c: the loss of a rising wrong token is bounded


@torch.no_grad()
def clipped_tokens(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClippedTokens:
    """Tokens whose gradient the clip of `losses.clipped_surrogate` removes, by side. Â = 0 is never clipped."""
    check_shapes("B T", logp, logp_old, advantage)
    ratio = policy_ratio(logp, logp_old)
    return ClippedTokens(
        low=(advantage < 0) & (ratio < 1 - clip_low),
        high=(advantage > 0) & (ratio > 1 + clip_high),
        dual=(advantage < 0) & (ratio > (float("inf") if dual_clip is None else dual_clip)),
    )


@torch.no_grad()
def clipped_high_probability(logp: Tensor, clipped_high: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, max) of π_θ over the tokens clipped high; DAPO Fig. 3 finds the maximum below 0.2. (0, 0) if none was."""
    chosen = clipped_high & mask.bool()
    probability = torch.where(chosen, logp.exp(), 0.0)
    largest = probability.max() if probability.numel() else probability.sum()
    return masked_mean(probability, chosen), largest


@torch.no_grad()
def explained_variance(value: Tensor, ret: Tensor, mask: Tensor) -> Tensor:
    """1 − Var(R̂ − V)/Var(R̂) over the masked tokens: 1 is a perfect critic, 0 a constant one, negative worse than that.

    Of returns that do not vary nothing can be explained: 0.
    """
    check_shapes("B T", value, ret, mask)
    chosen = mask.bool()
    if int(chosen.sum()) < 2:
        return value.new_zeros(())
    spread = ret[chosen].var()
    residual = (ret - value)[chosen].var()
    return torch.where(spread > 0, 1 - residual / spread.clamp(min=torch.finfo(value.dtype).tiny), 0.0)


@torch.no_grad()
def effective_sample_size(weight: Tensor, mask: Tensor) -> Tensor:
    """(Σ w)² / (N Σ w²) in (0, 1]: the share of tokens that importance weights leave in effect. 1 for equal weights."""
    check_shapes("B T", weight, mask)
    chosen = weight[mask.bool()]
    if chosen.numel() == 0:
        return weight.new_zeros(())
    return chosen.sum() ** 2 / (chosen.numel() * (chosen**2).sum())


@dataclass(frozen=True, slots=True)
class TrainerEngineGap:
    """How far the trainer's log-probs of the sampled tokens stand from the engine's."""

    mean: Tensor  # mean |Δ log p|
    max: Tensor  # max |Δ log p|
    kl: Tensor  # k3 estimate of KL(engine ‖ trainer)


@torch.no_grad()
def trainer_engine_gap(logp_trainer: Tensor, logp_engine: Tensor, mask: Tensor) -> TrainerEngineGap:
    """Mean and largest |log π_trainer − log π_engine|, and the KL between the two, over the sampled tokens."""
    check_shapes("B T", logp_trainer, logp_engine, mask)
    d = torch.where(mask.bool(), logp_trainer - logp_engine, 0.0)
    return TrainerEngineGap(
        mean=masked_mean(d.abs(), mask),
        max=d.abs().max() if d.numel() else d.sum(),
        kl=masked_mean(torch.expm1(d) - d, mask),
    )
