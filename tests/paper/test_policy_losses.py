"""What every policy loss must do: worked values, its paper's formula, limits, gradients, invariance under splits."""

from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dapo.algorithms.aggregate import sequence_mean, token_mean
from dapo.algorithms.diagnostics import clipped_tokens
from dapo.algorithms.losses import cispo, clipped_surrogate, clipping_ratio, gspo, gspo_token, policy_loss
from dapo.config.schema import PolicyLossName
from policy_losses import FORMULAS, WORKED, Response, Worked

F64 = torch.float64
NAMES = get_args(PolicyLossName)
LENGTHS = [3, 1, 7, 4, 9]
BOUNDS: list[dict[str, Any]] = [
    {"clip_low": 0.2, "clip_high": 0.28},
    {"clip_low": 3e-4, "clip_high": 4e-4},
    {"clip_low": None, "clip_high": 4.0},
    {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5},
]


def drawn(seed: int = 0, spread: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    """log π_θ, log π_old, Â of five responses; Â is one number for each."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(sum(LENGTHS), generator=generator, dtype=F64) - 3
    logp = old + spread * torch.randn(len(old), generator=generator, dtype=F64)
    of_response = torch.randn(len(LENGTHS), generator=generator, dtype=F64)
    return logp, old, of_response.repeat_interleave(torch.tensor(LENGTHS))


def with_gradient(loss: Any, logp: Tensor) -> tuple[Tensor, Tensor]:
    logp = logp.clone().requires_grad_()
    value = loss(logp)
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    return value.detach(), gradient


def test_every_name_of_the_config_has_formula_and_worked_values():
    assert set(NAMES) == FORMULAS.keys() == WORKED.keys()
    with pytest.raises(ValueError, match="no policy loss huber"):
        policy_loss("huber", *drawn(), LENGTHS, clip_low=0.2, clip_high=0.28)


@pytest.mark.parametrize(("name", "worked"), [(name, worked) for name in NAMES for worked in WORKED[name]])
def test_worked_values(name: str, worked: Worked):
    p, q = (torch.tensor(x, dtype=F64).log() for x in (worked.p, worked.q))
    advantage = torch.full_like(p, worked.advantage)
    value, gradient = with_gradient(lambda x: policy_loss(name, x, q, advantage, [len(p)], **worked.bounds), p)
    assert_close(value, torch.tensor(worked.loss, dtype=F64), rtol=0, atol=1e-12)
    assert_close(gradient, torch.tensor(worked.gradient, dtype=F64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_papers_formula_response_by_response(name: str, bounds: dict[str, Any]):
    logp, old, advantage = drawn()
    advantage = advantage if name == "gspo" else advantage + old  # others take one Â for every token

    def formula(x: Tensor) -> Tensor:
        parts = (y.split(LENGTHS) for y in (x, old, advantage))
        dual = bounds.get("dual_clip")
        responses = [Response(*y, bounds["clip_low"], bounds["clip_high"], dual) for y in zip(*parts, strict=True)]
        return torch.cat([FORMULAS[name](response) for response in responses])

    for ours, theirs in zip(
        with_gradient(lambda x: policy_loss(name, x, old, advantage, LENGTHS, **bounds), logp),
        with_gradient(formula, logp),
        strict=True,
    ):
        assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str):
    """r = 1: −Â for each token, which pushes right ones up and wrong ones down."""
    logp, _, advantage = drawn()
    _, gradient = with_gradient(
        lambda x: policy_loss(name, x, logp, advantage, LENGTHS, clip_low=0.2, clip_high=0.28), logp
    )
    assert_close(gradient, -advantage)


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_do_not_depend_on_how_responses_are_split(name: str):
    logp, old, advantage = drawn()
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]

    def total(cuts: list[int]) -> Any:
        def loss(x: Tensor) -> Tensor:
            parts = []
            for a, b in pairwise(cuts):
                at = slice(starts[a], starts[b])
                each = policy_loss(name, x[at], old[at], advantage[at], LENGTHS[a:b], clip_low=0.2, clip_high=0.28)
                parts.append(token_mean(each, total_tokens=len(x)))
            return torch.stack(parts).sum()

        return with_gradient(loss, logp)

    for cuts in ([0, 1, 5], [0, 2, 3, 5], [0, 1, 2, 3, 4, 5]):
        for one, other in zip(total([0, 5]), total(cuts), strict=True):
            assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_reaches_what_is_given_and_float32_stays_float32(name: str):
    logp, old, advantage = (x.float().requires_grad_() for x in drawn())
    loss = policy_loss(name, logp, old, advantage, LENGTHS, clip_low=0.2, clip_high=0.28)
    loss.sum().backward()
    assert (loss.dtype, old.grad, advantage.grad) == (torch.float32, None, None)


@pytest.mark.parametrize("name", NAMES)
def test_ratios_without_bound_stay_finite(name: str):
    far = torch.tensor([800.0, -800.0, 0.0], dtype=F64)
    value, gradient = with_gradient(
        lambda x: policy_loss(name, x, torch.zeros(3, dtype=F64), far, [1, 1, 1], clip_low=0.2, clip_high=0.28), far
    )
    assert bool(value.isfinite().all() & gradient.isfinite().all())


def test_limit_gspo_of_responses_of_one_token_is_the_clipped_surrogate():
    logp, old, advantage = drawn()
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    one = with_gradient(lambda x: gspo(x, old, advantage, [1] * len(x), **bounds), logp)
    other = with_gradient(lambda x: clipped_surrogate(x, old, advantage, **bounds), logp)
    assert_close(one, other)


def test_gspo_averaged_over_responses_is_the_papers_mean():
    """Eq. 5: (1/G) Σ_i min(s_i Â_i, …), where the mean over a response's tokens gives its own loss back."""
    logp, old, advantage = drawn(spread=0.1)
    losses = gspo(logp, old, advantage, LENGTHS, clip_low=0.2, clip_high=0.28)
    row = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    got = sequence_mean(losses, row, row_tokens=torch.tensor(LENGTHS), total_sequences=len(LENGTHS))
    of_response = []
    for log_ratio, each in zip((logp - old).split(LENGTHS), advantage.split(LENGTHS), strict=True):
        s, A = float(log_ratio.mean().exp()), float(each[0])
        of_response.append(-min(s * A, min(max(s, 0.8), 1.28) * A))
    assert float(got) == pytest.approx(sum(of_response) / len(LENGTHS))


def test_the_two_forms_of_gspo_agree_where_a_response_has_one_advantage():
    logp, old, advantage = drawn(spread=0.2)
    bounds = {"clip_low": 0.05, "clip_high": 0.05}
    one = with_gradient(lambda x: gspo(x, old, advantage, LENGTHS, **bounds), logp)
    assert_close(one, with_gradient(lambda x: gspo_token(x, old, advantage, LENGTHS, **bounds), logp))
    each = advantage + old  # a critic's: each token's gradient is its own
    _, gradient = with_gradient(lambda x: gspo_token(x, logp, each, LENGTHS, **bounds), logp)
    assert_close(gradient, -each)


def test_cispo_keeps_the_gradient_that_the_clip_takes_away():
    logp, old, advantage = drawn()
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    _, clipped = with_gradient(lambda x: clipped_surrogate(x, old, advantage, **bounds), logp)
    _, kept = with_gradient(lambda x: cispo(x, old, advantage, **bounds), logp)
    assert bool((clipped == 0).any())
    assert bool((kept.sign() == -advantage.sign()).all())


@pytest.mark.parametrize("name", ["clip", "gspo", "gspo-token"])
def test_a_token_counts_as_clipped_exactly_when_its_gradient_is_gone(name: str):
    logp, old, advantage = drawn()
    bounds = {"clip_low": 0.02, "clip_high": 0.03, "dual_clip": 1.2}
    _, gradient = with_gradient(lambda x: policy_loss(name, x, old, advantage, LENGTHS, **bounds), logp)
    sides = clipped_tokens(clipping_ratio(name, logp, old, LENGTHS), advantage, **bounds)
    assert torch.equal(sides.low | sides.high | sides.dual, gradient == 0)
    assert bool((gradient == 0).any())
