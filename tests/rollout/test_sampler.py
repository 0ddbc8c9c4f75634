"""Frequencies are the softmax's, tails are cut where they should be, and log-probs are of the whole distribution."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from dapo.rollout.noise import NoiseKey, uniform
from dapo.rollout.sampler import SamplingParams, sample


def noise(n: int) -> torch.Tensor:
    words = torch.tensor(NoiseKey(1, "train", "p", 0, 0).words())
    return uniform(words.expand(n, 4), torch.arange(n))


def draw(logits: torch.Tensor, n: int, params: SamplingParams) -> torch.Tensor:
    return sample(logits.expand(n, -1), noise(n), params)[0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_match_the_softmax(temperature: float):
    V, n = 12, 40_000
    logits = torch.randn(V, dtype=torch.float64)
    count = np.bincount(draw(logits, n, SamplingParams(temperature)).numpy(), minlength=V)
    expected = n * torch.softmax(logits / temperature, -1).numpy()
    chi2 = ((count - expected) ** 2 / expected).sum()
    assert chi2 < (V - 1) + 3.3 * np.sqrt(2 * (V - 1))


def test_inverse_cdf_by_hand():
    logits = torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64).log()
    for u, token in ((0.05, 0), (0.15, 1), (0.299, 1), (0.301, 2), (1 - 2**-53, 2)):
        assert sample(logits, torch.tensor([u], dtype=torch.float64), SamplingParams())[0].item() == token


@given(st.floats(2**-53, 1 - 2**-53), st.integers(0, 3), st.booleans())
@settings(max_examples=60)
def test_a_token_of_probability_zero_is_never_drawn(u: float, place: int, is_double: bool):
    logits = torch.randn(1, 5, dtype=torch.float64 if is_double else torch.float32)
    logits[0, place:] = -float("inf")
    logits[0, 0] = 0.0
    token, logp = sample(logits, torch.tensor([u], dtype=torch.float64), SamplingParams())
    assert logits[0, token] > -float("inf")
    assert logp.isfinite().all()


def test_log_prob_is_of_the_full_distribution_at_the_temperature():
    logits = torch.randn(50, 9, dtype=torch.float64)
    for params in (SamplingParams(0.6), SamplingParams(0.6, top_p=0.5), SamplingParams(0.6, top_k=2)):
        token, logp = sample(logits, noise(50), params)
        assert_close(logp, torch.log_softmax(logits / 0.6, -1).gather(1, token[:, None])[:, 0])


def test_greedy_takes_the_likeliest_and_reports_temperature_one():
    logits = torch.randn(20, 9, dtype=torch.float64)
    token, logp = sample(logits, noise(20), SamplingParams(temperature=0))
    assert torch.equal(token, logits.argmax(-1))
    assert_close(logp, torch.log_softmax(logits, -1).max(-1).values)


def test_top_p_keeps_the_smallest_set_that_holds_it():
    probabilities = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1], dtype=torch.float64)
    for top_p, kept in ((0.3, {1}), (0.5, {1, 3}), (0.75, {1, 3, 2}), (0.9, {1, 3, 2, 4}), (1.0, {0, 1, 2, 3, 4})):
        drawn = draw(probabilities.log(), 2_000, SamplingParams(top_p=top_p))
        assert set(drawn.tolist()) == kept


def test_top_k_then_top_p_renormalises_in_between():
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    # Of the two likeliest, 4/7 and 3/7: a nucleus of 0.5 is the first alone.
    assert set(draw(probabilities.log(), 500, SamplingParams(top_k=2)).tolist()) == {0, 1}
    assert set(draw(probabilities.log(), 500, SamplingParams(top_k=2, top_p=0.5)).tolist()) == {0}


def test_cut_frequencies_keep_their_proportions():
    probabilities = torch.tensor([0.1, 0.5, 0.3, 0.1], dtype=torch.float64)
    n = 20_000
    share = (draw(probabilities.log(), n, SamplingParams(top_p=0.7)) == 1).double().mean().item()
    assert abs(share - 0.5 / 0.8) < 4 * np.sqrt(0.25 / n)


def test_ties_are_ranked_in_vocabulary_order():
    assert set(draw(torch.zeros(6), 300, SamplingParams(top_k=2)).tolist()) == {0, 1}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_shows_in_its_logp_and_spoils_no_other(bad: float):
    logits = torch.randn(3, 5)
    clean = sample(logits, noise(3), SamplingParams())
    logits[1, 2] = bad
    token, logp = sample(logits, noise(3), SamplingParams())
    assert not logp[1].isfinite()
    assert 0 <= token[1] < 5
    for row in (0, 2):
        assert token[row] == clean[0][row]
        assert logp[row] == clean[1][row]
