"""The equations and their invariances, checked on the machine at hand: worked values, limits, splits, gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.algorithms.advantages import (
    decoupled_gae,
    distillation_advantage,
    divide_by_batch_std,
    gae,
    group_advantage,
    leave_one_out,
    length_adaptive_lambda,
    whiten,
)
from dapo.algorithms.aggregate import constant_norm, prompt_mean, sequence_mean, token_mean
from dapo.algorithms.diagnostics import clipped_tokens
from dapo.algorithms.losses import (
    cispo,
    clipped_surrogate,
    gspo,
    importance_weight,
    kl_penalty,
    policy_ratio,
    positive_nll,
    value_loss,
)
from dapo.algorithms.parts import normalize_then_sum, sum_contributions, weighted_sum
from dapo.algorithms.shaping import overlong_filter, soft_overlong_penalty, token_rewards


@dataclass(frozen=True, slots=True)
class Check:
    """One statement that must hold: what the formula demands beside what this machine computed."""

    equation: str
    statement: str
    expected: list[float]
    got: list[float]
    tolerance: float

    @property
    def error(self) -> float:
        """Largest deviation; NaN and missing values count as infinite."""
        if len(self.expected) != len(self.got):
            return math.inf
        errors = [abs(a - b) for a, b in zip(self.expected, self.got, strict=True)]
        return max(errors, default=0.0) if all(error == error for error in errors) else math.inf

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


def run_checks(device: str = "cpu") -> list[Check]:
    """Every check, on `device`, in float64 where it has it."""
    dtype = torch.float32 if device == "mps" else torch.float64
    tolerance = 1e-5 if device == "mps" else 1e-10
    make = _Maker(device, dtype)
    checks: list[Check] = []
    for equation, statement, function in CHECKS:
        expected, got = function(make)
        checks.append(Check(equation, statement, _numbers(expected), _numbers(got), tolerance))
    return checks


class _Maker:
    """Tensors on the device under test; random ones from a fixed seed drawn on the CPU."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=self.dtype, device=self.device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.device, self.dtype)

    def mask(self, *shape: int) -> Tensor:
        return (torch.rand(*shape, generator=self.generator) < 0.7).to(self.device)


Numbers = Tensor | list[float]
Result = tuple[Numbers, Numbers]


def _numbers(values: Numbers) -> list[float]:
    return [float(x) for x in values.detach().flatten().cpu()] if isinstance(values, Tensor) else values


# ------------------------------------------------------------------ worked values


def group_values(make: _Maker) -> Result:
    std = math.sqrt(4 * 15 / (16 * 15))  # k = 1 of G = 16: √(4k(G−k)/(G(G−1)))
    got = group_advantage(make([[1.0] + [-1.0] * 15]))[0, :2]
    return [2 * 15 / 16 / (std + 1e-6), -2 / 16 / (std + 1e-6)], got


def group_equal(make: _Maker) -> Result:
    return [0.0] * 16, group_advantage(torch.full((1, 16), -1.3, device=make.device))


def parts_values(make: _Maker) -> Result:
    # Two parts; groups (0, 1), (0, 1) of the first and (0, 0), (0, 1) of the second. Each is ∓1/√2 or 0 in its group,
    # the sums ∓1/√2 and ∓2/√2, of sample variance 5/3 over the step
    reward = make([[[0.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]])
    r = math.sqrt(0.3)
    return [-r, r, -2 * r, 2 * r], normalize_then_sum(reward, make([1.0, 1.0]), eps=0.0)


def parts_scale(make: _Maker) -> Result:
    reward, weight = make.normal(2, 3, 4), make([1.0, 0.5])
    return normalize_then_sum(reward, weight, eps=0.0), normalize_then_sum(7 * reward + 2, 3 * weight, eps=0.0)


def parts_sum(make: _Maker) -> Result:
    reward, weight = make.normal(2, 3, 4), make([1.0, -0.5])
    added = sum_contributions(reward, weight, std="sample", eps=1e-6)
    return group_advantage(weighted_sum(reward, weight)), added.sum(dim=0)


def surrogate_values(make: _Maker) -> Result:
    ratio = make([1.1, 1.5, 0.5, 0.5, 1.5, 20.0])
    advantage = make([2.0, 2.0, 2.0, -1.0, -1.0, -1.0])
    loss = clipped_surrogate(
        ratio.log(), torch.zeros_like(ratio), advantage, clip_low=0.2, clip_high=0.28, dual_clip=10.0
    )
    return [-2.2, -2.56, -1.0, 0.8, 1.5, 10.0], loss


def surrogate_gradient(make: _Maker) -> Result:
    logp, advantage = make.normal(12).requires_grad_(), make.normal(12)
    clipped_surrogate(logp, logp.detach(), advantage, clip_low=0.2, clip_high=0.28).sum().backward()
    assert logp.grad is not None, "the surrogate passes a gradient to logp"
    return -advantage, logp.grad


def surrogate_is_ppo(make: _Maker) -> Result:
    logp, old, advantage = make.normal(24), make.normal(24), make.normal(24)
    bound = torch.where(advantage >= 0, 1.2 * advantage, 0.8 * advantage)
    ppo = -torch.minimum((logp - old).exp() * advantage, bound)
    return ppo, clipped_surrogate(logp, old, advantage, clip_low=0.2, clip_high=0.2)


def clipped_is_gradient_gone(make: _Maker) -> Result:
    logp, old, advantage = make.normal(24).requires_grad_(), make.normal(24), make.normal(24)
    clipped_surrogate(logp, old, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0).sum().backward()
    sides = clipped_tokens(policy_ratio(logp, old), advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert logp.grad is not None, "the surrogate passes a gradient to logp"
    return (logp.grad == 0).double(), (sides.low | sides.high | sides.dual).double()


def cispo_values(make: _Maker) -> Result:
    p, q, advantage = make([0.3, 0.1]), make([0.2, 0.4]), make([2.0, -1.0])  # ratios 1.5 and 1/4
    loss = cispo(p.log(), q.log(), advantage, clip_low=None, clip_high=0.28)
    return [-2.56 * math.log(0.3), 0.25 * math.log(0.1)], loss


def gspo_values(make: _Maker) -> Result:
    p, q = make([0.4, 0.1, 0.1]), make([0.2, 0.1, 0.1])  # two tokens with ratios 2 and 1, s = √2; and one with 1
    loss = gspo(p.log(), q.log(), make([-1.0, -1.0, 3.0]), [2, 1], clip_low=3e-4, clip_high=4e-4)
    return [math.sqrt(2), math.sqrt(2), -3.0], loss


def gspo_of_one_token(make: _Maker) -> Result:
    logp, old, advantage = make.normal(24), make.normal(24), make.normal(24)
    one = gspo(logp, old, advantage, [1] * 24, clip_low=0.2, clip_high=0.28)
    return clipped_surrogate(logp, old, advantage, clip_low=0.2, clip_high=0.28), one


def overlong_values(make: _Maker) -> Result:
    length = torch.tensor([16384, 16385, 18432, 20480, 20481], device=make.device)
    return [0, -1 / 4096, -0.5, -1, -1], soft_overlong_penalty(length, max_length=20480, buffer=4096)


def overlong_rows(make: _Maker) -> Result:
    rows = torch.tensor([[True, True, False, False], [False, True, False, True]], device=make.device)
    return [1.0, 0.0, 0.0, 0.0], overlong_filter(rows[0], rows[1]).double()


def reward_values(make: _Maker) -> Result:
    # two responses of 3 and 1 tokens, rewards 1 and −1, KL 0.5 a token, β = 0.1
    mask = torch.tensor([[True, True, True], [True, False, False]], device=make.device)
    got = token_rewards(make([1.0, -1.0]), mask, 0.5 + 0 * make.normal(2, 3), kl_coefficient=0.1)
    return [-0.05, -0.05, 0.95, -1.05, 0.0, 0.0], got


def gae_values(make: _Maker) -> Result:
    # γ = 0.5, λ = 0.5, rewards (0, 0, 1), values (1, 2, 4): δ = (0, 0, −3), Â_t = δ_t + Â_{t+1}/4
    ones = torch.ones(1, 3, device=make.device).bool()
    advantage, ret = gae(make([[0.0, 0.0, 1.0]]), make([[1.0, 2.0, 4.0]]), ones, gamma=0.5, lam=0.5)
    expected = [-3 / 16, -3 / 4, -3.0]
    return [*expected, 1 - 3 / 16, 2 - 3 / 4, 4 - 3.0], torch.cat([advantage, ret])


def gae_monte_carlo(make: _Maker) -> Result:
    reward, value, mask = make.normal(3, 7), make.normal(3, 7), make.mask(3, 7)
    _, ret = gae(reward, value, mask, gamma=1.0, lam=1.0)
    to_go = (reward * mask).flip(1).cumsum(1).flip(1)
    return torch.where(mask, to_go, 0.0), ret


def decoupled_values(make: _Maker) -> Result:
    # As above, with λ = 0.5 for the policy; the critic's target with λ = 1 and γ = 1 is the reward at every token
    ones = torch.ones(1, 3, device=make.device).bool()
    reward, value = make([[0.0, 0.0, 1.0]]), make([[1.0, 2.0, 4.0]])
    advantage, target = decoupled_gae(reward, value, ones, gamma=1.0, lam=0.5, lam_critic=1.0)
    # δ = (1, 2, −3), Â_t = δ_t + Â_{t+1}/2
    return [1.25, 0.5, -3.0, 1.0, 1.0, 1.0], torch.cat([advantage, target])


def lambda_values(make: _Maker) -> Result:
    return [0, 0, 0.5, 0.8, 0.98], length_adaptive_lambda(make([10.0, 20.0, 40.0, 100.0, 1000.0]), alpha=0.05)


def whiten_values(make: _Maker) -> Result:
    x = make([1.0, 2.0, 3.0, 6.0, 99.0])  # of the first four: mean 3, Σ(x−3)² = 14, sample variance 14/3
    scale = 1 / math.sqrt(14 / 3 + 1e-8)
    return [-2 * scale, -scale, 0.0, 3 * scale, 0.0], whiten(x, x < 50)


def value_loss_values(make: _Maker) -> Result:
    got = value_loss(make([1.0, 2.0, 2.0]), make([0.8, 0.0, 0.0]), make([0.0, 3.0, -1.0]), clip=0.5)
    return [0.5, 2.5**2 / 2, 3**2 / 2], got


def distillation_values(make: _Maker) -> Result:
    # The teacher gives the two tokens 0.8 and 0.1, the student drew them at 0.4 and 0.2; β = 1/2
    student, teacher = make([0.4, 0.2]).log(), make([0.8, 0.1]).log()
    got = distillation_advantage(make([1.0, -1.0]), student, teacher, coefficient=0.5)
    return [1 + math.log(2) / 2, -1 - math.log(2) / 2], got


def kl_values(make: _Maker) -> Result:
    d = make([0.5, -0.25])
    kinds = [kl_penalty(d, torch.zeros_like(d), kind=kind) for kind in ("k1", "k2", "k3", "abs")]
    k3 = [math.exp(-0.5) + 0.5 - 1, math.exp(0.25) - 0.25 - 1]
    return [0.5, -0.25, 0.125, 0.03125, *k3, 0.5, 0.25], torch.cat(kinds)


def nll_values(make: _Maker) -> Result:
    correct = torch.tensor([True, True, False, False], device=make.device)
    return [1.5], positive_nll(make([-1.0, -2.0, -9.0, -9.0]), correct, total_tokens=2)


def weight_values(make: _Maker) -> Result:
    log_ratio = make([0.0, 5.0, -1.0])
    return [1.0, 2.0, math.exp(-1)], importance_weight(log_ratio, torch.zeros_like(log_ratio), cap=2.0)


def mask_values(make: _Maker) -> Result:
    # responses with ratios (2, 1, 1/2) and (8, 2): geometric means 1 and 4, of which the mask keeps the first
    ratio = make([2.0, 1.0, 0.5, 8.0, 2.0])
    zero = torch.zeros_like(ratio)
    got = importance_weight(ratio.log(), zero, [3, 2], cap=3.0, floor=0.5, kind="mask", level="geometric")
    return [1.0, 1.0, 1.0, 0.0, 0.0], got


def rloo_values(make: _Maker) -> Result:
    return [4 / 3, 0.0, 0.0, -4 / 3], leave_one_out(make([[1.0, 0.0, 0.0, -1.0]]))


def batch_std_values(make: _Maker) -> Result:
    centred = group_advantage(make([[1.0, 0.0], [3.0, 3.0]]), std="none")  # ±1/2, 0, 0: sample variance 1/6
    return [math.sqrt(1.5), -math.sqrt(1.5), 0.0, 0.0], divide_by_batch_std(centred, centred, eps=0.0)


# ------------------------------------------------------------------ means and their invariance


def mean_values(make: _Maker) -> Result:
    lengths, values = [2, 10, 3, 25], [1.0, -1.0, 0.5, -0.2]
    loss = [make([value] * length) for length, value in zip(lengths, values, strict=True)]
    tokens = [
        sum(token_mean(torch.cat(loss[i:j]), total_tokens=40) for i, j in itertools.pairwise(cuts))
        for cuts in ([0, 4], [0, 1, 4], [0, 2, 4], [0, 1, 2, 3, 4])
    ]
    return [-0.2875] * 4, torch.stack([torch.as_tensor(total) for total in tokens])


def means_agree(make: _Maker) -> Result:
    loss, row = make.normal(20), torch.arange(4, device=make.device).repeat_interleave(5)
    others = [
        sequence_mean(loss, row, row_tokens=torch.full((4,), 5, device=make.device), total_sequences=4),
        prompt_mean(loss, row // 2, group_tokens=torch.full((2,), 10, device=make.device), total_prompts=2),
        constant_norm(loss, constant=20),
    ]
    return token_mean(loss, total_tokens=20).expand(3), torch.stack(others)


def gradient_split(make: _Maker) -> Result:
    """Gradient of a small policy under one micro-batch, and under several of shuffled rows."""
    weight = make.normal(5, 3).requires_grad_()
    features, old, advantage, mask = make.normal(8, 6, 5), make.normal(8, 6), make.normal(8, 6), make.mask(8, 6)
    N = int(mask.sum())

    def gradient(parts: list[list[int]]) -> Tensor:
        total = torch.zeros_like(weight)
        for rows in parts:
            chosen = mask[rows]
            logp = (features[rows] @ weight).log_softmax(-1)[..., 0][chosen]
            loss = clipped_surrogate(logp, old[rows][chosen], advantage[rows][chosen], clip_low=0.2, clip_high=0.28)
            total += torch.autograd.grad(token_mean(loss, total_tokens=N), weight)[0]
        return total

    return gradient([list(range(8))]), gradient([[7, 2], [5], [0, 1, 6, 3, 4]])


CHECKS: list[tuple[str, str, Callable[[_Maker], Result]]] = [
    ("DAPO 9", "group advantage, 1 of 16 right: +3.749993 / −0.250000", group_values),
    ("DAPO 9", "an all-equal group gets exactly 0, in float32 too", group_equal),
    ("GDPO 4–7", "two parts normalized each: ±0.547723 / ±1.095445", parts_values),
    ("GDPO 4–7", "scale and offset of a part change nothing", parts_scale),
    ("GDPO 1", "what each part adds to the advantage sums to it", parts_sum),
    ("RLOO", "the reward less the mean of the others': ±4/3", rloo_values),
    ("ScaleRL 3.2", "advantages over the std of all of the step's", batch_std_values),
    ("DAPO 10", "clip-higher and dual clip, six corners", surrogate_values),
    ("DAPO 10", "on policy the gradient is −Â", surrogate_gradient),
    ("DAPO 1, 5", "equal clips are PPO's", surrogate_is_ppo),
    ("DAPO 10", "a token counts as clipped exactly when its gradient is gone", clipped_is_gradient_gone),
    ("CISPO 4–5", "clipped weights times log π", cispo_values),
    ("GSPO 5, 7", "the ratio of a response is the mean of its tokens' in logs", gspo_values),
    ("GSPO 5, 7", "responses of one token: the clipped surrogate", gspo_of_one_token),
    ("DAPO 12", "token mean −0.2875 for every micro-batch split", mean_values),
    ("DAPO 5, 8, 12", "with equal lengths all means agree", means_agree),
    ("DAPO 12", "gradient is the same for every split and order", gradient_split),
    ("DAPO 13", "soft overlong penalty at 16384 … 20481 tokens", overlong_values),
    ("DAPO 3.4", "overlong filtering takes whole rows out", overlong_rows),
    ("DAPO 4", "KL estimators k1, k2, k3, abs", kl_values),
    ("GKD", "on-policy distillation: Â_t + β (log π_T − log π)", distillation_values),
    ("PPO 2–3", "GAE by hand", gae_values),
    ("PPO 2–3", "λ = 1 is Monte Carlo, masked tokens skipped", gae_monte_carlo),
    ("PPO", "the reward on the last token, KL on every one", reward_values),
    ("PPO", "value loss, clipped and not", value_loss_values),
    ("PPO", "whitening over the chosen tokens of the step", whiten_values),
    ("VAPO 4.1", "decoupled GAE: the critic's target is what came out", decoupled_values),
    ("VAPO 4.2", "length-adaptive λ, clamped to [0, 1]", lambda_values),
    ("VAPO 9–10", "positive-example NLL has its own token count", nll_values),
    ("—", "truncated importance weight", weight_values),
    ("IcePop", "a response outside [0.5, 3] in the geometric mean leaves the loss", mask_values),
]
