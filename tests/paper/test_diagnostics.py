"""What a step reports: DAPO Fig. 2, 3 and 7, explained variance, effective sample size, trainer-engine gap."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from dapo.algorithms.diagnostics import (
    approximate_kl,
    clipped_high_probability,
    clipped_tokens,
    effective_sample_size,
    entropy,
    explained_variance,
    masked_mean,
    mean_probability,
    trainer_engine_gap,
)
from dapo.algorithms.losses import clipped_surrogate

F64 = torch.float64


def test_entropy_of_a_uniform_choice_is_log_V_and_of_a_certain_one_zero():
    logits = torch.stack([torch.zeros(8), torch.tensor([0.0] + [-float("inf")] * 7)]).double()
    assert_close(entropy(logits), torch.tensor([math.log(8), 0.0], dtype=F64))


def test_entropy_does_not_see_a_shift_of_the_logits_and_falls_with_temperature():
    logits = torch.randn(3, 5, 11, dtype=F64)
    assert_close(entropy(logits + 100), entropy(logits))
    assert (entropy(logits / 0.5) < entropy(logits)).all()


def test_mean_probability_and_kl_by_hand():
    logp = torch.tensor([[0.5, 0.25, 0.9]], dtype=F64).log()
    logp_old = torch.tensor([[0.25, 0.5, 0.1]], dtype=F64).log()
    mask = torch.tensor([[True, True, False]])
    assert float(mean_probability(logp, mask)) == pytest.approx((0.5 + 0.25) / 2)
    assert float(approximate_kl(logp, logp_old, mask)) == pytest.approx((-math.log(2) + math.log(2)) / 2, abs=1e-15)


@pytest.mark.parametrize(
    ("ratio", "advantage", "where"),
    [
        (1.3, 1.0, "high"),
        (1.3, -1.0, None),
        (0.7, -1.0, "low"),
        (0.7, 1.0, None),
        (11.0, -1.0, "dual"),
        (11.0, 1.0, "high"),
        (1.0, 1.0, None),
        (5.0, 0.0, None),
    ],
)
def test_clipped_tokens_by_side(ratio: float, advantage: float, where: str | None):
    logp = torch.tensor([[math.log(ratio)]], dtype=F64)
    sides = clipped_tokens(
        logp, torch.zeros(1, 1, dtype=F64), torch.tensor([[advantage]]), clip_low=0.2, clip_high=0.28, dual_clip=10.0
    )
    assert {side: bool(getattr(sides, side)) for side in ("low", "high", "dual")} == {
        side: side == where for side in ("low", "high", "dual")
    }


@given(st.integers(0, 2**31), st.sampled_from([None, 3.0]))
def test_a_token_counts_as_clipped_exactly_when_its_gradient_is_gone(seed: int, dual: float | None):
    generator = torch.Generator().manual_seed(seed)
    logp = torch.randn(4, 6, dtype=F64, generator=generator).requires_grad_()
    logp_old = torch.randn(4, 6, dtype=F64, generator=generator)
    advantage = torch.randn(4, 6, dtype=F64, generator=generator)
    clip = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual}
    clipped_surrogate(logp, logp_old, advantage, **clip).sum().backward()
    sides = clipped_tokens(logp, logp_old, advantage, **clip)
    assert logp.grad is not None
    assert torch.equal(sides.low | sides.high | sides.dual, logp.grad == 0)
    assert not (sides.low & sides.high | sides.low & sides.dual | sides.high & sides.dual).any()


def test_fig3_probability_of_the_tokens_clipped_high():
    logp = torch.tensor([[0.1, 0.2, 0.9, 0.4]], dtype=F64).log()
    clipped = torch.tensor([[True, True, False, True]])
    mask = torch.tensor([[True, True, True, False]])
    mean, largest = clipped_high_probability(logp, clipped, mask)
    assert (float(mean), float(largest)) == pytest.approx(((0.1 + 0.2) / 2, 0.2))
    none = clipped_high_probability(logp, torch.zeros(1, 4).bool(), mask)
    assert (float(none[0]), float(none[1])) == (0, 0)


def test_explained_variance_of_a_perfect_a_constant_and_an_opposite_critic():
    ret, mask = torch.randn(4, 5, dtype=F64), torch.rand(4, 5) < 0.8
    assert float(explained_variance(ret, ret, mask)) == pytest.approx(1.0)
    assert float(explained_variance(torch.full_like(ret, 3.0), ret, mask)) == pytest.approx(0.0)
    assert float(explained_variance(-ret, ret, mask)) == pytest.approx(1 - 4)  # Var(2R)/Var(R) = 4
    assert float(explained_variance(ret, torch.ones_like(ret), mask)) == 0.0


def test_effective_sample_size():
    mask = torch.ones(1, 4).bool()
    assert float(effective_sample_size(torch.full((1, 4), 0.3, dtype=F64), mask)) == pytest.approx(1.0)
    one_counts = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=F64)
    assert float(effective_sample_size(one_counts, mask)) == pytest.approx(1 / 4)
    weight = torch.tensor([[1.0, 2.0, 5.0, 9.0]], dtype=F64)
    first_two = torch.tensor([[True, True, False, False]])
    assert float(effective_sample_size(weight, first_two)) == pytest.approx((1 + 2) ** 2 / (2 * (1 + 4)))


def test_trainer_engine_gap():
    trainer = torch.tensor([[-1.0, -2.0, -9.0]], dtype=F64)
    engine = torch.tensor([[-1.5, -1.9, 0.0]], dtype=F64)
    mask = torch.tensor([[True, True, False]])
    gap = trainer_engine_gap(trainer, engine, mask)
    assert float(gap.mean) == pytest.approx((0.5 + 0.1) / 2)
    assert float(gap.max) == pytest.approx(0.5)
    # tokens come from the engine: k3 of KL(engine ‖ trainer) is e^d − d − 1 with d = log π_trainer − log π_engine
    expected = (math.exp(0.5) - 0.5 - 1 + math.exp(-0.1) + 0.1 - 1) / 2
    assert float(gap.kl) == pytest.approx(expected)
    same = trainer_engine_gap(trainer, trainer, mask)
    assert (float(same.mean), float(same.max), float(same.kl)) == (0, 0, 0)


@given(st.integers(0, 2**31))
def test_means_over_micro_batches_add_up(seed: int):
    generator = torch.Generator().manual_seed(seed)
    x, mask = torch.randn(6, 4, dtype=F64, generator=generator), torch.rand(6, 4, generator=generator) < 0.6
    N = int(mask.sum())
    parts = sum(masked_mean(x[rows], mask[rows], total_tokens=N) for rows in ([0, 5], [1], [2, 3, 4]))
    assert_close(parts, masked_mean(x, mask))


def test_an_empty_mask_gives_zero_everywhere():
    x, mask = torch.randn(2, 3), torch.zeros(2, 3).bool()
    gap = trainer_engine_gap(x, x + 1, mask)
    values = [
        masked_mean(x, mask), mean_probability(x, mask), approximate_kl(x, x + 1, mask), explained_variance(x, x, mask),
        effective_sample_size(x, mask), gap.mean, gap.max, gap.kl, *clipped_high_probability(x, x > 0, mask),
    ]  # fmt: skip
    assert [float(v) for v in values] == [0.0] * len(values)
