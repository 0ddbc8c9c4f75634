"""Losses per token [N]: policy losses by name, and what PPO, GRPO and VAPO add to them. `aggregate` owns the means.

The N tokens are those of whole responses, end to end; where a loss looks at responses, `lengths` has the tokens of
each. No response is ever split over micro-batches, so that none of this depends on them. Log-probs come in float32 at
least (`models.logprobs`), whatever the weights are in.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Required, TypedDict, Unpack

import torch
from torch import Tensor

from dapo.algorithms.aggregate import Count, token_mean
from dapo.algorithms.shapes import check_shapes

LOG_RATIO_BOUND = 20.0  # |log r| is clamped before exp: e^20 is far outside any clip, and finite in bf16
K3_BOUND = 10.0


class Bounds(TypedDict, total=False):
    """ε_low (None: no lower bound), ε_high, and the dual clip c."""

    clip_low: Required[float | None]
    clip_high: Required[float]
    dual_clip: float | None


def policy_loss(
    name: str, logp: Tensor, logp_old: Tensor, advantage: Tensor, lengths: Sequence[int], **bounds: Unpack[Bounds]
) -> Tensor:
    """[N] the policy loss by its name in a config, `algorithm.loss`."""
    match name:
        case "clip":
            return clipped_surrogate(logp, logp_old, advantage, **bounds)
        case "cispo":
            return cispo(logp, logp_old, advantage, clip_low=bounds["clip_low"], clip_high=bounds["clip_high"])
        case "gspo":
            return gspo(logp, logp_old, advantage, lengths, **bounds)
        case "gspo-token":
            return gspo_token(logp, logp_old, advantage, lengths, **bounds)
        case "reinforce":
            return reinforce(logp, advantage)
    raise ValueError(f"no policy loss {name}")


def clipping_ratio(name: str, logp: Tensor, logp_old: Tensor, lengths: Sequence[int]) -> Tensor:
    """[N] the ratio that the bounds of the loss `name` are about; 1 where it has none."""
    if name == "reinforce":
        return torch.ones_like(logp)
    return sequence_ratio(logp, logp_old, lengths) if name.startswith("gspo") else policy_ratio(logp, logp_old)


def clipped_surrogate(logp: Tensor, logp_old: Tensor, advantage: Tensor, **bounds: Unpack[Bounds]) -> Tensor:
    """Per-token policy loss −min(r Â, clip(r, 1−ε_low, 1+ε_high) Â),  r = π_θ/π_old.

    DAPO (arXiv:2503.14476) eq. 10, "Clip-Higher"; ratio as in eq. 9. With clip_low = clip_high it is the clip of PPO
    (eq. 1) and GRPO (eq. 5). All tensors [N]; returns [N]: `aggregate` owns averaging. No gradient
    flows into `logp_old` or `advantage`.

    `dual_clip` = c bounds the loss by −c Â where Â < 0, so that one token whose ratio exploded cannot dominate
    (arXiv:1912.09729; the published recipe sets 10, the paper does not mention it); None is the paper. The log-ratio
    is clamped to ±20 before exp.
    """
    check_shapes("N", logp, logp_old, advantage)
    ratio = policy_ratio(logp, logp_old)  # [N]  r_{i,t}(θ), eq. 9
    return _clipped(ratio, advantage.detach(), **bounds)


def cispo(logp: Tensor, logp_old: Tensor, advantage: Tensor, *, clip_low: float | None, clip_high: float) -> Tensor:
    """−sg(clip(r, 1−ε_low, 1+ε_high)) Â log π_θ: the weight is clipped, and no token loses its gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585), eq. 4–5. All tensors [N]; returns [N]. No gradient flows through the ratio.
    `clip_low` None is no lower bound, as the paper runs it, and ScaleRL (arXiv:2510.13786) too. TRL and ms-swift write
    min(r, ε_high), and ScaleRL min(r, ε_max): theirs is 1 + `clip_high`.
    """
    check_shapes("N", logp, logp_old, advantage)
    weight = _clip(policy_ratio(logp, logp_old), clip_low, clip_high).detach()
    return -weight * advantage.detach() * logp


def reinforce(logp: Tensor, advantage: Tensor) -> Tensor:
    """−Â log π_θ, the policy gradient with a baseline (Williams, 1992; RLOO, arXiv:2402.14740). [N] -> [N].

    It has no ratio: for one update per step, where π_θ still is the policy that sampled. CISPO on policy is this.
    """
    check_shapes("N", logp, advantage)
    return -advantage.detach() * logp


def gspo(logp: Tensor, logp_old: Tensor, advantage: Tensor, lengths: Sequence[int], **bounds: Unpack[Bounds]) -> Tensor:
    """−min(s Â, clip(s, 1−ε_low, 1+ε_high) Â) on every token of a response,  s = (π_θ(o)/π_old(o))^{1/|o|}.

    GSPO (arXiv:2507.18071) eq. 5 and 7. All tensors [N]; returns [N]. Every token carries the loss of its response, so
    that `aggregate.sequence_mean` is the paper's mean over responses. Â is one number for a response; the advantages of
    a critic, one for every token, take `gspo_token`.
    """
    check_shapes("N", logp, logp_old, advantage)
    ratio = sequence_ratio(logp, logp_old, lengths)
    return _clipped(ratio, advantage.detach(), **bounds)


def gspo_token(
    logp: Tensor, logp_old: Tensor, advantage: Tensor, lengths: Sequence[int], **bounds: Unpack[Bounds]
) -> Tensor:
    """−min(s_t Â_t, clip(s_t, 1−ε_low, 1+ε_high) Â_t),  s_t = sg(s) π_θ(o_t)/sg(π_θ(o_t)): s for every token.

    GSPO (arXiv:2507.18071) eq. 13–14: a token may have an advantage of its own. Where all tokens of a response have the
    same, it is `gspo` in value and gradient under every mean that weighs them alike. verl's "gspo" is this one.
    """
    check_shapes("N", logp, logp_old, advantage)
    ratio = sequence_ratio(logp, logp_old, lengths).detach() * policy_ratio(logp, logp)
    return _clipped(ratio, advantage.detach(), **bounds)


def sequence_ratio(logp: Tensor, logp_old: Tensor, lengths: Sequence[int]) -> Tensor:
    """s_i = exp((1/|o_i|) Σ_t log r_{i,t}) on every token of response i, GSPO eq. 7. [N] -> [N]; clamped as r is."""
    mean = per_response(logp - logp_old.detach(), lengths, torch.mean)
    return torch.exp(mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def per_response(values: Tensor, lengths: Sequence[int], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """One number for each response, `reduce` of its values, on all its tokens. [N] -> [N]."""
    return torch.cat([reduce(part).expand(len(part)) for part in values.split(list(lengths))])


def _clip(ratio: Tensor, low: float | None, high: float) -> Tensor:
    return ratio.clamp(None if low is None else 1 - low, 1 + high)


def _clipped(
    ratio: Tensor, advantage: Tensor, *, clip_low: float | None, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    loss = torch.maximum(-ratio * advantage, -_clip(ratio, clip_low, clip_high) * advantage)
    return loss if dual_clip is None else torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)


def value_loss(value: Tensor, value_old: Tensor, target: Tensor, *, clip: float | None) -> Tensor:
    """Per-token critic loss ½ max((V − R̂)², (clip(V, V_old ± c) − R̂)²); ½ (V − R̂)² where `clip` is None.

    All tensors [N]; returns [N]. No gradient flows into `value_old` or `target`.
    """
    check_shapes("N", value, value_old, target)
    target = target.detach()
    square = (value - target) ** 2
    if clip is None:
        return 0.5 * square
    return 0.5 * torch.maximum(square, (clipped_value(value, value_old, clip=clip) - target) ** 2)


def clipped_value(value: Tensor, value_old: Tensor, *, clip: float) -> Tensor:
    """clip(V, V_old − c, V_old + c): PPO's value clip, as the published recipe has it (`cliprange_value`).

    [N] -> [N]. Beyond c no gradient flows, and the loss takes the worse of the two errors; none flows into `value_old`.
    """
    value_old = value_old.detach()
    return value_old + (value - value_old).clamp(-clip, clip)


def kl_penalty(logp: Tensor, logp_ref: Tensor, *, kind: Literal["k1", "k2", "k3", "abs"]) -> Tensor:
    """Per-token estimate of KL(π_θ ‖ π_ref) from a token drawn from π_θ, with d = log π_θ − log π_ref.

    k1: d (unbiased) · k2: d²/2 · k3: e^{−d} + d − 1 (unbiased, never negative; GRPO, DAPO paper eq. 4) · abs: |d|.
    [N] -> [N]. k3 clamps −d to ±20 and its value to at most 10. DAPO itself uses no KL term.
    """
    check_shapes("N", logp, logp_ref)
    d = logp - logp_ref.detach()
    match kind:
        case "k1":
            return d
        case "k2":
            return d**2 / 2
        case "abs":
            return d.abs()
        case "k3":
            minus_d = (-d).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            return (torch.exp(minus_d) - minus_d - 1).clamp(-K3_BOUND, K3_BOUND)


def positive_nll(logp: Tensor, is_positive: Tensor, *, total_tokens: Count) -> Tensor:
    """−(1/Σ_{o∈T}|o|) Σ_{o∈T} Σ_t log π_θ, the imitation of correct responses.

    VAPO (arXiv:2504.05118) eq. 9–10, to be added with weight μ = 0.1. `is_positive` [N] is True on the tokens of the
    correct responses T only; `total_tokens` counts those over the whole update. An empty T gives 0. Returns a scalar.
    """
    check_shapes("N", logp, is_positive)
    return token_mean(-logp[is_positive], total_tokens=total_tokens)


def importance_weight(
    logp_trainer: Tensor,
    logp_engine: Tensor,
    lengths: Sequence[int] = (),
    *,
    cap: float | None,
    floor: float | None = None,
    kind: Literal["truncate", "mask"] = "truncate",
    level: Literal["token", "sequence", "geometric"] = "token",
) -> Tensor:
    """w of tokens that another policy or engine drew, ρ = π_trainer/π_engine: min(ρ, C), or ρ inside [α, β] else 0.

    "truncate" is truncated importance sampling, with a `floor` also max(ρ, floor); "mask" leaves tokens out (IcePop,
    arXiv:2510.18855, [0.5, 5]). ρ is a token's own, or one for all tokens of a response: the product of its tokens'
    ("sequence"), or the |o|-th root of that ("geometric"); `lengths` are needed for these. [N] -> [N], detached. It
    multiplies the already clipped token loss and never enters a normaliser; a `cap` of None bounds nothing.
    """
    check_shapes("N", logp_trainer, logp_engine)
    log_ratio = (logp_trainer - logp_engine).detach()
    if level != "token":
        log_ratio = per_response(log_ratio, lengths, torch.sum if level == "sequence" else torch.mean)
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    low, high = floor or 0.0, float("inf") if cap is None else cap
    return ratio.clamp(low, high) if kind == "truncate" else torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def policy_ratio(logp: Tensor, logp_old: Tensor) -> Tensor:
    return torch.exp((logp - logp_old.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
