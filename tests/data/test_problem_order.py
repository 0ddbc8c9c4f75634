"""The order of visits: a permutation an epoch, no problem twice in a step, exact resume, and taking back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.data.order import ProblemOrder, epoch_order
from dapo.errors import CheckpointError, DataError

sizes = st.integers(1, 12)
seeds = st.integers(0, 2**40)
steps = st.lists(st.tuples(st.integers(0, 15), st.floats(0, 1)), max_size=12)  # submitted, share of them used


def play(order: ProblemOrder, steps: list[tuple[int, float]]) -> list[list[tuple[int, int]]]:
    """Submit and rewind step by step; what each step used."""
    used = []
    for n, share in steps:
        order.start_step()
        given = [came for came in (order.next() for _ in range(n)) if came is not None]
        keep = int(len(given) * share)
        order.rewind(keep)
        used.append(given[:keep])
    return used


@given(sizes, seeds)
def test_an_epoch_visits_every_problem_once(n, seed):
    order = ProblemOrder(n, seed=seed)
    order.start_step()
    assert sorted(order.next() for _ in range(n)) == [(index, 0) for index in range(n)]


def test_epochs_and_seeds_shuffle_anew():
    n = 50
    orders = [tuple(epoch_order(n, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert all(sorted(one) == list(range(n)) for one in orders)


@given(sizes, seeds, steps)
def test_no_problem_comes_twice_in_a_step(n, seed, steps):
    order = ProblemOrder(n, seed=seed)
    for submitted, _ in steps:
        order.start_step()
        came = [order.next() for _ in range(submitted)]
        indices = [one[0] for one in came if one is not None]
        assert len(indices) == len(set(indices)) == min(submitted, n)


@given(sizes, seeds, steps)
def test_visits_count_what_was_used(n, seed, steps):
    order = ProblemOrder(n, seed=seed)
    seen = dict.fromkeys(range(n), 0)
    for step in play(order, steps):
        for index, visit in step:
            assert visit == seen[index]
            seen[index] += 1
    assert [order.visits(index) for index in range(n)] == list(seen.values())
    assert order.n_submitted == sum(seen.values())


@given(sizes, seeds, steps, steps)
def test_a_restored_order_goes_on_as_if_never_stopped(n, seed, before, after):
    order = ProblemOrder(n, seed=seed)
    play(order, before)
    state = json.loads(json.dumps(order.state()))
    again = ProblemOrder.restore(state, n_problems=n, seed=seed)
    assert again.state() == order.state()
    assert play(again, after) == play(order, after)


@given(sizes, seeds, st.integers(0, 12), st.integers(0, 12))
def test_a_state_taken_within_a_step_keeps_the_steps_problems(n, seed, first, then):
    order = ProblemOrder(n, seed=seed)
    order.start_step()
    came = [order.next() for _ in range(first)]
    again = ProblemOrder.restore(order.state())
    more = [again.next() for _ in range(then)]
    assert more == [order.next() for _ in range(then)]
    indices = [one[0] for one in [*came, *more] if one is not None]
    assert len(indices) == len(set(indices))


@given(sizes, seeds, st.lists(st.integers(0, 12), max_size=10))
def test_over_provisioning_changes_nothing_but_waste(n, seed, used):
    """In-order selection: to submit more than is used and rewind leaves the same order as to submit just that."""
    lean, eager = ProblemOrder(n, seed=seed), ProblemOrder(n, seed=seed)
    exact = play(lean, [(k, 1.0) for k in used])
    for k, expected in zip(used, exact, strict=True):
        eager.start_step()
        given = [came for came in (eager.next() for _ in range(k + 5)) if came is not None]
        eager.rewind(min(k, n))
        assert given[: min(k, n)] == expected
    assert eager.state() == lean.state()


@given(st.integers(2, 12), seeds, st.lists(st.integers(1, 6), max_size=20))
def test_no_problem_falls_behind(n, seed, used):
    """With steps of at most half the set, visits never differ by more than two: one open epoch, one put off."""
    order = ProblemOrder(n, seed=seed)
    for k in used:
        play(order, [(min(k, n // 2), 1.0)])
        visits = [order.visits(index) for index in range(n)]
        assert max(visits) - min(visits) <= 2


def test_a_state_of_another_run_is_refused():
    state = ProblemOrder(5, seed=1).state()
    with pytest.raises(CheckpointError, match="n_problems is 6"):
        ProblemOrder.restore(state, n_problems=6)
    with pytest.raises(CheckpointError, match="seed is 2"):
        ProblemOrder.restore(state, seed=2)
    with pytest.raises(CheckpointError, match="does not follow"):
        ProblemOrder.restore({**state, "step": [0, 0]})
    with pytest.raises(DataError):
        ProblemOrder(0, seed=1)
