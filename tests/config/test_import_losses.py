"""Losses, advantages and corrections of TRL, verl and OpenRLHF by their names, as our keys."""

from pathlib import Path

import pytest

from dapo.config import load_recipe
from dapo.config.load import flatten
from dapo.errors import ConfigError
from dapo.peers.translate import recipe_text, translate

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


def keys_of(folder: Path, peer: str, *settings: str) -> dict[str, object]:
    """The recipe of a small config with these settings, as our loader reads it."""
    match peer:
        case "TRL":
            text = "model_name_or_path: org/m\ndataset_name: org/d\nnum_generations: 8\nmax_steps: 10\n" + "\n".join(
                settings
            )
            path = folder / "a.yaml"
        case "verl":
            base = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=org/m", "algorithm.adv_estimator=grpo"]
            sizes = ["actor_rollout_ref.rollout.n=8", "trainer.total_training_steps=10", "trainer.n_gpus_per_node=1"]
            text, path = "\n".join([*base, *sizes, *settings]), folder / "overrides.txt"
        case _:
            flags = "--pretrain org/m --prompt_data org/d --n_samples_per_prompt 8 --train_batch_size 8"
            base = f"openrlhf.cli.train_ppo_ray {flags} --init_kl_coef 0 --advantage_estimator group_norm "
            text, path = base + " ".join(settings), folder / "a.sh"
    path.write_text(text)
    out = translate(path, peer=peer.lower(), rows=100_000)
    recipe = folder / "imported.toml"
    recipe.write_text(recipe_text(out, "a file"))
    return flatten(load_recipe(str(recipe)).config.model_dump(mode="json"))


def having(keys: dict[str, object], **wanted: object) -> bool:
    return {name: keys[f"algorithm.{name.replace('__', '.')}"] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("peer", "settings", "preset", "wanted"),
    [
        # TRL's ε_high is the largest weight: ours is 1 + ε_high
        (
            "TRL",
            ["loss_type: cispo", "epsilon_high: 5.0"],
            "cispo",
            {"loss": "cispo", "clip__low": None, "clip__high": 4.0, "clip__dual": None, "loss_aggregation": "token"},
        ),
        (
            "TRL",
            ["loss_type: grpo", "importance_sampling_level: sequence", "epsilon: 3e-4", "epsilon_high: 4e-4"],
            "gspo",
            {"loss": "gspo", "clip__low": 3e-4, "clip__high": 4e-4, "loss_aggregation": "sequence"},
        ),
        ("TRL", ["importance_sampling_level: sequence_token"], "grpo-naive", {"loss": "gspo-token"}),
        ("TRL", ["scale_rewards: batch"], "grpo-naive", {"group__std_over": "batch_rewards", "group__eps": 1e-4}),
        ("TRL", ["entropy_coef: 0.01"], "grpo-naive", {"entropy_coefficient": 0.01}),
        (
            "TRL",
            ["use_vllm: true", "vllm_importance_sampling_mode: token_truncate"],
            "grpo-naive",
            {"correction__cap": 3.0, "correction__kind": "truncate", "correction__level": "token"},
        ),
        (
            "TRL",
            [
                "use_vllm: true",
                "vllm_importance_sampling_mode: sequence_mask",
                "vllm_importance_sampling_clip_min: 0.5",
            ],
            "grpo-naive",
            {
                "correction__cap": 3.0,
                "correction__floor": 0.5,
                "correction__kind": "mask",
                "correction__level": "sequence",
            },
        ),
        (
            "verl",
            [f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=10", f"{ACTOR}.clip_ratio_high=0.2"],
            "cispo",
            {"loss": "cispo", "clip__low": None, "clip__high": 0.2, "clip__dual": None},
        ),
        (
            "verl",
            [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4"],
            "gspo",
            {"loss": "gspo", "clip__low": 3e-4, "loss_aggregation": "sequence", "clip__dual": None},
        ),
        ("verl", [f"{ACTOR}.policy_loss.loss_mode=gspo", "algorithm.adv_estimator=gae"], "ppo", {"loss": "gspo-token"}),
        (
            "verl",
            ["algorithm.adv_estimator=rloo"],
            "dr-grpo",
            {"group__baseline": "leave_one_out", "group__std": "none"},
        ),
        (
            "verl",
            ["algorithm.adv_estimator=reinforce_plus_plus"],
            "reinforce++",
            {"group__baseline": "batch", "group__std_over": "tokens"},
        ),
        (
            "verl",
            ["algorithm.adv_estimator=reinforce_plus_plus_baseline"],
            "grpo-naive",
            {"group__baseline": "group", "group__std_over": "tokens"},
        ),
        ("verl", [f"{ACTOR}.entropy_coeff=0.001"], "grpo-naive", {"entropy_coefficient": 0.001}),
        (
            "verl",
            [f"{CORRECTION}.rollout_is=sequence"],
            "grpo-naive",
            {"correction__cap": 2.0, "correction__level": "sequence"},
        ),
        (
            "verl",
            [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5.0"],
            "grpo-naive",
            {"correction__cap": 5.0, "correction__floor": 0.5, "correction__kind": "mask"},
        ),
        ("OpenRLHF", ["--policy_loss_type gspo"], "gspo", {"loss": "gspo", "loss_aggregation": "sequence"}),
        (
            "OpenRLHF",
            ["--advantage_estimator rloo"],
            "dr-grpo",
            {"group__baseline": "leave_one_out", "group__std": "none"},
        ),
        (
            "OpenRLHF",
            ["--advantage_estimator reinforce"],
            "reinforce++",
            {"group__baseline": "batch", "group__std_over": "tokens"},
        ),
        (
            "OpenRLHF",
            ["--advantage_estimator reinforce", "--no_advantage_std_norm"],
            "reinforce++",
            {"group__baseline": "batch", "group__std": "none"},
        ),
        ("OpenRLHF", ["--advantage_estimator reinforce_baseline"], "grpo-naive", {"group__std_over": "tokens"}),
        ("OpenRLHF", ["--entropy_loss_coef 0.01"], "grpo-naive", {"entropy_coefficient": 0.01}),
        (
            "OpenRLHF",
            ["--algo.advantage.is_correction_level geo", "--algo.advantage.is_correction_threshold 0.99 1.01"],
            "grpo-naive",
            {
                "correction__cap": 1.01,
                "correction__floor": 0.99,
                "correction__kind": "mask",
                "correction__level": "geometric",
            },
        ),
        (
            "OpenRLHF",
            ["--enable_vllm_is_correction", "--vllm_is_truncated_threshold 2.0"],
            "grpo-naive",
            {"correction__cap": 2.0, "correction__floor": None, "correction__kind": "truncate"},
        ),
        (
            "OpenRLHF",
            ["--algo.advantage.is_correction_level seq", "--algo.advantage.is_correction_threshold 0 2"],
            "grpo-naive",
            {"correction__cap": 2.0, "correction__floor": None, "correction__level": "sequence"},
        ),
        (  # 1 - 1: no lower bound
            "verl",
            [f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=1.0"],
            "cispo",
            {"loss": "cispo", "clip__low": None},
        ),
        (
            "OpenRLHF",
            ["--algo.advantage.is_correction_enable"],
            "grpo-naive",
            {"correction__cap": 5.0, "correction__floor": 0.5, "correction__kind": "truncate"},
        ),
        (
            "OpenRLHF",
            ["--algo.advantage.is_correction_enable", "--algo.advantage.is_correction_type icepop"],
            "grpo-naive",
            {"correction__cap": 5.0, "correction__floor": 0.5, "correction__kind": "mask"},
        ),
        (
            "OpenRLHF",
            ["--enable_vllm_is_correction", "--vllm_is_correction_type icepop"],
            "grpo-naive",
            {"correction__cap": 5.0, "correction__kind": "mask", "correction__level": "token"},
        ),
        ("OpenRLHF", ["--enable_vllm_is_correction", "--use_icepop"], "grpo-naive", {"correction__kind": "mask"}),
        ("OpenRLHF", ["--algo.advantage.is_correction_type icepop"], "grpo-naive", {"correction__cap": None}),
        (  # neither of our kinds
            "OpenRLHF",
            ["--algo.advantage.is_correction_enable", "--algo.advantage.is_correction_type seq-mask-tis"],
            "grpo-naive",
            {"correction__cap": None},
        ),
    ],
)
def test_a_peers_name_is_our_key(
    tmp_path: Path, peer: str, settings: list[str], preset: str, wanted: dict[str, object]
):
    keys = keys_of(tmp_path, peer, *settings)
    assert keys["preset"] == preset
    assert having(keys, **wanted), {name: keys[f"algorithm.{name.replace('__', '.')}"] for name in wanted}


@pytest.mark.parametrize(
    ("peer", "settings", "said"),
    [
        ("TRL", ["loss_type: cispo"], "it is the largest weight, min(r, 0.2)"),
        (
            "TRL",
            ["loss_type: cispo", "epsilon_high: 5.0", "importance_sampling_level: sequence"],
            "a weight for every token",
        ),
        ("TRL", ["use_vllm: true", "vllm_importance_sampling_mode: row_mask"], "no such correction here"),
        ("verl", [f"{ACTOR}.policy_loss.loss_mode=clip_cov"], "no such policy loss here"),
        ("verl", [f"{CORRECTION}.rollout_is_threshold=low_high"], "must be a number"),
        ("OpenRLHF", ["--policy_loss_type huber"], "no such policy loss here"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_its_line(tmp_path: Path, peer: str, settings: list[str], said: str):
    with pytest.raises(ConfigError) as caught:
        keys_of(tmp_path, peer, *settings)
    assert said in str(caught.value)
    assert "line" in str(caught.value)
