"""DAPO eq. 12 (token mean), eq. 5 (sequence mean), eq. 8 (prompt mean), Dr. GRPO's constant."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from dapo.algorithms.aggregate import constant_norm, prompt_mean, sequence_mean, token_mean

F64 = torch.float64
MEANS = ["token", "sequence", "prompt", "constant"]


def mean_of(kind: str, loss: Tensor, mask: Tensor, group: Tensor, whole: Tensor, whole_group: Tensor) -> Tensor:
    """One of the four means of the chosen tokens of a slice, normalised by the counts of the `whole` update's mask."""
    group_tokens = torch.zeros(int(whole_group.max()) + 1, dtype=torch.long)
    group_tokens.index_add_(0, whole_group, whole.sum(1))
    row = mask.nonzero()[:, 0]  # of every chosen token
    match kind:
        case "token":
            return token_mean(loss[mask], total_tokens=int(whole.sum()))
        case "sequence":
            return sequence_mean(loss[mask], row, row_tokens=mask.sum(1), total_sequences=int(whole.any(1).sum()))
        case "prompt":
            n = int((group_tokens > 0).sum())
            return prompt_mean(loss[mask], group[row], group_tokens=group_tokens, total_prompts=n)
        case _:
            return constant_norm(loss[mask], constant=37.0)


def ragged(*pairs: tuple[int, float]) -> tuple[Tensor, Tensor, Tensor]:
    """(length, loss per token) rows: losses [N], the row of each [N], and the lengths [B]."""
    lengths = torch.tensor([length for length, _ in pairs])
    loss = torch.tensor([value for _, value in pairs], dtype=F64).repeat_interleave(lengths)
    return loss, torch.arange(len(pairs)).repeat_interleave(lengths), lengths


def every_split(n: int) -> list[list[list[int]]]:
    """All ways to cut rows 0..n−1, in order, into consecutive micro-batches."""
    splits = []
    for cuts in itertools.product([False, True], repeat=n - 1):
        parts, part = [], [0]
        for row, cut in enumerate(cuts, start=1):
            if cut:
                parts.append(part)
                part = []
            part.append(row)
        splits.append([*parts, part])
    return splits


def test_eq12_worked_value_for_every_split():
    loss, row, _ = ragged((2, 1.0), (10, -1.0), (3, 0.5), (25, -0.2))
    # (2·1 − 10·1 + 3·0.5 − 25·0.2) / (2+10+3+25) = −11.5/40
    assert float(token_mean(loss, total_tokens=40)) == pytest.approx(-11.5 / 40)
    for split in every_split(4):
        parts = [token_mean(loss[torch.isin(row, torch.tensor(rows))], total_tokens=40) for rows in split]
        assert float(sum(parts)) == pytest.approx(-0.2875, abs=1e-15)


def test_a_micro_batch_mean_would_have_the_wrong_sign():
    # The control: normalising each micro-batch by its own count makes the gradient depend on the split.
    loss, row, lengths = ragged((2, 1.0), (10, -1.0), (3, 0.5), (25, -0.2))
    own = [token_mean(loss[row == i], total_tokens=int(lengths[i])) for i in range(4)]
    assert float(sum(own)) / 4 == pytest.approx((1 - 1 + 0.5 - 0.2) / 4)
    assert float(sum(own)) / 4 > 0 > -0.2875


def test_eq5_worked_value():
    loss, row, lengths = ragged((2, 1.0), (10, -1.0), (3, 0.5), (25, -0.2))
    mean = sequence_mean(loss, row, row_tokens=lengths, total_sequences=4)
    assert float(mean) == pytest.approx((1 - 1 + 0.5 - 0.2) / 4)


def test_eq8_worked_value():
    loss, row, _ = ragged((2, 1.0), (10, -1.0), (3, 0.5), (25, -0.2))
    tokens = torch.tensor([12, 28])
    # ((2 − 10)/12 + (1.5 − 5)/28) / 2
    expected = ((2 - 10) / 12 + (1.5 - 5) / 28) / 2
    assert float(prompt_mean(loss, row // 2, total_prompts=2, group_tokens=tokens)) == pytest.approx(expected)


def test_constant_norm_gives_sums_and_dr_grpo():
    loss, _, _ = ragged((2, 1.0), (10, -1.0))
    assert float(constant_norm(loss, constant=1)) == pytest.approx(2 - 10)
    assert float(constant_norm(loss, constant=2 * 16)) == pytest.approx((2 - 10) / (2 * 16))


def test_limit_equal_lengths_make_the_means_agree():
    loss, row = torch.randn(30, dtype=F64), torch.arange(6).repeat_interleave(5)
    token = token_mean(loss, total_tokens=30)
    assert_close(sequence_mean(loss, row, row_tokens=torch.full((6,), 5), total_sequences=6), token)
    assert_close(constant_norm(loss, constant=6 * 5), token)
    assert_close(prompt_mean(loss, row // 2, total_prompts=3, group_tokens=torch.full((3,), 10)), token)


def test_limit_one_group_makes_eq8_the_token_mean():
    loss, group = torch.randn(17, dtype=F64), torch.zeros(17).long()
    literal = prompt_mean(loss, group, total_prompts=1, group_tokens=torch.tensor([17]))
    assert_close(literal, token_mean(loss, total_tokens=17))


@st.composite
def update(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """A loss that needs gradients, a mask with possibly empty rows and groups, and the rows' groups."""
    B, T = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    loss = torch.randn(B, T, dtype=F64, generator=generator)
    mask = torch.rand(B, T, generator=generator) < draw(st.floats(0, 1))
    group = torch.randint(0, 3, (B,), generator=generator)
    return loss, mask, group


@pytest.mark.parametrize("kind", MEANS)
@given(batch=update(), data=st.data())
def test_value_and_gradient_do_not_depend_on_split_order_padding_or_ranks(
    kind: str, batch: tuple[Tensor, Tensor, Tensor], data: st.DataObject
):
    loss, mask, group = batch
    B, T = loss.shape
    theta = torch.ones(B, T, dtype=F64, requires_grad=True)  # stands for whatever the loss depends on
    whole = mean_of(kind, loss * theta, mask, group, mask, group)
    (gradient,) = torch.autograd.grad(whole, theta)

    # Rows in any order, in any micro-batches, on any of two ranks whose results are added; and padded on the right.
    order = data.draw(st.permutations(range(B)))
    cuts = sorted(data.draw(st.lists(st.integers(0, B), max_size=4)))
    parts = [list(order[a:b]) for a, b in itertools.pairwise([0, *cuts, B])]
    padding = torch.full((B, 2), float("nan"), dtype=F64)
    wide = torch.cat([loss * theta, padding], dim=1)
    wide_mask = torch.cat([mask, torch.zeros(B, 2).bool()], dim=1)
    total = sum(
        (mean_of(kind, wide[rows], wide_mask[rows], group[rows], mask, group) for rows in parts if rows),
        start=torch.zeros((), dtype=F64),
    )
    (split_gradient,) = torch.autograd.grad(total, theta)
    assert_close(total, whole)
    assert_close(split_gradient, gradient)


@pytest.mark.parametrize("kind", MEANS)
def test_nothing_to_train_on_gives_zero_and_a_zero_gradient(kind: str):
    loss = torch.full((2, 3), float("inf"), dtype=F64, requires_grad=True)
    mask, group = torch.zeros(2, 3).bool(), torch.tensor([0, 1])
    result = mean_of(kind, loss, mask, group, mask, group)
    result.backward()
    assert result.item() == 0
    assert_close(loss.grad, torch.zeros(2, 3, dtype=F64))


@pytest.mark.parametrize("kind", MEANS)
def test_gradient_sign_each_mean_keeps_the_sign_of_every_token(kind: str):
    loss = torch.randn(4, 5, dtype=F64, requires_grad=True)
    mask, group = torch.rand(4, 5) < 0.7, torch.tensor([0, 0, 1, 1])
    mean_of(kind, loss, mask, group, mask, group).backward()
    assert loss.grad is not None
    assert (loss.grad[mask] > 0).all()
    assert (loss.grad[~mask] == 0).all()


def test_eq12_a_long_response_weighs_by_its_tokens_and_in_eq5_it_does_not():
    loss, row, lengths = ragged((1, 0.0), (10, 0.0))
    loss.requires_grad_()
    (per_token,) = torch.autograd.grad(token_mean(loss, total_tokens=11), loss)
    mean = sequence_mean(loss, row, row_tokens=lengths, total_sequences=2)
    (per_sequence,) = torch.autograd.grad(mean, loss)
    assert_close(per_token.split([1, 10])[1].sum(), torch.tensor(10 / 11, dtype=F64))
    assert_close(per_sequence.split([1, 10])[1].sum(), torch.tensor(1 / 2, dtype=F64))
