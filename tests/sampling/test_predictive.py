"""Predictive selection: what a group teaches of its problem, with verdicts and with graded rewards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.sampling.dynamic import ProblemSource
from dapo.sampling.predictive import Posteriors, PredictiveSource, RetiringSource, n_above_mean, n_right
from dapo.types import Completion, Group, Judgement, Problem, StopReason, Verdict

G = 8
SCORES = st.lists(st.sampled_from([-1.0, 0.0, 0.1, 0.3, 0.7, 1.0]), min_size=2, max_size=16)


def group_of(judgements: list[Judgement]) -> Group:
    none = np.zeros(0, np.int32)
    response = Completion(none, none.astype(np.float32), none, StopReason.EOS, "")
    return Group(Problem("p", "", ""), 0, (1,), (response,) * len(judgements), tuple(judgements))


def graded(*values: float) -> Group:
    return group_of([Judgement(Verdict.WRONG, value, graded=True) for value in values])


def judged(n_correct: int) -> Group:
    return group_of([Judgement(Verdict.CORRECT, 1.0)] * n_correct + [Judgement(Verdict.WRONG, -1.0)] * (G - n_correct))


def chance_after(*groups: Group) -> float:
    posteriors = Posteriors()
    for group in groups:
        posteriors.observe(group)
    return posteriors.chance("p", G)


def test_a_tenth_of_the_visits_of_hopeless_problems_come_other_ones_with_another_seed():
    """Else the model would never show that it can solve them by now."""
    base: ProblemSource = None  # type: ignore[assignment]
    posteriors = Posteriors(counts=dict.fromkeys("pq", (0.0, 1000000.0)))
    passed = set()
    for seed in (1, 2):
        source = PredictiveSource(base, posteriors, G=G, seed=seed)
        for name in "pq":
            visits = tuple(visit for visit in range(1000) if source.passes((Problem(name, "", ""), visit, (1,))))
            assert 70 < len(visits) < 130
            passed.add(visits)
    assert len(passed) == 4


@pytest.mark.parametrize("n_correct", range(G + 1))
def test_verdicts_are_counted_as_they_are(n_correct: int):
    assert n_right(judged(n_correct)) == n_correct


def test_a_problem_whose_graded_values_differ_becomes_likelier_and_one_whose_values_agree_less_likely():
    before = chance_after()
    different = graded(0.1, 0.9, 0.4, 0.7, 0.2, 0.8, 0.5, 0.6)
    assert n_right(different) == G // 2
    assert chance_after(*[different] * 5) > before
    for value in (0.0, 0.1, 1.0):  # the mean of eight 0.1 is not 0.1
        assert chance_after(*[graded(*[value] * G)] * 5) < before
    assert chance_after(graded(*[1.0] * G), graded(*[0.1] * G)) < before  # never all correct after all wrong


@given(SCORES)
def test_a_graded_group_counts_as_mixed_exactly_if_it_is(values: list[float]):
    group = graded(*values)
    assert (0 < n_right(group) < len(values)) == group.is_mixed


class Five:
    """Problems 0 to 4 of a step, and how many of them were used."""

    def __init__(self) -> None:
        self.at = self.used = 0

    def start_step(self) -> None:
        self.at = 0

    def next(self):  # type: ignore[no-untyped-def]
        if self.at == 5:
            return None
        self.at += 1
        return Problem(str(self.at - 1), "", ""), 0, (0,)

    def rewind(self, n_used: int) -> None:
        self.used = n_used


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n_used", [0, 1, 4, 5])
def test_border_every_problem_of_a_step_comes_once_passed_over_or_not(n_used: int, seed: int):
    base, posteriors = Five(), Posteriors(counts={str(i): (40.0, 0.0) for i in range(5)})  # hardly ever mixed
    source = PredictiveSource(base, posteriors, G=G, seed=seed)
    for _ in range(2):
        source.start_step()
        came, drawn = [], []
        while (one := source.next()) is not None:
            came.append(int(one[0].id))
            drawn.append(base.at)
        assert sorted(came) == list(range(5))
        source.rewind(n_used)
        assert base.used == ([0, *drawn][n_used])


def test_what_one_step_passed_over_does_not_come_in_the_next():
    posteriors = Posteriors(counts={"0": (80.0, 0.0), "1": (80.0, 0.0)})
    source = RetiringSource(Five(), posteriors, above=0.9)
    for _ in range(2):
        source.start_step()
        assert source.next()[0].id == "2"  # and no more of this step
    source.start_step()
    assert [submission[0].id for submission in iter(source.next, None)] == ["2", "3", "4", "0", "1"]


def test_solved_problems_are_retired_until_nothing_else_is_left_or_they_are_failed():
    posteriors = Posteriors(counts={"1": (8.0, 0.0), "3": (7.0, 1.0), "4": (80.0, 0.0)})
    base = Five()
    source = RetiringSource(base, posteriors, above=0.9)
    source.start_step()
    came = [submission[0].id for submission in iter(source.next, None)]
    assert came == ["0", "2", "3", "1", "4"]  # (1 + 8)/(2 + 8) is 0.9, (1 + 7)/(2 + 8) is not
    source.rewind(2)
    assert base.used == 3  # 0, 1 and 2 were drawn for them; 1 stays passed over
    posteriors.counts["1"] = (4.0, 8.0)  # the next visit: old counts halved, all wrong
    source.start_step()
    assert [submission[0].id for submission in iter(source.next, None)] == ["0", "1", "2", "3", "4"]


def test_a_problem_is_retired_after_visits_that_agree_not_after_one_lucky_group():
    posteriors = Posteriors()
    lucky = group_of([Judgement(Verdict.CORRECT, 1.0)] * 4)
    rates = []
    for _ in range(3):
        posteriors.observe(lucky)
        rates.append(posteriors.pass_rate("p"))
    assert rates == pytest.approx([5 / 6, 7 / 8, 8 / 9])  # 4; 2 + 4; 3 + 4 right
    assert [rate >= 0.85 for rate in rates] == [False, True, True]


def test_what_was_seen_before_counts_half_at_each_visit_right_and_wrong_alike():
    posteriors = Posteriors()
    for n_correct in (4, 6, 1):
        posteriors.observe(judged(n_correct))
    right, wrong = 4 / 4 + 6 / 2 + 1, 4 / 4 + 2 / 2 + 7
    assert posteriors.counts == {"p": (right, wrong)}
    assert posteriors.pass_rate("p") == (1 + right) / (2 + right + wrong)


def test_of_problems_passed_over_the_likeliest_to_be_mixed_comes_first():
    counts = {"solved": (9.0, 0.0), "even": (5.0, 5.0), "hard": (1.0, 9.0)}
    source = PredictiveSource(Five(), Posteriors(counts=counts), G=4, seed=0)
    passed_over = [(Problem(name, "", ""), 0, (1,)) for name in ("solved", "even", "hard")]
    assert source.best(passed_over)[0].id == "even"


def test_a_graded_response_at_its_groups_mean_is_not_above_it():
    assert n_above_mean([0.0, 0.5, 1.0]) == 1
