"""Rewards in parts: the weighted sum, GDPO (arXiv:2601.05242) eq. 4–7, and what each part adds to the advantages."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from dapo.algorithms.advantages import group_advantage
from dapo.algorithms.parts import (
    advantage_shares,
    fill_missing,
    normalize_then_sum,
    normalized_contributions,
    sum_contributions,
    weighted_sum,
)

F64 = torch.float64
NAN = float("nan")


def of(values: object) -> Tensor:
    return torch.tensor(values, dtype=F64)


def drawn(seed: int, K: int = 3, P: int = 4, G: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(K, P, G, generator=generator, dtype=F64), torch.tensor([1.0, 0.5, -0.7][:K], dtype=F64)


# Two groups of two responses. In the first only part 1 tells them apart, in the second both parts do.
TWO = of([[[0.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]])
ONES = of([1.0, 1.0])


def test_weighted_sum_by_hand():
    # 2·0 − 0.5·0, 2·1 − 0.5·0; 2·0 − 0.5·0, 2·1 − 0.5·1
    assert_close(weighted_sum(TWO, of([2.0, -0.5])), of([[0.0, 2.0], [0.0, 1.5]]))


@given(st.floats(-3, 3), st.floats(-3, 3))
def test_one_part_of_weight_1_is_its_own_sum_to_the_bit(a: float, b: float):
    reward = of([[[a, b]]])
    assert torch.equal(weighted_sum(reward, of([1.0])), reward[0])


def test_summed_first_both_groups_look_alike():
    """The collapse that GDPO is about: (0, 1) and (0, 2) have the same advantages, ±(½/√½) = ±1/√2."""
    total = weighted_sum(TWO, ONES)
    assert total.tolist() == [[0.0, 1.0], [0.0, 2.0]]
    s = 1 / math.sqrt(2)
    assert_close(group_advantage(total, eps=0.0), of([[-s, s], [-s, s]]))


def test_gdpo_worked_value():
    # Each part in its group is ∓1/√2 or, where it is constant, 0: A = (∓s, ∓2s) with s = 1/√2. Over the step the mean
    # is 0 and Σ A² = 2s² + 8s² = 5, so that the sample variance is 5/3 and Â = ∓√(½·3/5) = ∓√0.3 and ∓2√0.3.
    r = math.sqrt(0.3)
    assert_close(normalize_then_sum(TWO, ONES, eps=0.0), of([[-r, r], [-2 * r, 2 * r]]))


def test_gdpo_worked_value_with_weights_and_eps():
    # Sample std of (0, 1) is √½. Weights 1 and ½ and ε = 0.1: part 1 gives ±½/(√½ + 0.1) = ±h, part 2 ±h/2 in the
    # second group. Σ A² = 2h² + 2(1.5h)² = 6.5h², the sample std √(6.5/3)·h.
    h = 0.5 / (math.sqrt(0.5) + 0.1)
    std = math.sqrt(6.5 / 3) * h
    expected = of([[-h, h], [-1.5 * h, 1.5 * h]]) / (std + 0.1)
    assert_close(normalize_then_sum(TWO, of([1.0, 0.5]), eps=0.1), expected)


def test_gdpo_with_the_population_std():
    # Parts ∓1 in their groups: A = (∓1, ∓2), Σ A² = 10 over 4 responses, std √2.5.
    r = 1 / math.sqrt(2.5)
    assert_close(normalize_then_sum(TWO, ONES, std="population", eps=0.0), of([[-r, r], [-2 * r, 2 * r]]))


@given(st.integers(0, 50), st.floats(0.1, 10), st.floats(-5, 5))
def test_gdpo_does_not_see_scale_or_offset_of_a_part(seed: int, scale: float, offset: float):
    reward, weight = drawn(seed)
    other = reward.clone()
    other[1] = scale * other[1] + offset
    assert_close(normalize_then_sum(other, weight, eps=0.0), normalize_then_sum(reward, weight, eps=0.0))


@given(st.integers(0, 50), st.floats(0.1, 10))
def test_gdpo_sees_the_ratio_of_weights_alone(seed: int, scale: float):
    reward, weight = drawn(seed)
    assert_close(normalize_then_sum(reward, scale * weight, eps=0.0), normalize_then_sum(reward, weight, eps=0.0))


@given(st.integers(0, 50))
def test_gdpo_does_not_depend_on_the_order_of_groups_responses_or_parts(seed: int):
    reward, weight = drawn(seed)
    groups, responses, parts = torch.randperm(4), torch.randperm(5), torch.randperm(3)
    one = normalize_then_sum(reward, weight)[groups][:, responses]
    assert_close(normalize_then_sum(reward[parts][:, groups][:, :, responses], weight[parts]), one)


def test_limit_one_part_is_eq_9_normalised_over_the_step():
    reward, _ = drawn(0, K=1)
    alone = group_advantage(reward[0], eps=0.0)
    assert_close(normalize_then_sum(reward, of([2.0]), eps=0.0), alone / alone.std())  # its mean is 0 in every group


def test_a_step_has_mean_0_and_std_1():
    found = normalize_then_sum(*drawn(1), eps=0.0)
    assert_close(found.mean(), of(0.0), atol=1e-12, rtol=0)
    assert_close(found.std(), of(1.0))


def test_all_equal_is_exactly_zero():
    equal = torch.full((2, 3, 4), 0.1, dtype=torch.float32)
    assert torch.equal(normalize_then_sum(equal, torch.ones(2)), torch.zeros(3, 4))


def test_more_of_a_part_is_a_larger_advantage_and_of_a_penalty_a_smaller_one():
    reward = of([[[0.0, 1.0]], [[0.0, 0.0]]])
    for weight in (1.0, -1.0):
        Â = normalize_then_sum(reward, of([weight, 1.0]))[0]
        assert float(Â[1] - Â[0]) * weight > 0


# ---------------------------------------------------------------- what each part adds


@pytest.mark.parametrize("std", ["sample", "population", "none"])
def test_contributions_to_eq_9_sum_to_it(std: str):
    reward, weight = drawn(3)
    added = sum_contributions(reward, weight, std=std, eps=0.1)  # type: ignore[arg-type]
    expected = group_advantage(weighted_sum(reward, weight), std=std, eps=0.1)  # type: ignore[arg-type]
    assert_close(added.sum(dim=0), expected)


def test_parts_that_cancel_add_nothing():
    reward = of([[[0.0, 1.0]], [[1.0, 0.0]]])
    assert torch.equal(sum_contributions(reward, ONES, std="sample", eps=1e-6), torch.zeros(2, 1, 2, dtype=F64))


def test_shares_by_hand():
    # GDPO before the step's normalisation: part 1 is ∓s in both groups, part 2 ∓s in the second, s² = ½. A = (∓s, ∓2s).
    # Σ A² = 5; part 1: 2·s·s + 2·s·2s = 6s² = 3, part 2: 2·s·2s = 4s² = 2.
    assert_close(advantage_shares(normalized_contributions(TWO, ONES, std="sample", eps=0.0)), of([3 / 5, 2 / 5]))
    # Summed: the first group is part 1's alone, of the second it has half: (1 + ½)/2 and ½/2.
    assert_close(advantage_shares(sum_contributions(TWO, ONES, std="sample", eps=0.0)), of([3 / 4, 1 / 4]))


@given(st.integers(0, 50))
def test_shares_sum_to_1_and_are_0_where_nothing_differs(seed: int):
    reward, weight = drawn(seed)
    assert_close(advantage_shares(sum_contributions(reward, weight, std="sample", eps=1e-6)).sum(), of(1.0))
    assert torch.equal(advantage_shares(torch.zeros(2, 3, 4)), torch.zeros(2))


def test_what_could_not_be_measured_counts_as_the_worst_of_its_group():
    reward = of([[[1.0, NAN, 3.0], [NAN, NAN, NAN]], [[1.0, NAN, 3.0], [2.0, 2.0, 0.0]]])
    filled = fill_missing(reward, of([0.5, -0.5]))  # the second part is a penalty: the worst is its greatest
    assert filled.tolist() == [[[1.0, 1.0, 3.0], [0.0, 0.0, 0.0]], [[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]]]


def test_nobody_gains_by_a_part_that_fails():
    reward, weight = drawn(5)
    for k in range(3):
        failed = reward.clone()
        failed[k, 0, 0] = NAN
        added = weight[k] * fill_missing(failed, weight)[k, 0]
        assert float(added[0]) == float(added.min())
