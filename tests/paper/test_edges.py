"""Where a formula's condition turns: one token, no token, a ratio on the bound, an advantage of 0."""

import math

import pytest
import torch
from torch.testing import assert_close

from dapo.algorithms.advantages import divide_by_batch_std, whiten
from dapo.algorithms.aggregate import constant_norm, token_mean
from dapo.algorithms.diagnostics import ExplainedSums, clipped_tokens, effective_sample_size, entropy
from dapo.algorithms.losses import clipping_ratio, importance_weight, kl_penalty
from dapo.algorithms.shaping import token_rewards


def test_the_epsilon_of_the_batch_std_is_one_in_a_million():
    advantage = torch.tensor([[1.0, -1.0], [3.0, -3.0]], dtype=torch.float64)
    s = math.sqrt((1 + 1 + 9 + 9) / 3)  # the unbiased std of four values with mean 0
    assert_close(divide_by_batch_std(advantage, advantage), advantage / (s + 1e-6), rtol=1e-12, atol=0)


def test_whitening_centres_one_token_and_scales_two():
    """Two tokens at ±d of their mean have s² = 2d², so they become ±1/√2."""
    one = whiten(torch.tensor([5.0, 3.0]), torch.tensor([False, True]))
    two = whiten(torch.tensor([1.0, 5.0, 9.0]), torch.tensor([True, False, True]))
    assert one.tolist() == [0, 0]
    assert_close(two, torch.tensor([-1.0, 0.0, 1.0]) / math.sqrt(2))


@pytest.mark.parametrize("mean", [lambda x: token_mean(x, total_tokens=0), lambda x: constant_norm(x, constant=0)])
def test_a_mean_over_nothing_is_nothing_whatever_is_summed(mean):
    assert float(mean(torch.tensor([2.0, 3.0]))) == 0


def test_returns_that_vary_by_rounding_alone_explain_nothing():
    """n Σ R̂² − (Σ R̂)² = 0.1 where the squares sum to 1e10: below 1e-12 of n Σ R̂² = 1e12."""
    sums = ExplainedSums(tokens=100, ret=1e6, ret_squared=1e10 + 1e-3, miss=0.0, miss_squared=1.0)
    assert sums.variance == 0


def test_no_advantage_is_never_dual_clipped():
    clipped = clipped_tokens(torch.tensor([50.0]), torch.tensor([0.0]), clip_low=0.2, clip_high=0.2, dual_clip=10.0)
    assert not clipped.dual.any()


def test_no_weight_is_an_effective_sample_of_nothing():
    assert effective_sample_size(0.0, 0.0, n=3) == 0


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4)])
def test_entropy_is_over_the_last_dimension(shape: tuple[int, ...]):
    assert_close(entropy(torch.zeros(shape)), torch.full(shape[:-1], math.log(4)))


def test_a_ratio_on_a_bound_of_the_mask_is_inside():
    logp = torch.zeros(1)  # ρ = 1
    for cap, floor in ((1.0, None), (2.0, 1.0), (None, 1.0)):
        assert importance_weight(logp, logp, cap=cap, floor=floor, kind="mask").tolist() == [1]


def test_reinforce_has_no_ratio_to_clip():
    assert clipping_ratio("reinforce", torch.tensor([0.0]), torch.tensor([-3.0]), [1]).tolist() == [1]


def test_k3_of_a_token_that_the_reference_holds_for_certain_has_a_gradient():
    """e^{−d} alone would overflow, and its gradient with it; the value is bounded by 10."""
    logp = torch.tensor([-1000.0], requires_grad=True)
    loss = kl_penalty(logp, torch.zeros(1), kind="k3")
    loss.sum().backward()
    assert loss.item() == 10
    assert logp.grad is not None
    assert logp.grad.item() == 0


def test_a_kl_without_a_coefficient_costs_nothing():
    reward, mask = torch.tensor([1.0]), torch.tensor([[True, True]])
    assert torch.equal(token_rewards(reward, mask, torch.ones(1, 2)), token_rewards(reward, mask))
