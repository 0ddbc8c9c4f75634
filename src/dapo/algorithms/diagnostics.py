"""Diagnostics of a step: formulas over the sampled tokens, end to end and without padding.

Ranks and micro-batches add sums and counts and divide once, at the end: what they add is a tensor per token, or sums go
in. No gradient flows through anything here.
"""

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from dapo.algorithms.shapes import check_shapes


@torch.no_grad()
def entropy(logits: Tensor) -> Tensor:
    """H = −Σ_v p_v log p_v of softmax(logits), in nats. [..., V] -> [...]."""
    logp = torch.log_softmax(logits, dim=-1)
    return -(logp.exp() * logp).nan_to_num(nan=0.0).sum(dim=-1)  # p = 0 adds 0, its limit


@torch.no_grad()
def mean_probability(logp: Tensor) -> Tensor:
    """Mean of π_θ(o_t), the second curve of DAPO Fig. 7."""
    return logp.exp().mean()


@dataclass(frozen=True, slots=True)
class ClippedTokens:
    """Which tokens the clip stopped, [N] each; a token is in at most one of them."""

    low: Tensor  # Â < 0 and r < 1 − ε_low: no gradient
    high: Tensor  # Â > 0 and r > 1 + ε_high: no gradient; the tokens clip-higher is about
    dual: Tensor  # Â < 0 and r > c: the loss of a rising wrong token is bounded


@torch.no_grad()
def clipped_tokens(
    ratio: Tensor,
    advantage: Tensor,
    *,
    clip_low: float | None,
    clip_high: float,
    dual_clip: float | None = None,
) -> ClippedTokens:
    """Tokens whose gradient the clip removes, by side; `ratio` is that of the loss (`losses.clipping_ratio`), [N].

    Â = 0 is never clipped. CISPO bounds the weight of a token and leaves its gradient: there `high` are the tokens
    with Â > 0 and a truncated weight.
    """
    check_shapes("N", ratio, advantage)
    return ClippedTokens(
        low=(advantage < 0) & (ratio < (float("-inf") if clip_low is None else 1 - clip_low)),
        high=(advantage > 0) & (ratio > 1 + clip_high),
        dual=(advantage < 0) & (ratio > (float("inf") if dual_clip is None else dual_clip)),
    )


@torch.no_grad()
def clipped_high_probability(logp: Tensor, clipped: ClippedTokens) -> Tensor:
    """π_θ of the tokens clipped high, 0 of all others; DAPO Fig. 3 has their mean, and finds the maximum below 0.2."""
    return torch.where(clipped.high, logp.exp(), 0.0)


@dataclass(frozen=True, slots=True)
class ExplainedSums:
    """Sums over tokens of the returns R̂ and of what the values missed them by, R̂ − V; steps add up."""

    tokens: int = 0
    ret: float = 0.0
    ret_squared: float = 0.0
    miss: float = 0.0
    miss_squared: float = 0.0

    @classmethod
    def of(cls, value: Tensor, ret: Tensor) -> "ExplainedSums":
        ret, miss = ret.detach().double(), (ret - value).detach().double()
        return cls(ret.numel(), *(float(part) for x in (ret, miss) for part in (x.sum(), (x**2).sum())))

    def __add__(self, other: "ExplainedSums") -> "ExplainedSums":
        return ExplainedSums(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    @property
    def variance(self) -> float:
        """1 − Var(R̂ − V)/Var(R̂): 1 is a perfect critic, 0 a constant one, negative worse than that.

        Of returns that do not vary nothing can be explained: 0.
        """
        varies = self.tokens * self.ret_squared - self.ret**2
        misses = self.tokens * self.miss_squared - self.miss**2
        return 1 - misses / varies if varies > 1e-12 * self.tokens * self.ret_squared else 0.0


def explained_variance(value: Tensor, ret: Tensor) -> float:
    """`ExplainedSums.variance` of these tokens."""
    return ExplainedSums.of(value, ret).variance


def effective_sample_size(weight: float, weight_squared: float, *, n: float) -> float:
    """(Σ w)² / (N Σ w²) in [0, 1] from its sums: the share of tokens that importance weights leave in effect."""
    return weight**2 / (n * weight_squared) if weight_squared else 0.0


@dataclass(frozen=True, slots=True)
class TrainerEngineGap:
    """How far the trainer's log-probs of the sampled tokens are from the engine's."""

    mean: Tensor  # mean |Δ log p|
    max: Tensor  # max |Δ log p|
    kl: Tensor  # k3 estimate of KL(engine ‖ trainer)


@torch.no_grad()
def trainer_engine_gap(logp_trainer: Tensor, logp_engine: Tensor) -> TrainerEngineGap:
    """Mean and largest |log π_trainer − log π_engine|, and the KL between the two, over the sampled tokens.

    k3 as in `losses.kl_penalty`, but without its bounds: here a wide gap is what one wants to see.
    """
    d = logp_trainer - logp_engine
    return TrainerEngineGap(mean=d.abs().mean(), max=d.abs().max(), kl=(torch.expm1(d) - d).mean())
