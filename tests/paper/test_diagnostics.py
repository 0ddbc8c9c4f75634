"""What a step reports: DAPO Fig. 2, 3 and 7, explained variance, effective sample size, trainer-engine gap."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from dapo.algorithms.diagnostics import (
    ClippedTokens,
    clipped_high_probability,
    clipped_tokens,
    effective_sample_size,
    entropy,
    explained_variance,
    mean_probability,
    trainer_engine_gap,
)
from dapo.algorithms.losses import clipped_surrogate, kl_penalty, policy_ratio

F64 = torch.float64


def test_entropy_of_a_uniform_choice_is_log_V_and_of_a_certain_one_zero():
    logits = torch.stack([torch.zeros(8), torch.tensor([0.0] + [-float("inf")] * 7)]).double()
    assert_close(entropy(logits), torch.tensor([math.log(8), 0.0], dtype=F64))


def test_entropy_does_not_see_a_shift_of_the_logits_and_falls_with_temperature():
    logits = torch.randn(3, 5, 11, dtype=F64)
    assert_close(entropy(logits + 100), entropy(logits))
    assert (entropy(logits / 0.5) < entropy(logits)).all()


def test_mean_probability_by_hand():
    logp = torch.tensor([0.5, 0.25], dtype=F64).log()
    assert float(mean_probability(logp)) == pytest.approx((0.5 + 0.25) / 2)


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
        (0.1, 0.0, None),
    ],
)
def test_clipped_tokens_by_side(ratio: float, advantage: float, where: str | None):
    cells = torch.tensor([ratio], dtype=F64), torch.tensor([advantage])
    sides = clipped_tokens(*cells, clip_low=0.2, clip_high=0.28, dual_clip=10.0)
    assert {side: bool(getattr(sides, side)) for side in ("low", "high", "dual")} == {
        side: side == where for side in ("low", "high", "dual")
    }


@given(st.integers(0, 2**31), st.sampled_from([None, 3.0]))
def test_a_token_counts_as_clipped_exactly_when_its_gradient_is_gone(seed: int, dual: float | None):
    generator = torch.Generator().manual_seed(seed)
    logp = torch.randn(24, dtype=F64, generator=generator).requires_grad_()
    logp_old = torch.randn(24, dtype=F64, generator=generator)
    advantage = torch.randn(24, dtype=F64, generator=generator)
    clip = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual}
    clipped_surrogate(logp, logp_old, advantage, **clip).sum().backward()
    sides = clipped_tokens(policy_ratio(logp, logp_old), advantage, **clip)
    assert logp.grad is not None
    assert torch.equal(sides.low | sides.high | sides.dual, logp.grad == 0)
    assert not (sides.low & sides.high | sides.low & sides.dual | sides.high & sides.dual).any()


def test_border_a_ratio_at_the_clip_itself_is_not_clipped():
    """ε_low = 0.5, ε_high = 1, c = 2: the ratios 1/2 and 2 lie on the borders, where the gradient still flows."""
    ratio, advantage = torch.tensor([0.5, 2.0, 2.0], dtype=F64), torch.tensor([-1.0, 1.0, -1.0], dtype=F64)
    clipped = clipped_tokens(ratio, advantage, clip_low=0.5, clip_high=1.0, dual_clip=2.0)
    assert not (clipped.low | clipped.high | clipped.dual).any()


def test_fig3_probability_of_the_tokens_clipped_high():
    logp = torch.tensor([[0.1, 0.2, 0.9, 0.4]], dtype=F64).log()
    high = torch.tensor([[True, True, False, False]])
    none = torch.zeros_like(high)
    probability = clipped_high_probability(logp, ClippedTokens(low=none, high=high, dual=~high))
    assert_close(probability, torch.tensor([[0.1, 0.2, 0.0, 0.0]], dtype=F64))
    assert not clipped_high_probability(logp, ClippedTokens(low=high, high=none, dual=none)).any()


def test_explained_variance_of_a_perfect_a_constant_and_an_opposite_critic():
    ret = torch.randn(20, dtype=F64)
    assert explained_variance(ret, ret) == pytest.approx(1.0)
    assert explained_variance(torch.full_like(ret, 3.0), ret) == pytest.approx(0.0)
    assert explained_variance(-ret, ret) == pytest.approx(1 - 4)  # Var(2R)/Var(R) = 4


def test_explained_variance_of_two_tokens_by_hand():
    ret, value = torch.tensor([0.0, 2**0.5], dtype=F64), torch.tensor([1.0, 1.0 + 2**0.5 / 2], dtype=F64)
    assert float(ret.var()) == pytest.approx(1)
    assert explained_variance(value, ret) == pytest.approx(1 - 0.25)  # half of the difference is left: a quarter of Var


@pytest.mark.parametrize("ret", [torch.ones(5), torch.tensor([2.0]), torch.zeros(0)])
def test_of_returns_that_do_not_vary_nothing_is_explained(ret: torch.Tensor):
    assert explained_variance(torch.randn_like(ret), ret) == 0.0


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.3, 0.3, 0.3, 0.3], 1.0),
        ([1.0, 0.0, 0.0, 0.0], 1 / 4),
        ([1.0, 2.0], (1 + 2) ** 2 / (2 * (1 + 4))),
    ],
)
def test_effective_sample_size_from_its_sums(weights: list[float], expected: float):
    squares = sum(w**2 for w in weights)
    assert effective_sample_size(sum(weights), squares, n=len(weights)) == pytest.approx(expected)


def test_trainer_engine_gap():
    trainer = torch.tensor([-1.0, -2.0], dtype=F64)
    engine = torch.tensor([-1.5, -1.9], dtype=F64)
    gap = trainer_engine_gap(trainer, engine)
    assert float(gap.mean) == pytest.approx((0.5 + 0.1) / 2)
    assert float(gap.max) == pytest.approx(0.5)
    # tokens come from the engine: k3 of KL(engine ‖ trainer) is e^d − d − 1 with d = log π_trainer − log π_engine
    expected = (math.exp(0.5) - 0.5 - 1 + math.exp(-0.1) + 0.1 - 1) / 2
    assert float(gap.kl) == pytest.approx(expected)
    same = trainer_engine_gap(trainer, trainer)
    assert (float(same.mean), float(same.max), float(same.kl)) == (0, 0, 0)


def test_the_gap_is_the_k3_of_the_losses_where_that_is_not_bounded():
    trainer, engine = torch.randn(2, 30, dtype=F64) / 4
    expected = kl_penalty(engine, trainer, kind="k3").mean()
    assert_close(trainer_engine_gap(trainer, engine).kl, expected)
