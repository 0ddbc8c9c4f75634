"""Strategies side by side: what `dapo bench sampling` claims, and that the real engine decides as the virtual one."""

from dataclasses import replace

import pytest

from dapo.sampling.compare import STRATEGIES, Load, compare
from dapo.sampling.measured import SMALL, compare_measured


def test_streaming_fills_sooner_and_wastes_less_than_rounds():
    outcomes = compare(Load(steps=6))
    one, three, stream, fast = (outcomes[name] for name in STRATEGIES)

    def unused(outcome):
        return outcome.wasted_tokens["surplus"] + outcome.wasted_tokens["aborted"]

    assert {outcome.groups for outcome in outcomes.values()} == {64}
    assert one.prompts_tried == three.prompts_tried == stream.prompts_tried  # the prefix rule: the same groups
    assert one.trained_tokens == three.trained_tokens == stream.trained_tokens
    assert stream.seconds <= 0.65 * one.seconds
    assert stream.seconds <= 0.85 * three.seconds
    assert unused(stream) <= 0.3 * min(unused(one), unused(three))
    assert fast.seconds <= 0.5 * one.seconds
    for outcome in outcomes.values():
        wasted = sum(outcome.wasted_tokens.values())
        assert outcome.generated_tokens == pytest.approx(outcome.trained_tokens + wasted)


def test_the_local_engine_chooses_and_wastes_what_the_virtual_one_does():
    load = replace(SMALL, prompts_per_step=4, responses_per_prompt=4, max_concurrent=24, max_new_tokens=64, steps=3)
    virtual, real = compare(load), compare_measured(load)
    for name in ("rounds x 1", "rounds x 3", "dapo (stream)"):
        assert real[name].trained_tokens == virtual[name].trained_tokens
        assert real[name].prompts_tried == virtual[name].prompts_tried
        assert real[name].wasted_tokens["all_wrong"] == virtual[name].wasted_tokens["all_wrong"]
    assert all(outcome.groups == 4 for outcome in real.values())
    assert all(outcome.seconds > 0 for outcome in real.values())
