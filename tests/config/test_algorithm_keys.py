"""Losses, advantages and corrections in a config: what goes together, and what is refused with reason and remedy."""

import pytest

from dapo.config import load_recipe
from dapo.errors import ConfigError
from dapo.planning.plan import parts_of


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
        (
            ["checkpoint.keep_best=true", "eval.every_steps=0"],
            ["checkpoint.keep_best: has no effect here", "eval.every_steps above 0"],
        ),
        (["preset=grpo", "sampling.refill=false"], ["sampling.refill: has no effect here", "sampling.dynamic = true"]),
        (
            ["preset=scalerl", "sampling.fill_policy=error"],
            ["sampling.fill_policy: has no effect here", "sampling.refill = true"],
        ),
        (
            ["preset=dapo-fast", "sampling.refill=false"],
            ["sampling.carry_over = true: it keeps what a step had more than it needed", "sampling.refill = true"],
        ),
        (
            ["algorithm.correction.cap=5.0", "algorithm.correction.floor=5.0"],
            ["algorithm.correction.floor = 5.0: it must be below algorithm.correction.cap = 5", "0.5 and 5"],
        ),
        (["algorithm.correction.kind=mask"], ["algorithm.correction.kind: has no effect here", "correction.cap"]),
        (["algorithm.correction.level=row"], ['algorithm.correction.level = "row": must be one of', "'geometric'"]),
        (
            ["algorithm.old_logp=bypass", "algorithm.correction.cap=2.0", "rollout.engine=vllm"],
            ["algorithm.correction.cap = 2.0:", "nothing to correct", 'algorithm.correction.cap = "none"'],
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


@pytest.mark.parametrize(
    ("overrides", "cap"),
    [
        ([], None),
        (["rollout.engine=vllm"], 2.0),
        (["rollout.engine=vllm", "algorithm.correction.cap=none"], None),
        (["rollout.engine=vllm", "algorithm.correction.cap=3.0"], 3.0),
        (["rollout.engine=vllm", "algorithm.old_logp=bypass"], None),
        (["rollout.engine=vllm", "preset=dapo-fast"], 2.0),
    ],
)
def test_with_vllm_a_correction_is_on_unless_the_key_is_set(overrides: list[str], cap: float | None):
    resolved = load_recipe("quickstart", overrides)
    assert resolved.config.algorithm.correction.cap == cap
    said = dict(parts_of(resolved.config))["importance correction"]
    assert ("vLLM" in said) == (cap is not None)
    if overrides == ["rollout.engine=vllm"]:
        assert resolved.origin["algorithm.correction.cap"] == "rollout.engine"
        assert "min(ρ, 2)" in said


def test_explain_says_what_a_preset_has_of_clip_and_sampling():
    scalerl, rloo = (
        dict(parts_of(load_recipe("quickstart", [f"preset={name}"]).config)) for name in ("scalerl", "rloo")
    )
    assert scalerl["clip"] == "weights of at most 5, no lower bound"
    assert scalerl["dynamic sampling"] == "on, without refilling: of 32 prompts per step the mixed groups"
    assert scalerl["advantage"] == "group of 8, std sample over the step's responses"
    assert (rloo["clip"], rloo["advantage"]) == (
        "none: the loss has no ratio",
        "leave-one-out in a group of 8, std none",
    )


def test_a_mask_is_said_with_its_bounds():
    keys = [f"algorithm.correction.{key}" for key in ("cap=5.0", "floor=0.5", "kind=mask", "level=geometric")]
    said = dict(parts_of(load_recipe("quickstart", keys).config))["importance correction"]
    assert said.startswith("Πρ^(1/|o|) of a response inside [0.5, 5], else 0")
