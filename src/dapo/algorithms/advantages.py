"""Advantages: one per response (GRPO, DAPO, RLOO, REINFORCE++, ScaleRL), one per token by a critic or a teacher."""

from typing import Literal

import torch
from torch import Tensor

from dapo.algorithms.shapes import check_shapes


def group_advantage(
    reward: Tensor, *, std: Literal["sample", "population", "none"] = "sample", eps: float = 1e-6
) -> Tensor:
    """Â_i = (R_i − mean({R})) / (std({R}) + ε), over the G completions of one problem.

    DAPO (arXiv:2503.14476) eq. 9; the same for every token of completion i. [P, G] -> [P, G].

    Conventions, since the paper states none: `std="sample"` is the unbiased standard deviation, ÷(G−1), as in the
    published recipe; `"population"` divides by G; `"none"` does not divide at all (Dr. GRPO, arXiv:2503.20783). ε is
    added to the standard deviation, outside the root. A group whose rewards are all equal gets exactly 0, also where
    rounding makes its mean differ from its members. A group of one has no baseline and is refused (the recipe
    silently returns Â = R).
    """
    check_shapes("P G", reward)
    if reward.shape[1] < 2:
        raise ValueError("a group of one has no baseline: group_advantage needs at least 2 completions per problem")
    centred = reward - reward.mean(dim=1, keepdim=True)
    is_equal = (reward == reward[:, :1]).all(dim=1, keepdim=True)
    centred = torch.where(is_equal, torch.zeros_like(centred), centred)
    if std == "none":
        return centred
    scaled = centred / (reward.std(dim=1, correction=1 if std == "sample" else 0, keepdim=True) + eps)
    return torch.where(is_equal, centred, scaled)  # with ε = 0 an all-equal group would be 0/0


def leave_one_out(reward: Tensor) -> Tensor:
    """Â_i = R_i − mean of the others' = G/(G−1) (R_i − mean({R})): RLOO (arXiv:2402.14740). [P, G] -> [P, G].

    The baseline of a completion does not hold its own reward, and is unbiased for that.
    """
    G = reward.shape[1]
    return group_advantage(reward, std="none") * (G / (G - 1))


def batch_centred(reward: Tensor) -> Tensor:
    """R_i − mean over all responses of the step: REINFORCE++ (arXiv:2501.03262). [P, G] -> [P, G], G = 1 too."""
    return group_advantage(reward.reshape(1, -1), std="none").view_as(reward)


def divide_by_batch_std(
    advantage: Tensor, of: Tensor, *, std: Literal["sample", "population"] = "sample", eps: float = 1e-6
) -> Tensor:
    """A_i / (std({X}) + ε) over all responses of the step. [P, G] -> [P, G].

    ScaleRL (arXiv:2510.13786) section 3.2 divides by the std of the advantages themselves, `of` = A. TRL's
    scale_rewards = "batch" (arXiv:2508.08221) divides by that of the rewards, which holds the differences between
    groups too, `of` = R. Conventions are those of `group_advantage`; advantages that are all 0 stay 0.
    """
    check_shapes("P G", advantage, of)
    scaled = advantage / (of.std(correction=1 if std == "sample" else 0) + eps)
    return torch.where(advantage == 0, torch.zeros_like(advantage), scaled)  # with ε = 0 it would be 0/0


def gae(reward: Tensor, value: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Â_t = Σ_l (γλ)^l δ_{t+l},  δ_t = R_t + γ V(s_{t+1}) − V(s_t);  return = Â_t + V(s_t).

    PPO: DAPO paper eq. 2–3, Schulman et al. (arXiv:1506.02438) eq. 16. All tensors [B, T]; returns
    (advantage, ret), both [B, T], 0 where `mask` is False. `lam` is one number, or one per row, [B] (VAPO's
    length-adaptive λ). No gradient flows.

    Conventions: masked tokens are skipped as if they were not there, whatever they hold (padding, tool output):
    the token before a gap is followed by the token after it. After the last token V = 0, for a truncated response
    as for a finished one. Nothing is whitened here; `ret` is the value target before any whitening.
    """
    check_shapes("B T", reward, value, mask)
    with torch.no_grad():
        mask = mask.bool()
        B, T = value.shape
        lam_row = torch.as_tensor(lam, dtype=value.dtype, device=value.device).expand(B)  # [B]
        delta = torch.where(mask, reward + gamma * next_values(value, mask) - value, 0.0)
        decay = torch.where(mask, gamma * lam_row[:, None], 1.0)  # a masked token hands on what comes after it
        # A_t = δ_t + γλ A_{t+1}, from the end; time first, so that each line of the loop is one run of memory.
        delta, decay = delta.t().contiguous(), decay.t().contiguous()
        after = value.new_zeros(T + 1, B)
        for t in range(T - 1, -1, -1):
            after[t] = delta[t] + decay[t] * after[t + 1]
        advantage = torch.where(mask, after[:T].t(), 0.0)
        return advantage, torch.where(mask, advantage + value, 0.0)


def decoupled_gae(
    reward: Tensor, value: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor, lam_critic: float
) -> tuple[Tensor, Tensor]:
    """Â for the policy by its own λ, the critic's target by another: (advantage, target), both [B, T].

    VAPO (arXiv:2504.05118) section 4.1, "Decoupled-GAE", with λ_critic = 1: the target is then the observed return,
    whatever the critic predicts. With `lam_critic` = `lam` it is GAE and its return.
    """
    advantage, _ = gae(reward, value, mask, gamma=gamma, lam=lam)
    _, target = gae(reward, value, mask, gamma=gamma, lam=lam_critic)
    return advantage, target


def next_values(value: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: V of the next token that `mask` keeps, 0 after the last."""
    B, T = value.shape
    end = value.new_zeros(B, 1)
    place = torch.where(mask, torch.arange(T, device=value.device), T)
    following = torch.cat([place[:, 1:], torch.full_like(place[:, :1], T)], dim=1)
    following = following.flip(1).cummin(dim=1).values.flip(1)
    return torch.cat([value, end], dim=1).gather(1, following)


def length_adaptive_lambda(length: Tensor, *, alpha: float, floor: float = 1.0) -> Tensor:
    """λ_policy = 1 − 1/max(α l, floor): the horizon Σ_t λ^t ≈ 1/(1−λ) = α l grows with the response length l.

    VAPO (arXiv:2504.05118) section 4.2, α = 0.05. [B] -> [B]. Differs from the paper, whose λ is negative below
    l = 1/α and whose horizon is 15 tokens for a response of 300: no horizon is shorter than `floor` ≥ 1 tokens. With 1
    the paper's λ is clamped at 0, the one-step advantage; with 400 it is the paper's from l = 8,000 on.
    """
    return 1 - 1 / (alpha * length).clamp(min=floor)


def whiten(advantage: Tensor, mask: Tensor) -> Tensor:
    """(Â − mean) / √(s² + 1e-8) on the masked tokens, 0 elsewhere; mean and s² over the masked tokens, in float64.

    [N] -> [N]: all tokens of a step at once, since a slice's own mean would make the result depend on the split. The
    unbiased s² and the 1e-8 inside the root are the recipe's conventions; a single token is only centred.
    """
    check_shapes("N", advantage, mask)
    chosen = advantage[mask].double()
    if chosen.numel() == 0:
        return torch.zeros_like(advantage)
    centred = (advantage.double() - chosen.mean()).to(advantage.dtype)
    scale = torch.rsqrt(chosen.var() + 1e-8).to(advantage.dtype) if chosen.numel() > 1 else 1.0
    return torch.where(mask, centred * scale, 0.0)


def distillation_advantage(advantage: Tensor, logp: Tensor, logp_teacher: Tensor, *, coefficient: float) -> Tensor:
    """Â_t + β (log π_T(o_t) − log π(o_t)): the teacher's say on every token that the student drew. [N] -> [N].

    On-policy distillation: the reverse KL(π ‖ π_T) of GKD (arXiv:2306.13649) and MiniLLM (arXiv:2306.08543), a token at
    a time, as a policy gradient. Over tokens drawn from π the mean of ∇ log π(o_t) (log π_T − log π) is −∇ KL(π ‖ π_T)
    of the next token, because ∇ log π itself has mean 0. Differs from MiniLLM: a token answers for its own KL, not for
    that of the tokens after it. `advantage` 0 is distillation alone, else it stands beside the verdict's, after any
    normalisation. `logp` is that of the policy that drew the tokens; no gradient flows. β = 0 changes nothing.
    """
    check_shapes("N", advantage, logp, logp_teacher)
    return advantage + coefficient * (logp_teacher - logp).detach()
