"""Each group of a step gets exactly one entry in the ledger, with the fate it had."""

import numpy as np

from dapo.sampling.collect import PendingGroup
from dapo.sampling.dynamic import SamplingState
from dapo.sampling.ledger import entries_of
from dapo.types import Completion, Group, Judgement, Problem, StopReason, Verdict


def group(name: str, *right: bool, version: int = 3) -> Group:
    tokens = np.zeros(5, np.int32)
    drawn = np.full(5, version, np.int32)
    completion = Completion(tokens, np.zeros(5, np.float32), drawn, StopReason.EOS, "")
    judgements = [Judgement(Verdict.CORRECT if is_right else Verdict.WRONG, 0.0) for is_right in right]
    return Group(Problem(name, "", ""), 0, (1,), (completion,) * len(right), tuple(judgements))


def pending(name: str) -> PendingGroup:
    return PendingGroup(0, Problem(name, "", ""), 0, (1,), [None], [None])


def test_every_group_has_one_fate_whatever_became_of_it():
    trained, wrong, right = group("trained", True, False), group("wrong", False, False), group("right", True, True)
    old, carried, surplus = group("old", True, False, version=1), group("carried", False, True), group("s", True, False)
    late, flying, returned = pending("late"), pending("flying"), pending("returned")
    state = SamplingState(carried=[carried], pending=[flying])
    started = [*map(pending, ("trained", "wrong", "right", "carried", "s")), returned]
    resolved = [trained, wrong, right, carried, surplus]
    entries = entries_of(started, 5, [old, late, flying], resolved, [trained], [old], state)
    assert {entry.problem: entry.fate for entry in entries} == {
        "trained": "trained", "wrong": "all_wrong", "right": "all_correct", "old": "stale", "carried": "carried",
        "s": "surplus", "late": "stale", "flying": "in_flight", "returned": "returned",
    }  # fmt: skip
    assert len(entries) == 9
    by_name = {entry.problem: entry for entry in entries}
    assert by_name["old"][3:] == (2, 10, 1, 1)
    assert by_name["right"][3:] == (2, 10, 2, 3)
    assert by_name["flying"][3:] == (None,) * 4


def test_without_dynamic_sampling_every_group_is_trained_on_and_a_skipped_step_holds_its_groups():
    wrong, mixed = group("wrong", False, False), group("mixed", True, False)
    started = [pending("wrong"), pending("mixed")]
    trained = entries_of(started, 2, [], [wrong, mixed], [wrong, mixed], [], SamplingState())
    assert [entry.fate for entry in trained] == ["trained", "trained"]
    held = entries_of(started, 2, [], [wrong, mixed], [], [], SamplingState(held=[mixed]))
    assert [entry.fate for entry in held] == ["all_wrong", "held"]
