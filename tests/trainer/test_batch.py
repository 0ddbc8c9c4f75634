"""Groups become a batch: rewards by eq. 7 and 13, advantages by eq. 9, mini- and micro-batches, controls."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from toy import recipe

from dapo.algorithms.advantages import group_advantage
from dapo.config.schema import Config
from dapo.learner.batch import Batch, make_batch, split_into_microbatches, split_into_minibatches, why_rft_has_no_loss
from dapo.learner.critic import similar_lengths
from dapo.learner.ragged import Ragged, token_mask
from dapo.learner.sums import Totals
from dapo.sampling.accounting import Accounting
from dapo.sampling.dynamic import SampledGroups
from dapo.tracking.metrics import check_declared
from dapo.trainer.step_metrics import step_metrics
from dapo.types import Completion, Group, Judgement, Problem, StopReason, Verdict


def group_of(name: str, lengths: list[int], right: list[bool], truncated: list[bool] | None = None) -> Group:
    stops = [StopReason.LENGTH if t else StopReason.EOS for t in truncated or [False] * len(lengths)]
    completions = tuple(
        Completion(np.arange(n, dtype=np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), stop, "")
        for n, stop in zip(lengths, stops, strict=True)
    )
    judgements = tuple(Judgement(Verdict.CORRECT if r else Verdict.WRONG, 1.0 if r else -1.0) for r in right)
    return Group(Problem(name, "", ""), 0, (1, 2), completions, judgements)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return recipe(tmp_path_factory.mktemp("batch")).config  # L_max 12, L_cache 4


def with_control(config: Config, control: str) -> Config:
    return config.model_copy(update={"rewards": config.rewards.model_copy(update={"control": control})})


def test_rewards_and_advantages_by_hand(config: Config):
    group = group_of("a", [3, 10, 12, 5], [True, True, False, False], [False, False, True, False])
    batch = make_batch([group], config, torch.float64)
    # eq. 13 with L_max 12, L_cache 4: length 10 -> (8 − 10)/4 = −0.5, length 12 -> −1
    assert batch.reward.tolist() == [1.0, 0.5, -2.0, -1.0]
    expected = group_advantage(torch.tensor([[1.0, 0.5, -2.0, -1.0]], dtype=torch.float64))[0]
    for row in range(4):
        assert_close(batch.advantage.row(row), expected[row].expand(batch.lengths[row]))
    assert batch.is_in_loss.tolist() == [True, True, False, True]  # truncated: out of the loss, in the statistics


def test_a_response_without_tokens_is_no_row_of_the_loss(config: Config):
    """It has no token to take a loss from, and would count in the denominators of means over responses."""
    batch = make_batch([group_of("a", [0, 3, 4, 5], [False, True, False, True])], config, torch.float64)
    assert batch.is_in_loss.tolist() == [False, True, True, True]
    assert Totals.of(batch, batch.loss_rows()).sequences == 3


def test_shuffled_keeps_each_groups_verdicts_but_not_whose_they_are(config: Config):
    groups = [group_of(str(i), [4] * 8, [True] * 3 + [False] * 5) for i in range(20)]
    plain = make_batch(groups, config, torch.float64)
    shuffled = make_batch(groups, with_control(config, "shuffled"), torch.float64)
    assert shuffled.raw_reward.view(20, 8).sum(1).tolist() == plain.raw_reward.view(20, 8).sum(1).tolist()
    assert not torch.equal(shuffled.raw_reward, plain.raw_reward)
    agreement = float((shuffled.is_correct == plain.is_correct).double().mean())
    assert abs(agreement - (3 / 8 * 3 / 8 + 5 / 8 * 5 / 8)) < 0.15  # what chance gives
    again = make_batch([replace(group, visit=1) for group in groups], with_control(config, "shuffled"), torch.float64)
    assert not torch.equal(again.raw_reward, shuffled.raw_reward)
    negated = make_batch(groups, with_control(config, "negated"), torch.float64)
    assert torch.equal(negated.raw_reward, -plain.raw_reward)
    assert torch.equal(negated.is_correct, ~plain.is_correct)


@given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 5), st.integers(0, 3))
def test_minibatches_have_every_group_once_evenly_and_anew_each_time(n: int, updates: int, step: int, epoch: int):
    minibatches = split_into_minibatches(n, updates, seed=3, step=step, epoch=epoch)
    assert sorted(g for part in minibatches for g in part) == list(range(n))
    assert len(minibatches) == min(n, updates)  # never more updates than groups
    assert not minibatches or max(map(len, minibatches)) - min(map(len, minibatches)) <= 1
    if n > 20 and updates > 1:
        assert minibatches != split_into_minibatches(n, updates, seed=3, step=step + 1, epoch=epoch)


@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=16), budget=st.integers(1, 60))
def test_microbatches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int):
    batch = Batch.__new__(Batch)
    batch.responses, batch.prompts = [np.zeros(n, np.int32) for n in lengths], [(1, 2)] * len(lengths)
    parts = split_into_microbatches(batch, range(len(lengths)), budget)
    assert [row for part in parts for row in part] == list(range(len(lengths)))
    assert all(len(part) == 1 or sum(lengths[row] + 2 for row in part) <= budget for part in parts)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (9, [[0], [1, 2], [3], [4, 5]]),
        (10, [[0, 1], [2], [3], [4, 5]]),  # rows 0 and 1 fill it to the last token
        (11, [[0, 1], [2], [3], [4, 5]]),
        (100, [[0, 1, 2, 3, 4, 5]]),
        (1, [[0], [1], [2], [3], [4], [5]]),
    ],
)
def test_border_a_microbatch_takes_rows_while_there_is_room(budget: int, expected: list[list[int]]):
    batch = Batch.__new__(Batch)
    batch.responses = [np.zeros(n, np.int32) for n in (4, 2, 3, 20, 1, 2)]
    batch.prompts = [(1, 2)] * 6  # 6, 4, 5, 22, 3 and 4 tokens
    assert split_into_microbatches(batch, range(6), budget) == expected
    assert split_into_microbatches(batch, [], budget) == []


def test_without_a_buffer_no_length_is_punished(config: Config):
    shaping = config.shaping.model_copy(update={"overlong_penalty": 0.0, "overlong_buffer_tokens": None})
    plain = config.model_copy(update={"shaping": shaping})
    batch = make_batch([group_of("a", [3, 10, 12, 5], [True, True, False, False])], plain, torch.float64)
    assert batch.reward.tolist() == batch.raw_reward.tolist() == [1.0, 1.0, -1.0, -1.0]


def test_an_empty_step_is_an_empty_batch(config: Config, tmp_path: Path):  # noqa: ARG001
    batch = make_batch([], config, torch.float64)
    assert batch.lengths == []
    assert batch.reward.tolist() == []


def test_denominators_of_an_update_by_hand(config: Config):
    groups = [
        group_of("a", [3, 4, 5, 6], [True, False, True, False]),
        group_of("b", [7, 8, 9, 1], [False, False, False, True]),
    ]
    batch = make_batch([*groups, group_of("c", [2, 2, 2, 2], [True] * 4)], config, torch.float64)
    totals = Totals.of(batch, [0, 1, 2, 5, 7])
    assert (totals.tokens, totals.sequences, totals.prompts) == (3 + 4 + 5 + 8 + 1, 5, 2)
    assert totals.group_tokens.tolist() == [3 + 4 + 5, 8 + 1, 0]
    assert totals.positive_tokens == 3 + 5 + 1
    assert Totals.of(batch, [7]).prompts == 1  # a prompt with a single token counts


def test_metrics_of_a_step_by_hand(config: Config):
    """Of 8 verified responses half were truncated, three of them in a group that is not trained on."""
    mixed = group_of("a", [2, 4, 12, 9], [True, False, False, True], [False, False, True, False])
    wrong = group_of("b", [12, 12, 12, 1], [False] * 4, [True, True, True, False])
    read = replace(mixed.judgements[1], verdict=Verdict.UNPARSEABLE)
    mixed = replace(mixed, judgements=(mixed.judgements[0], read, *mixed.judgements[2:]))
    accounting = Accounting(prompts_tried=2)
    for group in (mixed, wrong):
        accounting.resolved(group)
    accounting.wasted(wrong)
    accounting.trained([mixed], filter_truncated=True)
    found = step_metrics(7, SampledGroups([mixed], accounting), make_batch([mixed], config, torch.float64), 3)
    assert found == pytest.approx(
        {
            "step": 7, "accuracy": 2 / 8, "length/truncated": 4 / 8,
            "sampling/prompts_tried": 2, "sampling/groups_kept": 1 / 2, "sampling/groups_trained": 1,
            "sampling/groups_all_correct": 0, "sampling/groups_all_wrong": 1,
            "sampling/mixed_per_1000_tokens": 1000 / 64, "sampling/staleness_max": 3,  # drawn by version 0
            "tokens/generated": 27 + 37, "tokens/trained": 2 + 4 + 9, "tokens/wasted_truncated": 12,
            "tokens/wasted_all_wrong": 37,
            **{f"tokens/wasted_{cause}": 0 for cause in ("all_correct", "surplus", "aborted", "stale")},
            "reward/mean": (1 - 1 - 2 + 0.75) / 4, "reward/raw": 0, "reward/overlong": -1.25 / 4,  # eq. 13: 12 and 9
            "length/mean": 27 / 4, "length/max": 12, "length/correct": 11 / 2, "length/wrong": 16 / 2,
            "length/p10": 2 + 0.3 * 2, "length/p90": 12 - 0.3 * 3,  # of 2, 4, 9, 12: three steps from 0 to 1
            "verdict/wrong": 1 / 4, "verdict/unparseable": 1 / 4, "verdict/timeout": 0, "verdict/crash": 0,
        }
    )  # fmt: skip


def test_only_steps_with_equal_graded_values_speak_of_them(config: Config):
    """A step of verdicts has the metrics that it always had."""
    empty = make_batch([], config, torch.float32)
    plain, graded = Accounting(), Accounting(groups_all_equal=3)
    graded.wasted_tokens["all_equal"] = 60
    lines = [step_metrics(1, SampledGroups([], accounting), empty, 0) for accounting in (plain, graded)]
    told = {"sampling/groups_all_equal": 3, "tokens/wasted_all_equal": 60}
    assert {name: lines[1][name] for name in lines[1].keys() - lines[0].keys()} == told
    for line in lines:
        check_declared(line)


# ---------------------------------------------------------------- borders


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(0, 5), max_size=12), data=st.data())
def test_border_rows_of_any_length_come_back_as_they_were_put(lengths: list[int], data: st.DataObject):
    """Empty rows too, in any order and any parts."""
    rows = [np.arange(10 * i, 10 * i + n, dtype=np.float32) for i, n in enumerate(lengths)]
    ragged = Ragged(lengths, torch.float64)
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    for part in (order[:cut], order[cut:]):
        ragged.put(part, torch.cat([torch.from_numpy(rows[i]) for i in part] or [torch.zeros(0)]))
    assert [ragged.row(i).tolist() for i in range(len(lengths))] == [row.tolist() for row in rows]
    assert torch.equal(ragged.flat, Ragged.of(rows, torch.float64).flat)
    assert token_mask(lengths, "cpu").sum(dim=1 if lengths else None).tolist() == (lengths or 0)
    if lengths:
        assert ragged.joined(order, "cpu").tolist() == [float(x) for i in order for x in rows[i]]
        mask = token_mask([lengths[i] for i in order], "cpu")
        assert torch.equal(ragged.padded(order, "cpu")[mask], ragged.joined(order, "cpu"))


@pytest.mark.parametrize("n_rows", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 21])
def test_border_gae_works_on_every_row_once(n_rows: int, length: int, monkeypatch: pytest.MonkeyPatch):
    """Twenty padded values at a time: four rows of five; a row beyond that stands alone."""
    monkeypatch.setattr("dapo.learner.critic.PADDED_VALUES", 20)
    parts = list(similar_lengths([length] * n_rows))
    assert [row for part in parts for row in part] == list(range(n_rows))
    assert all(len(part) == 1 or len(part) * length <= 20 for part in parts)


def test_gae_takes_the_longest_rows_first_and_as_many_as_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dapo.learner.critic.PADDED_VALUES", 10)
    assert list(similar_lengths([3, 9, 5, 1, 12])) == [[4], [1], [2, 0], [3]]  # 10 // 5 = 2 rows of up to 5 tokens


def test_rejection_sampling_says_why_a_step_has_no_target(config: Config):
    imitates = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"advantage": "none"})})
    wrong, right = group_of("a", [3, 4], [False, False]), group_of("b", [3, 4], [False, True])
    cut_off = group_of("c", [12, 4], [True, False], [True, False])  # correct, and filtered out of the loss

    def why(*groups: Group, config: Config = imitates) -> str:
        return why_rft_has_no_loss(make_batch(list(groups), config, torch.float64), config)

    assert why(wrong).startswith("no response counts as correct: ")
    assert why(wrong, cut_off).startswith("no response counts as correct: ")
    assert why(wrong, right) == ""
    assert why() == ""  # no step, nothing to say
    assert why(wrong, config=config) == ""  # others learn from what is wrong
