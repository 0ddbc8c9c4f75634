"""The arms are config diffs: the last rung is DAPO, each rung changes one switch, every arm runs on every recipe."""

from itertools import pairwise
from pathlib import Path

import pytest

from dapo.ablation.arms import ARMS, LADDER, arm_config, choose_arms
from dapo.ablation.published import PAPER, REPRODUCTION, VAPO, published
from dapo.cli.ladder import SMOKE
from dapo.config import load_recipe
from dapo.config.load import find_recipe, flatten, recipe_names
from dapo.config.schema import Config
from dapo.errors import ConfigError

# What an algorithm consists of; sizes, model and data are the recipe's.
ALGORITHM = ("algorithm.", "shaping.", "sampling.", "rewards.", "train.epochs_per_step", "train.warmup_steps")


def algorithm(config: Config) -> dict[str, object]:
    return {key: value for key, value in flatten(config.model_dump()).items() if key.startswith(ALGORITHM)}


def differing(one: Config, other: Config) -> set[str]:
    a, b = algorithm(one), algorithm(other)
    return {key for key in a if a[key] != b[key]}


@pytest.mark.parametrize("recipe", ["ladder", "quickstart", "gsm8k-1.5b-24gb"])
def test_the_last_arm_of_the_ladder_is_dapo_and_the_first_naive_grpo(recipe: str):
    configs = [arm_config(recipe, arm)[0] for arm in LADDER]
    assert not differing(configs[-1], load_recipe(recipe, ["preset=dapo"]).config)
    assert not differing(configs[0], load_recipe(recipe, ["preset=grpo-naive"]).config)


def test_each_arm_of_the_ladder_changes_one_switch_in_the_papers_order():
    configs = [arm_config("ladder", arm)[0] for arm in LADDER]
    changed = [differing(one, other) for one, other in pairwise(configs)]
    assert changed == [
        {"shaping.overlong_filter"},
        {"algorithm.clip.high"},
        {"shaping.overlong_penalty"},
        {"algorithm.loss_aggregation"},
        {"sampling.dynamic"},
    ]


def test_a_recipe_with_switches_of_its_own_does_not_change_the_ladder():
    own = load_recipe("dapo-qwen2.5-32b").config
    assert own.shaping.overlong_filter is False  # the released script has none
    configs = [arm_config("dapo-qwen2.5-32b", arm)[0] for arm in LADDER]
    assert [config.shaping.overlong_filter for config in configs] == [False, True, True, True, True, True]


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_arm_resolves_on_every_recipe(recipe: str):
    for arm in ARMS.values():
        assert arm_config(recipe, arm, ["train.seed=7"])[0].train.seed == 7


def test_every_arm_resolves_in_a_smoke_test_and_scalerl_rests_where_its_groups_can():
    for arm in ARMS.values():
        assert arm_config("ladder", arm, list(SMOKE))[0].train.steps == 2
    assert arm_config("ladder", ARMS["scalerl"], list(SMOKE))[0].sampling.retire_above == 0.87
    assert arm_config("ladder", ARMS["scalerl"], [])[0].sampling.retire_above == 0.9


def test_what_vapo_loses_is_one_piece_each():
    whole = arm_config("ladder", ARMS["vapo"])[0]
    lost = {
        name: differing(whole, arm_config("ladder", ARMS[name])[0])
        for name in ARMS
        if name.startswith("vapo-no-") and name != "vapo-no-groups"
    }
    assert lost == {
        "vapo-no-pretraining": {"algorithm.critic.pretrain_responses"},
        "vapo-no-decoupled": {"algorithm.gae.lam_critic"},
        "vapo-no-adaptive": {"algorithm.gae.length_adaptive_alpha"},
        "vapo-no-clip-higher": {"algorithm.clip.high"},
        "vapo-no-token-loss": {"algorithm.loss_aggregation"},
        "vapo-no-positive": {"algorithm.positive_nll"},
    }
    alone = arm_config("ladder", ARMS["vapo-no-groups"])[0]
    assert alone.sampling.responses_per_prompt == 1
    assert alone.responses_per_step == whole.responses_per_step


def test_ppo_gets_no_piece_of_vapo_and_as_many_updates_as_the_others():
    ppo, naive = (arm_config("ladder", ARMS[name])[0] for name in ("ppo", "naive"))
    assert ppo.algorithm.gae.length_adaptive_alpha is None
    assert ppo.updates_per_step == naive.updates_per_step


def test_rloo_has_one_update_per_step_whatever_the_recipe_says(tmp_path: Path):
    """Its loss has no ratio that could correct for an older policy."""
    recipe = tmp_path / "several.toml"
    recipe.write_text(find_recipe("quickstart").read_text().replace("[train]\n", "[train]\nepochs_per_step = 3\n"))
    assert arm_config(str(recipe), ARMS["naive"])[0].train.epochs_per_step == 3
    assert arm_config(str(recipe), ARMS["rloo"])[0].updates_per_step == 1


def test_the_controls_are_controls():
    shuffled, zero = (arm_config("ladder", ARMS[name])[0] for name in ("dapo-shuffled", "vapo-zero-critic"))
    assert shuffled.rewards.control == "shuffled"
    assert differing(shuffled, arm_config("ladder", ARMS["dapo"])[0]) == {"rewards.control"}
    assert (zero.algorithm.critic.lr, zero.algorithm.critic.pretrain_responses) == (0.0, 0)  # its head starts at zero


def test_arms_by_name_come_in_the_order_of_the_table():
    assert [arm.name for arm in choose_arms("dapo, naive")] == ["naive", "dapo"]
    assert choose_arms("ladder") == LADDER
    assert {arm.name for arm in choose_arms("all")} == set(ARMS)
    for text, said in (("dappo", "dappo: no such arm"), (",", "names no arm")):
        with pytest.raises(ConfigError, match=said):
            choose_arms(text)


def test_every_arm_is_compared_with_one_that_exists_and_comes_before_it():
    names = list(ARMS)
    for at, arm in enumerate(ARMS.values()):
        assert arm.compared_with is None or arm.compared_with in names[:at]


def test_the_papers_figures_stand_beside_the_arms_they_belong_to():
    assert [PAPER[arm.name] for arm in LADDER] == [30, 36, 38, 41, 42, 50]
    assert [REPRODUCTION[name] for name in ("soft-penalty", "token-loss", "dapo")] == [44, 50, 52]
    assert set(VAPO) <= set(ARMS)
    assert published("dapo") == {"paper": 50, "reproduction": 52}
