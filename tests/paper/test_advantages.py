"""DAPO eq. 9 (group advantage), RLOO, REINFORCE++, ScaleRL, PPO eq. 2–3 (GAE), VAPO's λ, whitening, distillation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from dapo.algorithms.advantages import (
    batch_centred,
    decoupled_gae,
    distillation_advantage,
    divide_by_batch_std,
    gae,
    group_advantage,
    leave_one_out,
    length_adaptive_lambda,
    whiten,
)

F64 = torch.float64


def signs(k: int, G: int) -> torch.Tensor:
    """One group, k of G correct, rewards ±1 (eq. 7)."""
    return torch.tensor([[1.0] * k + [-1.0] * (G - k)], dtype=F64)


# ---------------------------------------------------------------- eq. 9, group advantage


@pytest.mark.parametrize("k", range(1, 16))
def test_eq9_worked_value_for_k_of_16_correct(k: int):
    G = 16
    # mean = (k − (G−k))/G = 2k/G − 1. A right answer is 2(G−k)/G above it, a wrong one 2k/G below.
    # Σ(R−mean)² = k(2(G−k)/G)² + (G−k)(2k/G)² = 4k(G−k)/G, so the sample std is √(4k(G−k)/(G(G−1))).
    std = math.sqrt(4 * k * (G - k) / (G * (G - 1)))
    right, wrong = 2 * (G - k) / G / (std + 1e-6), -2 * k / G / (std + 1e-6)
    assert_close(group_advantage(signs(k, G)), torch.tensor([[right] * k + [wrong] * (G - k)], dtype=F64))


def test_eq9_published_check_values():
    one = group_advantage(signs(1, 16))[0]
    assert f"{one[0]:+.6f} {one[-1]:+.6f}" == "+3.749993 -0.250000"
    half = group_advantage(signs(8, 16))[0]
    assert f"{half[0]:+.6f} {half[-1]:+.6f}" == "+0.968245 -0.968245"


def test_eq9_population_std_is_larger_by_the_root_of_G_over_G_minus_1():
    reward = torch.randn(5, 16, dtype=F64)
    sample = group_advantage(reward, std="sample", eps=0.0)
    population = group_advantage(reward, std="population", eps=0.0)
    assert_close(population, sample * math.sqrt(16 / 15))


def test_dr_grpo_only_centres():
    reward = torch.randn(5, 4, dtype=F64)
    assert_close(group_advantage(reward, std="none"), reward - reward.mean(1, keepdim=True))


@given(st.floats(-3, 3, width=32), st.integers(2, 33))
def test_an_all_equal_group_gets_exactly_zero_whatever_rounding_does(reward: float, G: int):
    # In float32 the mean of equal numbers may differ from them by an ulp; divided by (0 + 1e-6) that would be a signal.
    for std in ("sample", "population", "none"):
        assert torch.equal(group_advantage(torch.full((1, G), reward), std=std), torch.zeros(1, G))


@given(
    reward=st.floats(-100, 100, width=32),
    rewards=st.lists(st.integers(-5, 5), min_size=2, max_size=32).filter(lambda values: len(set(values)) > 1),
    std=st.sampled_from(["sample", "population", "none"]),
    eps=st.sampled_from([0.0, 1e-6]),
)
def test_an_all_equal_group_gets_zero_beside_others_also_without_epsilon(
    reward: float, rewards: list[int], std: str, eps: float
):
    G, mixed = len(rewards), torch.tensor(rewards, dtype=torch.float64)
    advantage = group_advantage(torch.stack([torch.full((G,), reward, dtype=torch.float64), mixed]), std=std, eps=eps)
    assert torch.equal(advantage[0], torch.zeros(G, dtype=torch.float64))
    spread = 1.0 if std == "none" else mixed.std(correction=int(std == "sample")) + eps
    assert_close(advantage[1], (mixed - mixed.mean()) / spread)


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="no baseline"):
        group_advantage(torch.ones(3, 1))


@given(st.integers(2, 16), st.floats(-5, 5), st.floats(0.1, 10), st.integers(0, 2**31))
def test_eq9_invariances(G: int, shift: float, scale: float, seed: int):
    reward = torch.randn(3, G, dtype=F64, generator=torch.Generator().manual_seed(seed))
    advantage = group_advantage(reward, eps=0.0)
    assert_close(group_advantage(reward + shift, eps=0.0), advantage, rtol=1e-9, atol=1e-9)  # a baseline takes shifts
    assert_close(group_advantage(reward * scale, eps=0.0), advantage, rtol=1e-9, atol=1e-9)  # the std takes scale
    order = torch.randperm(G, generator=torch.Generator().manual_seed(seed))
    assert_close(group_advantage(reward[:, order], eps=0.0), advantage[:, order])  # members are exchangeable
    assert_close(advantage.sum(1), torch.zeros(3, dtype=F64), rtol=0, atol=1e-9)
    assert (advantage.argmax(1) == reward.argmax(1)).all()  # the best response is pushed up most


def test_groups_do_not_see_each_other():
    reward = torch.randn(4, 8, dtype=F64)
    alone = torch.cat([group_advantage(row[None]) for row in reward])
    assert_close(group_advantage(reward), alone, rtol=1e-14, atol=1e-14)


# ---------------------------------------------------------------- eq. 2–3, GAE


def gae_by_the_sum(
    reward: list[float], value: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Â_t = Σ_l (γλ)^l δ_{t+l}, written as the double sum, for one row without a mask."""
    T = len(reward)
    following = [*value[1:], 0.0]
    delta = [reward[t] + gamma * following[t] - value[t] for t in range(T)]
    advantage = [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, T)) for t in range(T)]
    return advantage, [advantage[t] + value[t] for t in range(T)]


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=12),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_is_the_discounted_sum_of_temporal_differences(pairs: list[tuple[float, float]], gamma: float, lam: float):
    reward, value = [r for r, _ in pairs], [v for _, v in pairs]
    advantage, ret = gae(rows(reward), rows(value), torch.ones(1, len(pairs)).bool(), gamma=gamma, lam=lam)
    expected_advantage, expected_ret = gae_by_the_sum(reward, value, gamma, lam)
    assert_close(advantage, rows(expected_advantage), rtol=1e-9, atol=1e-9)
    assert_close(ret, rows(expected_ret), rtol=1e-9, atol=1e-9)


def test_lambda_1_is_monte_carlo_and_lambda_0_one_step():
    T, gamma = 6, 0.9
    reward, value = torch.randn(3, T, dtype=F64), torch.randn(3, T, dtype=F64)
    mask = torch.ones(3, T).bool()
    _, ret = gae(reward, value, mask, gamma=gamma, lam=1.0)
    discounted = torch.stack([sum(gamma ** (u - t) * reward[:, u] for u in range(t, T)) for t in range(T)], dim=1)
    assert_close(ret, discounted)  # whatever the critic says
    advantage, _ = gae(reward, value, mask, gamma=gamma, lam=0.0)
    following = torch.cat([value[:, 1:], torch.zeros(3, 1, dtype=F64)], dim=1)
    assert_close(advantage, reward + gamma * following - value)


def test_a_terminal_reward_with_gamma_and_lambda_1_is_the_target_everywhere():
    reward = torch.zeros(1, 5, dtype=F64)
    reward[0, -1] = -1.0
    _, ret = gae(reward, torch.randn(1, 5, dtype=F64), torch.ones(1, 5).bool(), gamma=1.0, lam=1.0)
    assert_close(ret, torch.full((1, 5), -1.0, dtype=F64))


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 2**31))
def test_masked_tokens_are_skipped_as_if_absent(kept: list[bool], seed: int):
    generator = torch.Generator().manual_seed(seed)
    T, n = len(kept), sum(kept)
    mask = torch.tensor([kept])
    reward = torch.randn(1, T, dtype=F64, generator=generator)
    value = torch.randn(1, T, dtype=F64, generator=generator)
    dirty_reward, dirty_value = reward.clone(), value.clone()
    dirty_reward[~mask], dirty_value[~mask] = float("nan"), float("inf")  # nothing behind the mask may leak
    advantage, ret = gae(dirty_reward, dirty_value, mask, gamma=0.9, lam=0.8)
    short = gae(reward[mask][None], value[mask][None], torch.ones(1, n).bool(), gamma=0.9, lam=0.8)
    assert_close(advantage[mask][None], short[0])
    assert_close(ret[mask][None], short[1])
    assert (advantage[~mask] == 0).all()
    assert (ret[~mask] == 0).all()


def test_one_lambda_per_row_equals_one_call_per_row():
    reward, value = torch.randn(4, 7, dtype=F64), torch.randn(4, 7, dtype=F64)
    mask = torch.rand(4, 7) < 0.8
    lam = torch.tensor([0.0, 0.5, 0.9, 1.0], dtype=F64)
    together = gae(reward, value, mask, gamma=1.0, lam=lam)
    for row in range(4):
        alone = gae(reward[[row]], value[[row]], mask[[row]], gamma=1.0, lam=float(lam[row]))
        assert_close(together[0][[row]], alone[0])
        assert_close(together[1][[row]], alone[1])


def test_gae_passes_no_gradient_to_the_critic():
    value = torch.randn(1, 4, requires_grad=True)
    advantage, ret = gae(torch.ones(1, 4), value, torch.ones(1, 4).bool(), gamma=1.0, lam=0.95)
    assert not advantage.requires_grad
    assert not ret.requires_grad


def test_a_better_outcome_than_expected_gives_a_positive_advantage():
    value = torch.zeros(2, 3)
    reward = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]])
    advantage, _ = gae(reward, value, torch.ones(2, 3).bool(), gamma=1.0, lam=0.95)
    assert (advantage[0] > 0).all()
    assert (advantage[1] < 0).all()


# ---------------------------------------------------------------- VAPO, length-adaptive λ


def test_vapo_lambda_grows_with_the_length():
    # λ = 1 − 1/(0.05 l): l = 40 -> 1 − 1/2, 100 -> 1 − 1/5, 1000 -> 1 − 1/50, 10000 -> 1 − 1/500
    length = torch.tensor([40, 100, 1000, 10000], dtype=F64)
    expected = torch.tensor([1 - 1 / 2, 1 - 1 / 5, 1 - 1 / 50, 1 - 1 / 500], dtype=F64)
    assert_close(length_adaptive_lambda(length, alpha=0.05), expected)


@given(st.integers(0, 30_000))
def test_vapo_lambda_stays_between_0_and_1(length: int):
    lam = float(length_adaptive_lambda(torch.tensor([length]), alpha=0.05))
    assert 0 <= lam < 1
    assert (lam == 0) == (length <= 20)  # our decision for lengths below 1/α


def test_vapo_lambda_makes_the_weights_sum_to_alpha_l():
    alpha, length = 0.05, 400
    lam = float(length_adaptive_lambda(torch.tensor([length], dtype=F64), alpha=alpha))
    assert math.isclose(sum(lam**t for t in range(10_000)), alpha * length, rel_tol=1e-9)  # Σ λ^t = 1/(1−λ)


# ---------------------------------------------------------------- whitening


def test_whitened_tokens_have_mean_0_and_sample_variance_1():
    advantage, mask = 3 + 2 * torch.randn(54, dtype=F64), torch.rand(54) < 0.7
    white = whiten(advantage, mask)
    assert_close(white[mask].mean(), torch.tensor(0.0, dtype=F64), rtol=0, atol=1e-12)
    assert_close(white[mask].var(), torch.tensor(1.0, dtype=F64), rtol=1e-7, atol=0)  # 1e-8 stands inside the root
    assert (white[~mask] == 0).all()
    order = torch.randperm(54)
    assert_close(whiten(advantage[order], mask[order]), white[order])
    moved = torch.where(mask, advantage, 1e9)  # what is not chosen has no say in mean and variance
    assert torch.equal(whiten(moved, mask), white)


def test_whitening_one_token_equal_ones_or_none_stays_finite():
    assert torch.equal(whiten(torch.tensor([5.0, 9.0]), torch.tensor([True, False])), torch.zeros(2))
    assert torch.equal(whiten(torch.full((6,), 4.0), torch.ones(6).bool()), torch.zeros(6))
    assert torch.equal(whiten(torch.tensor([5.0, 9.0]), torch.zeros(2).bool()), torch.zeros(2))


# ---------------------------------------------------------------- decoupled GAE


def test_vapo_4_1_the_critics_target_has_its_own_lambda():
    reward, value, mask = torch.randn(3, 6, dtype=F64), torch.randn(3, 6, dtype=F64), torch.rand(3, 6) < 0.8
    advantage, target = decoupled_gae(reward, value, mask, gamma=0.9, lam=0.3, lam_critic=0.7)
    assert_close(advantage, gae(reward, value, mask, gamma=0.9, lam=0.3)[0])
    assert_close(target, gae(reward, value, mask, gamma=0.9, lam=0.7)[1])
    one, both = (
        gae(reward, value, mask, gamma=0.9, lam=0.3),
        decoupled_gae(reward, value, mask, gamma=0.9, lam=0.3, lam_critic=0.3),
    )
    assert_close(both, one)  # the limit: one λ is GAE and its return


def test_vapo_4_1_with_lambda_1_the_target_is_what_came_out_whatever_the_critic_says():
    reward, mask = torch.tensor([[0.0, 0.0, 1.0]], dtype=F64), torch.ones(1, 3).bool()
    for _ in range(3):
        _, target = decoupled_gae(
            reward, torch.randn(1, 3, dtype=F64), mask, gamma=1.0, lam=torch.tensor([0.4]), lam_critic=1.0
        )
        assert_close(target, torch.ones(1, 3, dtype=F64))


# ---------------------------------------------------------------- other baselines, std over the step


def test_rloo_is_the_reward_less_the_mean_of_the_others():
    reward = torch.tensor([[1.0, 0.0, 0.0, -1.0]], dtype=F64)
    assert_close(leave_one_out(reward), torch.tensor([[4 / 3, 0.0, 0.0, -4 / 3]], dtype=F64))  # 1 − (0 + 0 − 1)/3
    reward = torch.randn(3, 5, dtype=F64)
    others = (reward.sum(1, keepdim=True) - reward) / 4
    assert_close(leave_one_out(reward), reward - others)
    assert_close(leave_one_out(reward), 5 / 4 * group_advantage(reward, std="none"))
    assert not leave_one_out(torch.full((2, 3), 0.1)).any()
    with pytest.raises(ValueError, match="group of one"):
        leave_one_out(torch.ones(3, 1))


def test_a_baseline_over_the_step_needs_no_group():
    reward = torch.tensor([[1.0], [0.0], [0.0], [1.0]], dtype=F64)
    assert_close(batch_centred(reward), reward - 0.5)
    assert not batch_centred(torch.full((2, 3), 0.1)).any()


def test_scalerl_divides_by_the_std_of_all_advantages():
    reward = torch.tensor([[1.0, 0.0], [3.0, 3.0]], dtype=F64)
    centred = group_advantage(reward, std="none")  # ±1/2, 0, 0: sample variance (1/4 + 1/4)/3
    expected = torch.tensor([[0.5, -0.5], [0.0, 0.0]], dtype=F64) / math.sqrt(1 / 6)
    assert_close(divide_by_batch_std(centred, centred, eps=0.0), expected)
    assert_close(divide_by_batch_std(7 * centred, 7 * centred, eps=0.0), expected)  # the scale of rewards is gone
    of_rewards = centred / math.sqrt(27 / 12)  # rewards 1, 0, 3, 3: mean 7/4, squares 27/4, ÷3
    assert_close(divide_by_batch_std(centred, reward, eps=0.0), of_rewards)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_a_step_without_differences_has_no_advantages(eps: float):
    nothing = torch.zeros(2, 3, dtype=F64)
    assert torch.equal(divide_by_batch_std(nothing, nothing, eps=eps), nothing)


def test_limit_one_group_has_one_std_wherever_it_is_taken():
    reward = torch.randn(1, 6, dtype=F64)
    centred = group_advantage(reward, std="none")
    for of in (centred, reward):
        for std in ("sample", "population"):
            assert_close(divide_by_batch_std(centred, of, std=std, eps=0.1), group_advantage(reward, std=std, eps=0.1))


# ---------------------------------------------------------------- on-policy distillation


def test_distillation_adds_the_log_ratio_of_teacher_to_student_to_every_token():
    # The teacher gives two drawn tokens 0.8 and 0.1, the student drew them at 0.4 and 0.2: log 2 and −log 2.
    student, teacher = torch.tensor([0.4, 0.2], dtype=F64).log(), torch.tensor([0.8, 0.1], dtype=F64).log()
    verdict = torch.tensor([1.5, -0.5], dtype=F64)
    expected = torch.tensor([1.5 + 0.3 * math.log(2), -0.5 - 0.3 * math.log(2)], dtype=F64)
    assert_close(distillation_advantage(verdict, student, teacher, coefficient=0.3), expected)


def test_limit_without_a_weight_or_from_itself_distillation_changes_nothing():
    verdict, logp, teacher = torch.randn(3, 9, dtype=F64)
    assert torch.equal(distillation_advantage(verdict, logp, teacher, coefficient=0.0), verdict)
    assert torch.equal(distillation_advantage(verdict, logp, logp, coefficient=1.0), verdict)


def test_distillation_is_the_gradient_of_the_reverse_kl():
    """Σ_v π(v) ∇ log π(v) Â(v), the policy gradient's mean over the tokens drawn, is −∇ KL(π ‖ π_T)."""
    logits = torch.randn(7, dtype=F64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(7, dtype=F64), dim=0)
    logp = torch.log_softmax(logits, dim=0)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - teacher)).sum(), logits, retain_graph=True)
    advantage = distillation_advantage(torch.zeros(7, dtype=F64), logp, teacher, coefficient=1.0)
    assert not advantage.requires_grad
    (ascent,) = torch.autograd.grad((logp.exp().detach() * advantage * logp).sum(), logits)
    assert_close(-ascent, expected)


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=8), st.floats(0.01, 5))
def test_tokens_that_the_teacher_likes_better_gain_and_none_sees_another(pairs: list[tuple[float, float]], beta: float):
    student, teacher = torch.tensor(pairs, dtype=F64).unbind(1)
    zero = torch.zeros_like(student)
    together = distillation_advantage(zero, student, teacher, coefficient=beta)
    assert (together.sign() == (teacher - student).sign()).all()
    alone = [distillation_advantage(zero[[t]], student[[t]], teacher[[t]], coefficient=beta) for t in range(len(zero))]
    assert torch.equal(together, torch.cat(alone))
