"""Strategies side by side: what `dapo bench sampling` claims, and that the real engine decides as the virtual one."""

from dataclasses import replace
from math import exp

import pytest

from dapo.bench.strategies import STRATEGIES, Load, compare
from dapo.bench.strategies_measured import SMALL, compare_measured, tick_cost


@pytest.mark.slow
def test_streaming_takes_less_time_and_wastes_less_than_rounds():
    outcomes = compare(Load(steps=6))
    one, three, stream, fast = (outcomes[name] for name in STRATEGIES)

    def unused(outcome):
        return outcome.wasted_tokens["surplus"] + outcome.wasted_tokens["aborted"]

    assert {outcome.groups for outcome in outcomes.values()} == {64}
    assert one.prompts_tried == three.prompts_tried == stream.prompts_tried  # selection in order: the same groups
    assert one.trained_tokens == three.trained_tokens == stream.trained_tokens
    assert stream.seconds <= 0.65 * one.seconds
    assert stream.seconds <= 0.85 * three.seconds
    assert unused(stream) <= 0.3 * min(unused(one), unused(three))
    assert fast.seconds <= 0.5 * one.seconds
    for outcome in outcomes.values():
        wasted = sum(outcome.wasted_tokens.values())
        assert outcome.generated_tokens == pytest.approx(outcome.trained_tokens + wasted)


@pytest.mark.slow
def test_the_local_engine_chooses_and_wastes_what_the_virtual_one_does():
    load = replace(SMALL, prompts_per_step=4, responses_per_prompt=4, max_concurrent=24, max_new_tokens=64, steps=3)
    virtual, real = compare(load), compare_measured(load)
    for name in ("rounds x 1", "rounds x 3", "dapo (stream)"):
        assert real[name].trained_tokens == virtual[name].trained_tokens
        assert real[name].prompts_tried == virtual[name].prompts_tried
        assert real[name].wasted_tokens["all_wrong"] == virtual[name].wasted_tokens["all_wrong"]
    assert all(outcome.groups == 4 for outcome in real.values())
    assert all(outcome.seconds > 0 for outcome in real.values())


def test_the_load_of_the_real_engine_has_the_spread_of_the_virtual_one():
    def limit_by_median(load: Load) -> float:
        return load.max_new_tokens / exp(load.length_mu)

    assert limit_by_median(SMALL) == pytest.approx(limit_by_median(Load()), rel=0.01)
    assert SMALL.length_sigma == Load().length_sigma


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_over_provisioning_wastes_little_on_the_load_of_the_real_engine(seed: int):
    outcomes = compare(replace(SMALL, seed=seed))  # what is wasted does not depend on what a tick costs
    unused = {name: o.wasted_tokens["surplus"] + o.wasted_tokens["aborted"] for name, o in outcomes.items()}
    assert unused["dapo (stream)"] <= 0.3 * unused["rounds x 1"]


def test_a_full_tick_costs_more_than_an_empty_one():
    cost = tick_cost(replace(SMALL, max_concurrent=256), ticks=4)
    assert list(cost) == [16, 256]
    assert cost[256] > cost[16] > 0
