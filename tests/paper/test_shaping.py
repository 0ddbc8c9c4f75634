"""DAPO eq. 13 (soft overlong punishment) and section 3.4 (overlong filtering)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from dapo.algorithms.advantages import group_advantage
from dapo.algorithms.aggregate import token_mean
from dapo.algorithms.shaping import overlong_filter, soft_overlong_penalty, token_rewards


def test_eq13_overlong_penalty_is_zero_then_linear_then_minus_one():
    L_max, L_cache = 20, 4
    length = torch.tensor([1, 16, 17, 18, 20, 21])
    expected = torch.tensor([0, 0, -1 / L_cache, -2 / L_cache, -1, -1])
    assert_close(soft_overlong_penalty(length, max_length=L_max, buffer=L_cache), expected)


def test_eq13_at_the_published_lengths():
    # L_max 20480, L_cache 4096: (16384 − 16385)/4096 = −1/4096, (16384 − 18432)/4096 = −1/2
    length = torch.tensor([16384, 16385, 18432, 20480, 20481])
    expected = torch.tensor([0.0, -1 / 4096, -0.5, -1.0, -1.0])
    assert -1 / 4096 == -0.000244140625
    assert torch.equal(soft_overlong_penalty(length, max_length=20480, buffer=4096), expected)


@given(st.integers(2, 500), st.data())
def test_eq13_is_bounded_and_never_rises_with_length(L_max: int, data: st.DataObject):
    buffer = data.draw(st.integers(1, L_max - 1))
    penalty = soft_overlong_penalty(torch.arange(0, 2 * L_max), max_length=L_max, buffer=buffer)
    assert ((penalty >= -1) & (penalty <= 0)).all()
    assert (penalty.diff() <= 0).all()
    assert (penalty[: L_max - buffer + 1] == 0).all()
    assert (penalty[L_max:] == -1).all()


@given(st.integers(0, 30), st.integers(0, 30))
def test_limit_a_buffer_of_one_is_a_hard_limit(length: int, L_max: int):
    L_max += 2
    penalty = float(soft_overlong_penalty(torch.tensor([length]), max_length=L_max, buffer=1))
    assert penalty == (-1 if length >= L_max else 0)


@pytest.mark.parametrize("buffer", [0, 20, 21, -1])
def test_a_buffer_outside_the_limit_is_refused(buffer: int):
    with pytest.raises(ValueError, match="between 0 and max_length = 20"):
        soft_overlong_penalty(torch.tensor([1]), max_length=20, buffer=buffer)


def test_a_longer_right_answer_has_the_smaller_advantage():
    # The sign of what eq. 13 does through eq. 9: among equally right answers the shorter one is preferred.
    penalty = soft_overlong_penalty(torch.tensor([10, 18, 20, 10]), max_length=20, buffer=4)
    advantage = group_advantage((torch.tensor([1.0, 1.0, 1.0, -1.0]) + penalty)[None])[0]
    assert advantage[0] > advantage[1] > advantage[2]


def test_section_3_4_truncated_rows_leave_the_loss_and_its_denominator():
    lengths, is_truncated = torch.tensor([2, 3]), torch.tensor([False, True])
    kept = overlong_filter(torch.tensor([True, True]), is_truncated)
    assert kept.tolist() == [True, False]
    loss = torch.tensor([1.0, 2.0, 7.0, 7.0, 7.0])[kept.repeat_interleave(lengths)]
    assert float(token_mean(loss, total_tokens=int(lengths[kept].sum()))) == pytest.approx((1 + 2) / 2)


def test_section_3_4_truncated_rows_stay_in_the_groups_statistics():
    reward = torch.tensor([[1.0, -1.0, -1.0, -1.0]])  # the last one truncated; its reward still moves the baseline
    with_it = group_advantage(reward)[0, 0]
    without_it = group_advantage(reward[:, :3])[0, 0]
    assert with_it > without_it


def test_limit_nothing_truncated_changes_nothing():
    rows = torch.rand(6) < 0.5
    assert torch.equal(overlong_filter(rows, torch.zeros(6).bool()), rows)


def test_row_counts_must_agree():
    with pytest.raises(ValueError, match="disagree"):
        overlong_filter(torch.ones(2).bool(), torch.zeros(3).bool())


# ---------------------------------------------------------------- what each token is paid


def test_the_reward_stands_on_the_last_token_and_kl_on_every_one():
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    reward = torch.tensor([1.0, -1.0, 1.0])
    assert token_rewards(reward, mask).tolist() == [[0, 0, 1], [-1, 0, 0], [0, 0, 0]]
    kl = torch.tensor([[0.5, 1.0, 2.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    paid = token_rewards(reward, mask, kl, kl_coefficient=0.5)
    assert paid.tolist() == [[-0.25, -0.5, 0.0], [-3.0, 0, 0], [0, 0, 0]]  # drifting from the reference costs
    gap = torch.tensor([[True, False, True, False]])  # a gap is skipped: the last token that is kept is paid
    assert token_rewards(torch.tensor([2.0]), gap).tolist() == [[0, 0, 2, 0]]
