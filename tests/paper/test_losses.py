"""DAPO eq. 1, 5, 10 (clipped surrogate), value loss, KL (eq. 4), VAPO eq. 9–10, truncated importance sampling."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from dapo.algorithms.losses import (
    clipped_surrogate,
    clipped_value,
    importance_weight,
    kl_penalty,
    positive_nll,
    value_loss,
)

F64 = torch.float64


def cell(x: float, *, grad: bool = False) -> torch.Tensor:
    return torch.tensor([x], dtype=F64, requires_grad=grad)


def surrogate_and_gradient(
    ratio: float, advantage: float, *, low: float = 0.2, high: float = 0.28, dual: float | None = None
) -> tuple[float, float]:
    """Loss of one token and its derivative by log π_θ."""
    logp = cell(math.log(ratio), grad=True)
    loss = clipped_surrogate(logp, cell(0.0), cell(advantage), clip_low=low, clip_high=high, dual_clip=dual)
    loss.sum().backward()
    assert logp.grad is not None
    return loss.item(), logp.grad.item()


# ---------------------------------------------------------------- eq. 10, clip-higher


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # inside the clip: −r Â, and d(−r Â)/d log π = −r Â
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -1.0, 0.9, 0.9),
        # Â > 0 above 1.28: the clip holds, −1.28 Â, gradient 0
        (1.5, 2.0, -2.56, 0.0),
        # Â > 0 below 0.8: the minimum is the unclipped term: the token may always be pushed back up
        (0.5, 2.0, -1.0, -1.0),
        # Â < 0 below 0.8: the clip holds, 0.8, gradient 0
        (0.5, -1.0, 0.8, 0.0),
        # Â < 0 above 1.28: unclipped: a risen wrong token is always pushed down
        (1.5, -1.0, 1.5, 1.5),
    ],
)
def test_eq10_four_corners(ratio: float, advantage: float, loss: float, gradient: float):
    got = surrogate_and_gradient(ratio, advantage)
    assert got == pytest.approx((loss, gradient), abs=1e-12)


@given(
    st.floats(-3, 3),
    st.floats(-3, 3),
    st.floats(0.01, 0.9),
    st.floats(0.01, 3),
)
def test_eq10_is_minus_the_minimum(log_ratio: float, advantage: float, low: float, high: float):
    r = math.exp(log_ratio)
    expected = -min(r * advantage, min(max(r, 1 - low), 1 + high) * advantage)
    loss = clipped_surrogate(cell(log_ratio), cell(0.0), cell(advantage), clip_low=low, clip_high=high)
    assert float(loss) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("probability", "clip_high", "ceiling"),
    [(0.01, 0.2, 0.012), (0.01, 0.28, 0.0128), (0.9, 0.2, 1.08), (0.9, 0.28, 1.152)],
)
def test_section_3_1_how_far_a_token_may_rise_before_the_gradient_stops(
    probability: float, clip_high: float, ceiling: float
):
    # r ≤ 1 + ε_high means π_θ ≤ (1 + ε_high) π_old. A ceiling above 1 is no ceiling: that token rises freely.
    assert probability * (1 + clip_high) == pytest.approx(ceiling)
    below, above = ceiling * (1 - 1e-6), ceiling * (1 + 1e-6)
    assert surrogate_and_gradient(below / probability, 1.0, high=clip_high)[1] < 0
    assert surrogate_and_gradient(above / probability, 1.0, high=clip_high)[1] == 0
    if ceiling > 1:
        assert surrogate_and_gradient(1.0 / probability, 1.0, high=clip_high)[1] < 0  # even at probability 1


@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.05, 0.5))
def test_limit_equal_clips_are_ppo(log_ratio: float, advantage: float, eps: float):
    # eq. 1 in PPO's other form: −min(r Â, g(ε, Â)) with g = (1+ε)Â for Â ≥ 0 and (1−ε)Â for Â < 0
    bound = (1 + eps if advantage >= 0 else 1 - eps) * advantage
    expected = -min(math.exp(log_ratio) * advantage, bound)
    loss = clipped_surrogate(cell(log_ratio), cell(0.0), cell(advantage), clip_low=eps, clip_high=eps)
    assert float(loss) == pytest.approx(expected, abs=1e-9)


def test_on_policy_the_gradient_is_the_policy_gradient():
    logp = torch.randn(15, dtype=F64, requires_grad=True)
    advantage = torch.randn(15, dtype=F64)
    clipped_surrogate(logp, logp.detach(), advantage, clip_low=0.2, clip_high=0.28).sum().backward()
    assert_close(logp.grad, -advantage)  # ∇(−r Â) = −Â ∇log π at r = 1


@given(st.floats(-0.1, 0.1), st.floats(0.01, 3))
def test_gradient_sign(log_ratio: float, size: float):
    r = math.exp(log_ratio)
    assert surrogate_and_gradient(r, size)[1] < 0  # descending raises log π of a good token
    assert surrogate_and_gradient(r, -size)[1] > 0  # and lowers that of a bad one


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (20.0, -1.0, 10.0, 0.0),  # beyond c = 10 the loss stops at c |Â|
        (9.0, -1.0, 9.0, 9.0),  # below it nothing changes
        (20.0, 1.0, -1.28, 0.0),  # Â > 0 is the clip's business
    ],
)
def test_dual_clip_bounds_the_loss_of_a_risen_wrong_token(ratio: float, advantage: float, loss: float, gradient: float):
    assert surrogate_and_gradient(ratio, advantage, dual=10.0) == pytest.approx((loss, gradient), abs=1e-9)


def test_the_log_ratio_is_clamped_so_that_nothing_overflows():
    logp = torch.tensor([1000.0, -1000.0], requires_grad=True)
    loss = clipped_surrogate(logp, torch.zeros(2), torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.28)
    assert_close(loss, torch.tensor([math.exp(20.0), -math.exp(-20.0)]))
    loss.sum().backward()
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()


def test_no_gradient_reaches_the_old_policy_or_the_advantage():
    logp, logp_old, advantage = (torch.randn(6, requires_grad=True) for _ in range(3))
    clipped_surrogate(logp, logp_old, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0).sum().backward()
    assert logp.grad is not None
    assert logp_old.grad is None
    assert advantage.grad is None


def test_tokens_do_not_see_each_other():
    logp, logp_old, advantage = (torch.randn(24, dtype=F64) for _ in range(3))
    whole = clipped_surrogate(logp, logp_old, advantage, clip_low=0.2, clip_high=0.28)
    order = torch.randperm(24)
    permuted = clipped_surrogate(logp[order], logp_old[order], advantage[order], clip_low=0.2, clip_high=0.28)
    assert torch.equal(permuted, whole[order])
    assert torch.equal(
        clipped_surrogate(logp[:5], logp_old[:5], advantage[:5], clip_low=0.2, clip_high=0.28), whole[:5]
    )


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\[N\]"):
        clipped_surrogate(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match="disagree"):
        clipped_surrogate(torch.zeros(6), torch.zeros(5), torch.zeros(6), clip_low=0.2, clip_high=0.2)


# ---------------------------------------------------------------- value loss


@pytest.mark.parametrize(
    ("value", "value_old", "target", "clip", "loss", "gradient"),
    [
        (1.0, 0.8, 0.0, 0.5, 0.5, 1.0),  # within ±0.5 of V_old: ½·1²; derivative V − R̂
        (2.0, 0.0, 3.0, 0.5, 3.125, 0.0),  # clipped to 0.5: max(1, 2.5²)/2, a constant: no gradient
        (2.0, 0.0, -1.0, 0.5, 4.5, 3.0),  # moved away from the target: max(3², 1.5²)/2, gradient back
        (2.0, 0.0, 3.0, None, 0.5, -1.0),  # no clip: ½(V − R̂)²
    ],
)
def test_value_loss(value: float, value_old: float, target: float, clip: float | None, loss: float, gradient: float):
    v = cell(value, grad=True)
    got = value_loss(v, cell(value_old), cell(target), clip=clip)
    got.sum().backward()
    assert v.grad is not None
    assert (got.item(), v.grad.item()) == pytest.approx((loss, gradient))


def test_value_loss_limit_wide_clip_is_no_clip():
    value, value_old, target = (torch.randn(12, dtype=F64) for _ in range(3))
    assert_close(value_loss(value, value_old, target, clip=1e9), value_loss(value, value_old, target, clip=None))


def test_a_value_is_clipped_to_the_neighbourhood_of_the_old_one():
    old, value = torch.tensor([1.0, 1.0, 1.0], dtype=F64), torch.tensor([0.2, 1.3, 9.0], dtype=F64, requires_grad=True)
    clipped = clipped_value(value, old, clip=0.5)
    assert_close(clipped, torch.tensor([0.5, 1.3, 1.5], dtype=F64))
    clipped.sum().backward()
    assert_close(value.grad, torch.tensor([0.0, 1.0, 0.0], dtype=F64))  # only inside it moves


# ---------------------------------------------------------------- eq. 4, KL


@given(st.floats(-2, 2))
def test_eq4_kl_estimators_by_their_formulas(d: float):
    expected = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1, "abs": abs(d)}
    for kind, value in expected.items():
        assert float(kl_penalty(cell(d), cell(0.0), kind=kind)) == pytest.approx(value, abs=1e-12)


def test_eq4_k1_and_k3_are_unbiased_and_k3_is_never_negative():
    p = torch.softmax(torch.randn(7, dtype=F64), 0)
    q = torch.softmax(torch.randn(7, dtype=F64), 0)
    exact = (p * (p / q).log()).sum()  # KL(p ‖ q)
    for kind in ("k1", "k3"):
        per_token = kl_penalty(p.log(), q.log(), kind=kind)
        assert_close((p * per_token).sum(), exact)  # the expectation over tokens drawn from p, summed exactly
    assert (kl_penalty(p.log(), q.log(), kind="k3") >= 0).all()


def test_kl_of_equal_policies_is_zero_with_zero_gradient():
    for kind, slope in (("k1", 1.0), ("k2", 0.0), ("k3", 0.0)):
        logp = cell(-1.0, grad=True)
        kl = kl_penalty(logp, cell(-1.0), kind=kind)
        kl.sum().backward()
        assert logp.grad is not None
        assert kl.item() == 0
        assert float(logp.grad) == pytest.approx(slope)  # k1's gradient does not vanish: it is no loss by itself


def test_k3_pulls_towards_the_reference():
    for d in (-0.5, 0.5):
        logp = cell(d, grad=True)
        kl_penalty(logp, cell(0.0), kind="k3").sum().backward()
        assert logp.grad is not None
        assert math.copysign(1, float(logp.grad)) == math.copysign(1, d)


def test_k3_is_bounded():
    assert float(kl_penalty(cell(-100.0), cell(0.0), kind="k3")) == 10.0  # e^20 − 21, clamped
    assert float(kl_penalty(cell(100.0), cell(0.0), kind="k3")) == 10.0  # e^−20 + 19, clamped


# ---------------------------------------------------------------- VAPO eq. 9–10, positive-example NLL


def test_vapo_eq10_positive_nll_has_its_own_token_count():
    logp = torch.tensor([-1.0, -2.0, -math.inf, -3.0, -9.0], dtype=F64, requires_grad=True)
    correct = torch.tensor([True, True, False, True, False])  # selected, not multiplied: 0 · ∞ would be no number
    loss = positive_nll(logp, correct, total_tokens=3)
    loss.backward()
    assert loss.item() == pytest.approx((1 + 2 + 3) / 3)
    assert_close(logp.grad, -correct.double() / 3)  # descending raises exactly the correct responses' tokens


def test_vapo_eq10_is_skipped_when_nothing_was_correct():
    loss = positive_nll(torch.randn(6, requires_grad=True), torch.zeros(6).bool(), total_tokens=0)
    loss.backward()
    assert loss.item() == 0


# ---------------------------------------------------------------- truncated importance sampling


@given(st.floats(-3, 3), st.floats(0.5, 5))
def test_importance_weight_is_the_capped_ratio(log_ratio: float, cap: float):
    weight = importance_weight(cell(log_ratio), cell(0.0), cap=cap)
    assert float(weight) == pytest.approx(min(math.exp(log_ratio), cap))


def test_importance_weight_of_equal_policies_is_one_and_carries_no_gradient():
    logp = torch.randn(6, requires_grad=True)
    weight = importance_weight(logp, logp.detach(), cap=2.0)
    assert torch.equal(weight, torch.ones(6))
    assert not weight.requires_grad


def test_icepop_leaves_out_what_lies_outside_its_bounds():
    rho = torch.tensor([0.4, 0.5, 1.0, 5.0, 5.1], dtype=F64)
    got = importance_weight(rho.log(), torch.zeros(5, dtype=F64), cap=5.0, floor=0.5, kind="mask")
    assert_close(got[[0, 2, 4]], torch.tensor([0.0, 1.0, 0.0], dtype=F64))
    assert_close(
        importance_weight(rho.log(), torch.zeros(5, dtype=F64), cap=5.0, floor=0.5),
        torch.tensor([0.5, 0.5, 1.0, 5.0, 5.0], dtype=F64),
    )


@pytest.mark.parametrize(
    ("level", "first"), [("token", [2.0, 1.0, 0.5]), ("sequence", [1.0] * 3), ("geometric", [1.0] * 3)]
)
def test_importance_weight_of_a_response_is_one_for_all_its_tokens(level: str, first: list[float]):
    """Responses with ratios 2, 1, 1/2 and 4, 1: products 1 and 4, roots 1 and 2."""
    rho = torch.tensor([2.0, 1.0, 0.5, 4.0, 1.0], dtype=F64)
    got = importance_weight(rho.log(), torch.zeros(5, dtype=F64), [3, 2], cap=9.0, level=level)  # type: ignore[arg-type]
    second = {"token": [4.0, 1.0], "sequence": [4.0, 4.0], "geometric": [2.0, 2.0]}[level]
    assert_close(got, torch.tensor([*first, *second], dtype=F64))
    masked = importance_weight(rho.log(), torch.zeros(5, dtype=F64), [3, 2], cap=3.0, kind="mask", level=level)  # type: ignore[arg-type]
    assert torch.equal(masked == 0, got > 3.0)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_limit_responses_of_one_token_have_one_weight_at_every_level(level: str):
    logp, engine = torch.randn(6, dtype=F64), torch.randn(6, dtype=F64)
    got = importance_weight(logp, engine, [1] * 6, cap=2.0, level=level)  # type: ignore[arg-type]
    assert_close(got, importance_weight(logp, engine, cap=2.0))


def test_importance_weight_without_bounds_is_the_ratio():
    logp = torch.tensor([3.0, -3.0, 40.0], dtype=F64)
    assert_close(importance_weight(logp, torch.zeros(3, dtype=F64), cap=None), logp.clamp(max=20).exp())
