"""Mixtures: shares of the prompts submitted, each source in its own order, exact resume, taking back."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.config.sources import Source
from dapo.data.encoded import EncodedSet, OrderedSource, of_mixture
from dapo.data.mixture.source import MixtureSource
from dapo.data.mixture.turns import Turns
from dapo.data.order import ProblemOrder
from dapo.errors import CheckpointError
from dapo.types import Problem

weights = st.lists(st.floats(0.01, 100, allow_nan=False), min_size=1, max_size=8)
steps = st.lists(st.tuples(st.integers(0, 30), st.floats(0, 1)), min_size=1, max_size=8)  # submitted, share used


@given(weights)
def test_no_source_is_ever_a_whole_turn_off_its_share(of: list[float]):
    """|c − w·n| < 1 for every source at every n, exactly."""
    turns, total = Turns(of), sum(map(Fraction, of))
    for n in range(1, 200):
        turns.next()
        assert all(abs(had - Fraction(w) / total * n) < 1 for had, w in zip(turns.counts, of, strict=True))


@pytest.mark.parametrize("of", [[2, 1, 1], [0.7, 0.2, 0.1], [1e-9, 1.0], [3, 3, 3, 1], [1.0] * 20, [5e-324, 1e300]])
def test_every_window_of_300_has_the_shares_within_two_percent(of: list[float]):
    turns = Turns(of)
    drawn = [turns.next() for _ in range(1500)]
    for start in range(0, 1200, 7):
        window = drawn[start : start + 300]
        assert all(abs(window.count(at) / 300 - w / sum(of)) < 0.02 for at, w in enumerate(of))


def test_a_worked_example():
    """Weights 2, 1, 1: due at 1/2, 1, … of the first and 4, 8, … of the others; equals by their place in the table."""
    turns = Turns([2, 1, 1])
    assert [turns.next() for _ in range(8)] == [0, 1, 0, 2, 0, 1, 0, 2]


def test_turns_of_other_weights_are_refused():
    with pytest.raises(CheckpointError, match="do not follow from the weights"):
        Turns([1, 1]).place([5, 1])
    with pytest.raises(CheckpointError, match="do not follow from the weights"):
        Turns([1, 1]).place([1])


def mixture(sizes: dict[str, int], of: list[float]) -> MixtureSource:
    orders = {}
    for seed, (name, n) in enumerate(sizes.items()):
        problems = tuple(Problem(f"{name}/{i}", "", "", name) for i in range(n))
        orders[name] = OrderedSource(EncodedSet(name, "", problems, ((1,),) * n), ProblemOrder(n, seed=seed))
    return MixtureSource(orders, list(orders.values()), of)


def submit(source: MixtureSource, n: int) -> list[tuple[str, int]]:
    came = [one for one in (source.next() for _ in range(n)) if one is not None]
    return [(problem.id, visit) for problem, visit, _ in came]


def sources_of(came: list[tuple[str, int]]) -> str:
    return "".join(problem[0] for problem, _ in came)


@given(steps)
def test_taking_back_leaves_no_trace(play: list[tuple[int, float]]):
    """Selection in order: what was submitted beyond the last group used comes again, from the same sources."""
    sizes, of = {"a": 7, "b": 50, "c": 3}, [2.0, 1.0, 0.5]
    greedy, exact = mixture(sizes, of), mixture(sizes, of)
    for n, share in play:
        greedy.start_step()
        came = submit(greedy, n)
        used = int(len(came) * share)
        greedy.rewind(used)
        exact.start_step()
        assert submit(exact, used) == came[:used]
        exact.rewind(used)
        assert greedy.state() == exact.state()


@given(steps)
def test_a_state_in_json_goes_on_as_if_nothing_had_happened(play: list[tuple[int, float]]):
    sizes, of = {"a": 7, "b": 50}, [2.0, 1.0]
    straight = mixture(sizes, of)
    for n, share in play:
        straight.start_step()
        straight.rewind(int(len(submit(straight, n)) * share))
    resumed = mixture(sizes, of)
    resumed.restore(json.loads(json.dumps(straight.state())))
    for source in (straight, resumed):
        source.start_step()
    assert submit(resumed, 40) == submit(straight, 40)


def test_each_source_has_its_own_epochs():
    """One that ends begins its next pass; nothing comes twice in a step."""
    source = mixture({"a": 4, "b": 40}, [1.0, 1.0])
    seen = []
    for _ in range(6):
        source.start_step()
        came = submit(source, 4)
        assert len(set(came)) == 4
        seen += came
        source.rewind(4)
    assert sources_of(seen) == "ab" * 12
    assert sorted(visit for problem, visit in seen if problem.startswith("a")) == [0] * 4 + [1] * 4 + [2] * 4
    assert all(visit == 0 for problem, visit in seen if problem.startswith("b"))


def test_a_source_smaller_than_its_share_of_a_step_gives_all_it_has_and_nothing_is_made_up_for():
    source = mixture({"a": 2, "b": 30, "c": 30}, [2.0, 1.0, 1.0])
    for _ in range(2):
        source.start_step()
        came = sources_of(submit(source, 20))
        assert (came.count("a"), came.count("b"), came.count("c")) == (2, 9, 9)
        source.rewind(20)
    source.start_step()
    assert sources_of(submit(source, 4)).count("a") == 2  # its usual share, no debt


def test_all_is_seen_once_every_source_has_given_all_it_has():
    source = mixture({"a": 2, "b": 3}, [1.0, 1.0])
    source.start_step()
    seen = []
    while source.next() is not None:
        seen.append((source.n_submitted, source.has_seen_all))
    assert seen == [(1, False), (2, False), (3, False), (4, False), (5, True)]


def test_a_step_that_has_had_every_problem_ends():
    source = mixture({"a": 2, "b": 3}, [1.0, 1.0])
    source.start_step()
    assert len(submit(source, 10)) == 5
    assert source.next() is None
    source.rewind(5)
    source.start_step()
    assert len(submit(source, 10)) == 5


def test_a_row_that_names_its_data_source_keeps_it_for_the_verifier():
    rows = (Problem("1", "?", "2", "file", {"data_source": "gsm8k"}), Problem("2", "?", "3", "file"))
    source = Source("data.train.a", "a", "file", "raw", False, "", "math")
    named = of_mixture(EncodedSet("file", "", rows, ((1,), (1,))), source).problems
    assert [problem.source for problem in named] == ["a", "a"]
    assert [problem.for_verifier()["data_source"] for problem in named] == ["gsm8k", "file"]


def test_a_state_of_other_sources_is_refused():
    state = mixture({"a": 2, "b": 3}, [1.0, 1.0]).state()
    for other in ({"a": 2, "c": 3}, {"a": 2, "b": 4}, {"a": 2}):
        with pytest.raises(CheckpointError):
            mixture(other, [1.0] * len(other)).restore(state)
    with pytest.raises(CheckpointError, match="other sources"):
        mixture({"a": 2}, [1.0]).restore(ProblemOrder(2, seed=0).state())
