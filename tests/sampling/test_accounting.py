"""Where tokens went: every one is trained on, or wasted by one cause."""

from dataclasses import replace

import numpy as np
import pytest

from dapo.sampling.accounting import Accounting
from dapo.sampling.collect import PendingGroup
from dapo.types import Completion, Group, Judgement, Problem, StopReason, Verdict


def response(length: int, stop_reason: StopReason = StopReason.EOS) -> Completion:
    tokens = np.arange(length, dtype=np.int32)
    return Completion(tokens, tokens.astype(np.float32), np.zeros_like(tokens), stop_reason, "")


def group_of(completions: list[Completion], judgements: list[Judgement]) -> Group:
    return Group(Problem("p", "", ""), 0, (1,), tuple(completions), tuple(judgements))


RIGHT, WRONG, CRASH = Judgement(Verdict.CORRECT, 1.0), Judgement(Verdict.WRONG, -1.0), Judgement(Verdict.CRASH, -1.0)


@pytest.mark.parametrize("filter_truncated", [True, False])
def test_tokens_of_a_response_that_the_engine_gave_up_are_not_trained_on(filter_truncated: bool):
    completions = [response(3), response(5, StopReason.LENGTH), response(7, StopReason.ABORTED)]
    accounting = Accounting()
    accounting.trained([group_of(completions, [RIGHT, WRONG, CRASH])], filter_truncated=filter_truncated)
    assert accounting.trained_tokens == 3 + (0 if filter_truncated else 5)
    assert accounting.wasted_tokens["truncated"] == (5 if filter_truncated else 0)
    assert accounting.wasted_tokens["aborted"] == 7
    assert accounting.generated_tokens == 3 + 5 + 7


def test_of_an_episode_only_what_the_model_drew_counts_whatever_became_of_it():
    own = np.array([True, True, False, False, True, False])
    completions = [replace(response(6, stop), own=own) for stop in StopReason]
    group = group_of(completions, [WRONG, WRONG, CRASH])
    accounting = Accounting()
    accounting.trained([group], filter_truncated=True)
    accounting.wasted(group)
    wasted = {cause: n for cause, n in accounting.wasted_tokens.items() if n}
    assert (accounting.trained_tokens, wasted) == (3, {"truncated": 3, "aborted": 3, "all_wrong": 9})
    pending = PendingGroup(0, group.problem, 0, (1,), [*completions, None], [None] * 4)
    assert pending.n_tokens == 9


@pytest.mark.parametrize("value", [-1.0, 0.0, 0.5, 1.0])
def test_graded_values_that_are_all_equal_are_neither_right_nor_wrong(value: float):
    group = group_of([response(3)] * 8, [Judgement(Verdict.WRONG, value, graded=True)] * 8)
    accounting = Accounting()
    accounting.resolved(group)
    accounting.wasted(group)
    counts = (accounting.groups_all_correct, accounting.groups_all_wrong, accounting.groups_all_equal)
    assert counts == (0, 0, 1)
    assert accounting.acceptance == 0
    assert {cause: n for cause, n in accounting.wasted_tokens.items() if n} == {"all_equal": 24}


@pytest.mark.parametrize(("judgement", "cause"), [(RIGHT, "all_correct"), (WRONG, "all_wrong"), (CRASH, "all_wrong")])
def test_verdicts_that_are_all_the_same_are_all_right_or_all_wrong(judgement: Judgement, cause: str):
    group = group_of([response(3)] * 8, [judgement] * 8)
    accounting = Accounting()
    accounting.resolved(group)
    accounting.wasted(group)
    assert accounting.groups_all_equal == 0
    assert getattr(accounting, f"groups_{cause}") == 1
    assert accounting.wasted_tokens[cause] == 24
