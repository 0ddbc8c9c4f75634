"""Losses, advantages and corrections in a config: what goes together, and what is refused with reason and remedy."""

import pytest

from dapo.config import load_recipe
from dapo.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.loss=huber"], ['algorithm.loss = "huber": must be one of', "'cispo'"]),
        (["algorithm.clip.low=none"], ["algorithm.clip.low = none: only the weight of algorithm.loss = cispo"]),
        (
            ["preset=ppo", "algorithm.loss=gspo"],
            ["algorithm.loss = gspo: it has one ratio for a response", 'algorithm.loss = "gspo-token"'],
        ),
        (
            ["preset=cispo", "algorithm.clip.dual=10.0"],
            ["algorithm.clip.dual: has no effect here", 'algorithm.loss = "clip"'],
        ),
        (
            ["algorithm.group.baseline=leave_one_out"],
            ["algorithm.group.std_over = group:", "leave_one_out", 'algorithm.group.std = "none"'],
        ),
        (
            ["algorithm.group.std_over=tokens", "algorithm.group.std=population"],
            ["algorithm.group.std = population:", "sample variance"],
        ),
        (
            ["preset=dr-grpo", "algorithm.group.std_over=batch"],
            ["algorithm.group.std_over: has no effect here", 'algorithm.group.std = "sample"'],
        ),
        (
            ["algorithm.group.std_over=batch", "rewards.aggregation=normalize_then_sum"],
            ["rewards.aggregation = normalize_then_sum: it has its own two normalizations", "std_over"],
        ),
        (["algorithm.entropy_coefficient=-0.1"], ["algorithm.entropy_coefficient = -0.1: must be at least 0"]),
        (["preset=grpo", "sampling.refill=false"], ["sampling.refill: has no effect here", "sampling.dynamic = true"]),
        (
            ["preset=scalerl", "sampling.fill_policy=error"],
            ["sampling.fill_policy: has no effect here", "sampling.refill = true"],
        ),
        (
            ["preset=dapo-fast", "sampling.refill=false"],
            ["sampling.carry_over = true: it keeps what a step had more than it needed", "sampling.refill = true"],
        ),
    ],
)
def test_bad_combinations_name_key_value_reason_and_remedy(overrides: list[str], said: list[str]):
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", overrides)
    for part in said:
        assert part in str(caught.value)


def test_a_baseline_over_the_step_takes_groups_of_one():
    config = load_recipe("quickstart", ["preset=reinforce++", "sampling.responses_per_prompt=1"]).config
    assert config.algorithm.group.baseline == "batch"


def test_without_refilling_a_step_tries_its_own_prompts_and_no_more():
    config = load_recipe("quickstart", ["preset=scalerl"]).config
    assert config.max_prompts_tried_per_step == config.sampling.prompts_per_step
