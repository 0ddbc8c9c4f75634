"""Dynamic sampling's constraint, DAPO eq. 11."""

import pytest

from dapo.algorithms.mixed_groups import is_mixed


@pytest.mark.parametrize("G", [1, 2, 16])
def test_eq11_a_group_is_mixed_if_some_responses_are_correct_and_not_all(G: int):
    for n_correct in range(G + 1):
        assert is_mixed([1] * n_correct + [0] * (G - n_correct)) == (0 < n_correct < G)


def test_eq11_of_graded_rewards_two_values_must_differ():
    assert is_mixed([0.1, 0.1, 0.2])
    assert not is_mixed([0.1, 0.1, 0.1])
    assert not is_mixed([])
