"""avg@k, pass@k, maj@k by hand, and their bootstrap intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.evaluation.avg_at_k import avg_at_k, bootstrap, maj_at_k, pass_at_k


def table(*rows: str) -> np.ndarray:
    """ "110" -> right, right, wrong."""
    return np.array([[c == "1" for c in row] for row in rows])


def test_by_hand():
    correct = table("1100", "0000", "1111", "0001")
    assert avg_at_k(correct).tolist() == [0.5, 0.0, 1.0, 0.25]
    assert pass_at_k(correct).tolist() == [1.0, 0.0, 1.0, 1.0]


def test_the_majority_counts_answers_not_responses():
    correct = table("1100", "1000", "0011", "0000", "1000")
    answers = [
        ["4", "4", "5", "6"],  # 4 leads with two votes: right
        ["4", "5", "5", "6"],  # 5 leads: wrong
        ["4", "4", "7", "7"],  # 4 and 7 tie, one of them right: a half
        [None, None, None, None],  # nobody votes
        ["4", None, None, None],  # one readable answer decides
    ]
    assert maj_at_k(correct, answers).tolist() == [1.0, 0.0, 0.5, 0.0, 1.0]


def test_one_value_in_several_spellings_is_one_answer():
    # 42 four times, written in two ways, against 41 three times.
    assert maj_at_k(table("1111000"), [["42", "42", "$42$", "$42$", "41", "41", "41"]]).tolist() == [1.0]
    # The same with the spellings on the wrong side.
    assert maj_at_k(table("0000111"), [["1/2", "0.5", r"\frac{1}{2}", "x = 0.50", "41", "41", "41"]]).tolist() == [0.0]


@pytest.mark.parametrize("row", ["1110", "0111", "1011"])
def test_most_verdicts_of_a_value_decide_wherever_the_odd_one_stands(row: str):
    assert maj_at_k(table(row), [["42"] * 4]).tolist() == [1.0]
    assert maj_at_k(~table(row), [["42"] * 4]).tolist() == [0.0]


def test_as_many_right_as_wrong_is_a_half():
    assert maj_at_k(table("1100"), [["42"] * 4]).tolist() == [0.5]
    # 42 and 7 tie with two votes each: a half and a whole, shared by two.
    assert maj_at_k(table("1011"), [["42", "42", "7", "7"]]).tolist() == [0.75]


SPELLINGS = st.sampled_from(["42", "$42$", "42.0", "x = 42", "41", "1/2", "0.5", "even", "nothing to read {", None])


@given(st.lists(st.tuples(SPELLINGS, st.booleans()), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_order_of_the_responses_does_not_matter(responses: list[tuple[str | None, bool]], random):
    shuffled = list(responses)
    random.shuffle(shuffled)
    first, second = (
        maj_at_k(np.array([[right for _, right in rows]]), [[text for text, _ in rows]])
        for rows in (responses, shuffled)
    )
    assert first == pytest.approx(second)  # the tied are summed in another order


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=20))
def test_avg_never_exceeds_pass_and_limits_agree(rows: list[list[bool]]):
    correct = np.array(rows)
    assert (avg_at_k(correct) <= pass_at_k(correct)).all()
    one = correct[:, :1]
    assert (avg_at_k(one) == pass_at_k(one)).all()  # k = 1: all three are the accuracy
    texts = [["right" if c else "wrong" for c in row] for row in one]
    assert (maj_at_k(one, texts) == avg_at_k(one)).all()


def test_the_interval_covers_the_truth_about_95_times_in_100():
    generator = np.random.default_rng(0)
    covered = 0
    for trial in range(100):
        sample = (generator.random(60) < 0.3).astype(np.float64)
        estimate = bootstrap(sample, seed=trial, resamples=400)
        covered += estimate.low <= 0.3 <= estimate.high
    assert covered >= 88  # nominal 95; a percentile interval of 60 coin flips is a little short


def test_interval_of_equal_problems_has_no_width_and_none_gives_zero():
    same = bootstrap(np.full(10, 0.5))
    assert (same.value, same.low, same.high) == (0.5, 0.5, 0.5)
    nothing = bootstrap(np.zeros(0))
    assert (nothing.value, nothing.low, nothing.high) == (0.0, 0.0, 0.0)


def test_the_same_seed_gives_the_same_interval():
    values = np.random.default_rng(1).random(30)
    assert bootstrap(values, seed=4) == bootstrap(values, seed=4)
    assert bootstrap(values).value == pytest.approx(values.mean())
