"""Configs of verl, TRL and OpenRLHF as recipes: what they come to, what is said of the rest, and that nothing runs."""

import contextlib
import json
import os
import textwrap
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import command_line
from dapo.config import load_recipe
from dapo.config.keys import known_keys
from dapo.config.load import flatten
from dapo.errors import ConfigError
from dapo.peers.common import OWNERS
from dapo.peers.settings import Translation
from dapo.peers.shell import arithmetic, commands_of
from dapo.peers.translate import check, recipe_text, translate

FILES = Path(__file__).parent / "peers_files"
OPENRLHF = "openrlhf.cli.train_ppo_ray --advantage_estimator group_norm --n_samples_per_prompt 8 --train_batch_size 8 "
VERL = "x algorithm.adv_estimator=grpo actor_rollout_ref.actor.ppo_mini_batch_size=1 "


def dapo(*arguments: str | Path) -> command_line.Answer:
    return command_line.dapo("import-config", *map(str, arguments))


def loaded(out: Translation, folder: Path) -> dict[str, object]:
    """The recipe written, read back by the loader that every verb uses, and flattened."""
    path = folder / "imported.toml"
    path.write_text(recipe_text(out, "a file"))
    return flatten(load_recipe(str(path)).config.model_dump(mode="json"))


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def verl(folder: Path, *overrides: str) -> Translation:
    base = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=org/m", "algorithm.adv_estimator=grpo"]
    sizes = ["actor_rollout_ref.rollout.n=8", "trainer.total_training_steps=10", "trainer.n_gpus_per_node=1"]
    return translate(write(folder, "overrides.txt", "\n".join([*base, *sizes, *overrides])), peer="verl")


def said(remarks: list, key: str) -> str:
    return next(remark.why for remark in remarks if key in remark.setting)


# ------------------------------------------------------------------ verl


def test_several_training_files_become_a_table_of_sources(tmp_path: Path):
    files = "data.train_files=['a/train.parquet','b/train.parquet','x/gsm8k/train.parquet','a/train.parquet']"
    out = verl(tmp_path, files)
    keys = loaded(out, tmp_path)
    found = {key: value for key, value in keys.items() if key.startswith("data.train.") and key.endswith(".path")}
    assert found == {
        "data.train.train.path": "a/train.parquet",
        "data.train.train-2.path": "b/train.parquet",
        "data.train.gsm8k.path": "gsm8k",
    }
    assert "each source has a weight" in said([r for r in out.differs if "weight" in r.why], "train_files")


@pytest.mark.parametrize(("probs", "weights"), [("0.3,0.7", [0.3, 0.7]), ("0.3", [1.0, 1.0]), ("0,1", [1.0, 1.0])])
def test_probabilities_of_several_sets_become_weights_where_each_has_one(
    tmp_path: Path, probs: str, weights: list[float]
):
    flags = "--pretrain org/m --prompt_data org/d,e.jsonl --n_samples_per_prompt 8 --train_batch_size 8"
    script = f"python3 -m openrlhf.cli.train_ppo_ray {flags} --num_episodes 1 --prompt_data_probs {probs}"
    out = translate(write(tmp_path, "run.sh", script), rows=100)
    keys = loaded(out, tmp_path)
    assert [keys["data.train.d.weight"], keys["data.train.e.weight"]] == weights
    assert any("each source has a weight" in remark.why for remark in out.differs) == (weights == [1.0, 1.0])


def test_the_released_script_gives_our_recipe_of_it(tmp_path: Path):
    ours = flatten(load_recipe("dapo-qwen2.5-32b").config.model_dump(mode="json"))
    imported = loaded(translate(FILES / "dapo_32b.sh"), tmp_path)
    different = {key for key in ours if imported[key] != ours[key]}
    assert different == {"tracking.to", "tracking.project"}  # the script logs to wandb; our recipe leaves that open
    assert (imported["tracking.to"], imported["tracking.project"]) == (["wandb"], "DAPO")


def test_what_has_no_counterpart_or_means_something_else_is_named_with_its_line():
    out = translate(FILES / "dapo_32b.sh")
    lines = (FILES / "dapo_32b.sh").read_text().splitlines()
    for key in ("ulysses_sequence_parallel_size", "gpu_memory_utilization", "data.truncation", "param_offload"):
        remark = next(remark for remark in out.missing if key in remark.setting)
        line = int(remark.setting.rpartition("(line ")[2].rstrip(")"))
        assert key in lines[line - 1]
    for key in ("ppo_mini_batch_size", "gen_batch_size", "max_num_gen_batches", "total_epochs"):
        assert said(out.differs, key)
    assert not [remark for remark in out.missing if "not known" in remark.why]


def test_mini_batches_are_prompts_per_update(tmp_path: Path):
    out = verl(tmp_path, "data.train_batch_size=96", "actor_rollout_ref.actor.ppo_mini_batch_size=24")
    assert out.keys["train.updates_per_step"] == 96 // 24


def test_verl_reads_the_two_clips_and_so_do_we(tmp_path: Path):
    out = verl(tmp_path, "actor_rollout_ref.actor.clip_ratio=0.3", "actor_rollout_ref.actor.ppo_mini_batch_size=128")
    assert (out.keys["algorithm.clip.low"], out.keys["algorithm.clip.high"]) == (0.2, 0.2)
    assert "clip_ratio_low" in said(out.differs, "clip_ratio")


def test_an_unknown_key_is_listed_not_lost(tmp_path: Path):
    out = verl(tmp_path, "actor_rollout_ref.actor.brand_new_knob=7", "data.train_batch_size=256")
    assert "not known" in said(out.missing, "brand_new_knob")


def test_a_cut_distribution_is_left_out_and_said(tmp_path: Path):
    out = verl(tmp_path, "actor_rollout_ref.rollout.top_p=0.9", "data.train_batch_size=256")
    assert loaded(out, tmp_path)["sampling.top_p"] == 1.0
    assert "whole distribution" in said(out.missing, "top_p")


def test_kl_in_the_loss_and_in_the_reward(tmp_path: Path):
    size = "data.train_batch_size=256"
    in_loss = verl(
        tmp_path, size, "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.01"
    )
    assert (in_loss.keys["algorithm.kl.coefficient"], in_loss.keys["algorithm.kl.kind"]) == (0.01, "k3")
    assert in_loss.keys["preset"] == "grpo"
    in_reward = verl(tmp_path, size, "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.01")
    assert in_reward.keys["algorithm.kl.coefficient"] == 0.0
    assert "advantage per token" in said(in_reward.missing, "use_kl_in_reward")


def test_each_place_of_the_kl_has_a_coefficient_of_its_own(tmp_path: Path):
    both = ("actor_rollout_ref.actor.kl_loss_coef=0.02", "algorithm.kl_ctrl.kl_coef=0.03", "data.train_batch_size=256")
    for place, switch, coefficient, kind in (
        ("loss", "actor_rollout_ref.actor.use_kl_loss=True", 0.02, "k3"),
        ("reward", "algorithm.use_kl_in_reward=True", 0.03, "k1"),
    ):
        keys = loaded(verl(tmp_path, "algorithm.adv_estimator=gae", switch, *both), tmp_path)
        found = [keys[f"algorithm.kl.{name}"] for name in ("place", "coefficient", "kind")]
        assert found == [place, coefficient, kind]


def test_ppo_keeps_its_critic(tmp_path: Path):
    extra = ("algorithm.adv_estimator=gae", "critic.optim.lr=2e-6", "algorithm.lam=0.95", "trainer.critic_warmup=50")
    extra += ("actor_rollout_ref.rollout.n=4",)
    keys = loaded(verl(tmp_path, "data.train_batch_size=256", *extra), tmp_path)
    assert keys["preset"] == "ppo"
    assert (keys["algorithm.critic.lr"], keys["algorithm.gae.lam"], keys["algorithm.critic.pretrain_responses"]) == (
        2e-6,
        0.95,
        50 * 256 * 4,
    )


def test_yaml_is_the_same_as_overrides(tmp_path: Path):
    text = (
        "data:\n  train_files: a.parquet\n  train_batch_size: 256\n  max_response_length: 4096\n"
        "actor_rollout_ref:\n  model: {path: org/m}\n  actor:\n    optim:\n      lr: 1e-6\n    clip_ratio_high: 0.28\n"
        "  rollout: {n: 8}\nalgorithm: {adv_estimator: grpo}\n"
        "trainer: {total_training_steps: 10, n_gpus_per_node: 1, logger: [console, tensorboard]}\n"
    )
    keys = loaded(translate(write(tmp_path, "verl.yaml", text)), tmp_path)
    assert (keys["train.lr"], keys["algorithm.clip.high"], keys["tracking.to"]) == (1e-6, 0.28, ["tensorboard"])


def test_epochs_become_steps_where_the_rows_are_known(tmp_path: Path):
    path = write(
        tmp_path,
        "script.sh",
        "python3 -m verl.trainer.main_ppo data.train_files=mine.parquet data.train_batch_size=256 \\\n"
        "  algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 trainer.total_epochs=3 trainer.n_gpus_per_node=1",
    )
    assert translate(path, rows=2700).keys["train.steps"] == 3 * (2700 // 256)  # what is left of a pass is dropped
    assert "--rows" in said(translate(path).differs, "total_epochs")


def test_evaluation_is_greedy_unless_it_samples(tmp_path: Path):
    home = "actor_rollout_ref.rollout.val_kwargs"
    base = ("data.train_batch_size=256", "data.val_files=b.parquet", "trainer.test_freq=5", f"{home}.temperature=0.7")
    for extra, expected in (((), 0.0), ((f"{home}.do_sample=False",), 0.0), ((f"{home}.do_sample=True",), 0.7)):
        out = verl(tmp_path, *base, *extra)
        assert loaded(out, tmp_path)["eval.temperature"] == expected
        assert any("greedily" in remark.why for remark in out.differs) is (expected == 0.0)


def test_words_without_a_counterpart_are_refused_not_replaced(tmp_path: Path):
    actor = "actor_rollout_ref.actor"
    loss = ("data.train_batch_size=256", f"{actor}.use_kl_loss=True")
    assert verl(tmp_path, *loss, f"{actor}.kl_loss_type=k2+").keys["algorithm.kl.kind"] == "k2"
    with pytest.raises(ConfigError, match=r"kl_loss_type = full: no such estimator") as caught:
        verl(tmp_path, *loss, f"{actor}.kl_loss_type=full")
    assert "low_var_kl" in caught.value.remedy
    path = write(tmp_path, "o.sh", f"{OPENRLHF} --rollout_batch_size 8 --loss_agg_mode median")
    with pytest.raises(ConfigError, match="loss_agg_mode = median: no such mean of the loss"):
        translate(path)


# ------------------------------------------------------------------ TRL


def test_a_grpo_config_in_python(tmp_path: Path):
    gpus = 4
    out = translate(FILES / "grpo.py", gpus=gpus)
    keys = loaded(out, tmp_path)
    passes, accumulated, generations, iterations = 8, 2, 8, 2
    assert keys["sampling.prompts_per_step"] == 16 * gpus * passes // generations
    assert keys["train.updates_per_step"] == passes // accumulated
    assert keys["train.epochs_per_step"] == iterations
    assert keys["train.steps"] == 320 // (passes // accumulated * iterations)
    assert keys["train.warmup_steps"] == 16 // (passes // accumulated * iterations)
    assert keys["algorithm.loss_aggregation"] == "sequence"
    assert (keys["algorithm.clip.low"], keys["algorithm.clip.high"], keys["algorithm.clip.dual"]) == (0.2, 0.28, None)
    assert (keys["algorithm.kl.coefficient"], keys["algorithm.kl.kind"]) == (0.04, "k3")
    assert keys["algorithm.group.eps"] == 1e-4
    assert (keys["shaping.overlong_penalty"], keys["shaping.overlong_buffer_tokens"]) == (1.0, 256)
    assert keys["shaping.overlong_filter"] is True
    assert (keys["model.path"], keys["model.lora.rank"], keys["model.lora.alpha"]) == (
        "Qwen/Qwen2.5-0.5B-Instruct",
        32,
        64.0,
    )
    assert keys["data.train"] == "gsm8k"
    assert (keys["cluster.backend"], keys["cluster.gpus"]) == ("torchrun", gpus)
    assert keys["sampling.dynamic"] is False
    assert "per device" in said(out.differs, "per_device_train_batch_size")
    assert keys["train.lr_decay"] == "cosine"
    assert "whole distribution" in said(out.missing, "top_p")


def lora_of(out: Translation, folder: Path) -> dict[str, object]:
    keys = loaded(out, folder)
    return {key.removeprefix("model.lora."): keys[key] for key in out.keys if key.startswith("model.lora.")}


@pytest.mark.parametrize(
    ("calls", "ours"),
    [
        ("LoraConfig(r=4)", {"rank": 4, "alpha": 8.0}),  # peft's default
        ("LoraConfig(lora_dropout=0.1)", {"rank": 8, "alpha": 8.0, "dropout": 0.1}),
        (
            "LoraConfig(r=4, lora_alpha=64, use_rslora=True, target_modules=['q_proj', 'v_proj'])",
            {"rank": 4, "alpha": 64.0, "rank_stabilized": True, "target_modules": ["q_proj", "v_proj"]},
        ),
        ("LoraConfig(r=4, target_modules='all-linear')", {"rank": 4, "alpha": 8.0}),
        (
            "LoraConfig(r=4)\nBitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')",
            {"rank": 4, "alpha": 8.0, "quantization": "nf4"},
        ),
        (
            "LoraConfig(r=4)\nBitsAndBytesConfig(load_in_8bit=True)",
            {"rank": 4, "alpha": 8.0, "quantization": "int8"},
        ),
    ],
)
def test_an_adapter_as_peft_has_it(tmp_path: Path, calls: str, ours: dict[str, object]):
    text = f"GRPOConfig(num_generations=8, max_steps=4)\n{calls}"
    assert lora_of(translate(write(tmp_path, "a.py", text)), tmp_path) == ours


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("lora_r: 4", {"rank": 4, "alpha": 32.0, "dropout": 0.05}),  # TRL's defaults
        ("use_peft: true", {"rank": 16, "alpha": 32.0, "dropout": 0.05}),
        ("use_peft: false\nlora_r: 4\nload_in_4bit: true", {}),
        ("use_peft: true\nlora_dropout: 0\nload_in_4bit: true", {"rank": 16, "alpha": 32.0, "quantization": "nf4"}),
        ("use_peft: true\nlora_dropout: 0\nload_in_8bit: true", {"rank": 16, "alpha": 32.0, "quantization": "int8"}),
        ("use_peft: true\nlora_dropout: 0\nload_in_8bit: false", {"rank": 16, "alpha": 32.0}),
    ],
)
def test_an_adapter_as_trl_has_it(tmp_path: Path, given: str, ours: dict[str, object]):
    out = translate(write(tmp_path, "a.yaml", f"num_generations: 8\nmax_steps: 4\n{given}\n"))
    assert lora_of(out, tmp_path) == ours
    assert not any("not known" in remark.why for remark in out.missing)


def test_what_an_adapter_has_otherwise_is_said(tmp_path: Path):
    def remarks(calls: str) -> tuple[Translation, str]:
        text = f"GRPOConfig(num_generations=8, max_steps=4)\n{calls}"
        out = translate(write(tmp_path, "a.py", text))
        return out, " ".join(f"{remark.setting}: {remark.why}" for remark in [*out.missing, *out.differs])

    four = "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)"
    _, told = remarks(f"LoraConfig(r=4, target_modules='.*proj', lora_dropout=0.1, bias='all')\n{four}")
    for part in (
        "the levels of NF4",
        "largest magnitude of 64",
        "a second time",
        "a pattern",
        "in updates only",
        "lora.bias = all",
    ):
        assert part in told
    _, told = remarks("LoraConfig(r=4)\nBitsAndBytesConfig(load_in_8bit=True)")
    assert "one per row" in told
    assert "often q_proj and v_proj" in told
    out, told = remarks(four)
    assert "model.lora.quantization keeps weights under an adapter" in told
    assert not any(key.startswith("model.lora") for key in out.keys)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(None, "linear"), ("constant_with_warmup", "none"), ("cosine_with_restarts", "cosine"), ("polynomial", "none")],
)
def test_the_shape_of_a_schedule_after_warmup(tmp_path: Path, theirs: str | None, ours: str):
    text = (
        (FILES / "grpo.py")
        .read_text()
        .replace('    lr_scheduler_type="cosine",\n', f'    lr_scheduler_type="{theirs}",\n' if theirs else "")
    )
    out = translate(write(tmp_path, "schedule.py", text), gpus=4)
    assert loaded(out, tmp_path)["train.lr_decay"] == ours
    remarks = [*out.differs, *out.missing]
    assert any("lr_scheduler_type" in r.setting for r in remarks) == (theirs in ("cosine_with_restarts", "polynomial"))


@pytest.mark.parametrize(("reward", "is_said"), [("reward_len", True), ("accuracy_reward", False)])
def test_a_reward_function_that_is_not_carried_over_is_named(tmp_path: Path, reward: str, is_said: bool):
    path = write(tmp_path, "t.yaml", f"model_name_or_path: org/m\nreward_funcs: {reward}\nmax_steps: 10\n")
    out = translate(path, peer="trl")
    assert any(f"{reward} is not carried over" in remark.why for remark in out.missing) is is_said
    works = f'works as it is: rewards.verifier = "MODULE:{reward}"'
    assert any(works in remark.why for remark in out.missing) is is_said


@pytest.mark.parametrize("given", ["", "num_train_epochs: 2\n"])
def test_epochs_are_listed_only_where_they_are_given(tmp_path: Path, given: str):
    path = write(tmp_path, "t.yaml", f"model_name_or_path: org/m\nreward_funcs: accuracy_reward\n{given}")
    out = translate(path, peer="trl", rows=800)
    assert any("num_train_epochs" in remark.setting for remark in out.differs) is bool(given)
    assert "over 800 rows" in out.origin["train.steps"]


def test_what_changes_the_experiment_is_named_first():
    """Rows changed in code, system prompts and reward functions of the user's own; then the rest, by weight."""
    out = translate(FILES / "grpo_rows.py")
    lists = dict(out.lists())
    (first, changing), *_, (last, minor) = lists.items()
    assert "changes the experiment" in first
    assert "without effect" in last
    text = (FILES / "grpo_rows.py").read_text().splitlines()
    for key in ("dataset.map", "dataset.filter", "system_prompt"):
        remark = next(remark for remark in changing if remark.setting.startswith(f"{key} = "))
        line = int(remark.setting.rpartition("(line ")[2].rstrip(")"))
        assert key.rpartition(".")[2] in text[line - 1] or "system" in text[line - 1]
    assert "Think first" in next(remark.setting for remark in changing if "system_prompt" in remark.setting)
    lost = [remark.why for remark in changing if "reward_funcs" in remark.setting]
    assert len(lost) == 1  # the accuracy and the penalty of length have a counterpart
    assert lost[0].startswith("format_reward is not carried over")
    weights = [remark.weight for remark in changing]
    assert weights == sorted(weights)
    assert changing[-1].setting.startswith("repetition_penalty")  # after what the model is asked and rewarded for
    assert {remark.setting.partition(" ")[0] for remark in minor} >= {"output_dir", "logging_steps", "dataset.shuffle"}
    head = recipe_text(out, "a file").splitlines()
    assert head.index("# Not carried over, and it changes the experiment:") < 3


@pytest.mark.parametrize("key", ["system_prompt", "reward_weights"])
def test_yaml_names_them_too(tmp_path: Path, key: str):
    out = translate(write(tmp_path, "a.yaml", f"num_generations: 8\nmax_steps: 4\n{key}: Be brief.\n"))
    assert out.lists()[0][1][0].setting.startswith(f"{key} = Be brief.")


def test_the_aggregation_of_several_rewards_is_carried_over(tmp_path: Path):
    text = "num_generations: 8\nmax_steps: 4\nmulti_objective_aggregation: {}\n"
    out = translate(write(tmp_path, "a.yaml", text.format("normalize_then_sum")))
    assert out.keys["rewards.aggregation"] == "normalize_then_sum"
    with pytest.raises(ConfigError, match=r"multi_objective_aggregation.*no such aggregation here") as refused:
        translate(write(tmp_path, "b.yaml", text.format("product")))
    assert "normalize_then_sum" in refused.value.remedy


def test_only_what_was_set_is_listed(tmp_path: Path):
    """TRL's defaults stay silent; what a recipe cannot do without is asked for."""
    out = translate(write(tmp_path, "a.py", 'GRPOTrainer("org/m", accuracy_reward, args=GRPOConfig(max_steps=4))'))
    assert not out.missing
    assert {remark.setting.partition(" ")[0] for remark in out.differs} == {"train_dataset", "trainer.reward_funcs"}
    for vllm in ("", 'vllm_importance_sampling_mode="sequence_mask"'):
        text = f'GRPOTrainer("org/m", accuracy_reward, args=GRPOConfig(max_steps=4, use_vllm=True, {vllm}))'
        assert len(translate(write(tmp_path, "b.py", text)).missing) == 0


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("load_dataset('a/b', split='train').map(f)", True),
        ("a = load_dataset('a/b')\nb = a['train']\nb = b.select(range(9))\nc = b.map(f)", True),
        ("def rows(data):\n    return data.map(f)", True),
        ("with Pool() as pool:\n    pool.map(f, range(3))", False),
        ("a = a.map(f)", False),
    ],
)
def test_a_map_of_rows_is_told_from_others(tmp_path: Path, code: str, is_found: bool):
    out = translate(write(tmp_path, "a.py", f"{code}\nGRPOConfig(max_steps=4)\n"))
    assert any(remark.setting.startswith("dataset.map = f") for remark in out.missing) is is_found


def test_arithmetic_with_names_in_python(tmp_path: Path):
    code = """
    def train(model):
        longest, prompt = 1024, 256
        seq = 1024
        ask = 256
        args = GRPOConfig(max_steps=8, num_generations=8, max_completion_length=seq - ask, seed=len("x"))
    """
    path = write(tmp_path, "a.py", textwrap.dedent(code).replace('seed=len("x")', "seed=3"))
    assert translate(path).keys["limits.max_response_tokens"] == 1024 - 256
    with pytest.raises(ConfigError, match=r"seed = len\('x'\): must be a number"):
        translate(write(tmp_path, "b.py", textwrap.dedent(code)))


def test_trl_yaml_json_and_command_line_say_the_same(tmp_path: Path):
    settings = {
        "model_name_or_path": "org/m",
        "dataset_name": "org/d",
        "num_generations": 4,
        "max_steps": 10,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
    }
    yaml = "".join(f"{key}: {value}\n" for key, value in settings.items())
    json_text = json.dumps(settings)
    flags = "trl grpo " + " ".join(f"--{key} {value}" for key, value in settings.items())
    files = [("a.yaml", yaml), ("a.json", json_text), ("a.sh", flags)]
    found = [loaded(translate(write(tmp_path, name, text)), tmp_path) for name, text in files]
    assert found[0] == found[1] == found[2]
    assert (found[0]["preset"], found[0]["algorithm.loss_aggregation"], found[0]["algorithm.group.std"]) == (
        "dr-grpo",
        "constant",
        "none",
    )


def test_losses_we_do_not_have_are_refused_with_their_line(tmp_path: Path):
    path = write(tmp_path, "a.yaml", "num_generations: 8\nloss_type: sapo\n")
    with pytest.raises(ConfigError, match=r"a\.yaml, line 2: loss_type = sapo: no such loss"):
        translate(path)


@pytest.mark.parametrize(
    ("given", "setting", "why"),
    [
        ("mask_truncated_completions: true\nloss_type: grpo", "mask_truncated_completions", "TRL divides by all"),
        ("mask_truncated_completions: true\nloss_type: dapo", "mask_truncated_completions", None),
        ("steps_per_generation: 4", "steps_per_generation", "whole groups"),
        ("steps_per_generation: 1", "steps_per_generation", None),
        ("warmup_steps: 3", "warmup_steps", "lr / warmup_steps"),
        ("warmup_steps: 0", "warmup_steps", None),
        ("beta: 0.1", "beta", "at most 10 per token"),
    ],
)
def test_what_trl_defines_otherwise_is_said(tmp_path: Path, given: str, setting: str, why: str | None):
    """Each is shown to be so by `dapo bench parity`."""
    out = translate(write(tmp_path, "a.yaml", f"num_generations: 8\nmax_steps: 40\n{given}\n"))
    found = [remark.why for remark in out.differs if remark.setting.partition(" ")[0] == setting]
    assert (why is None) == (not found)
    assert why is None or why in found[0]


def test_updates_of_several_epochs_are_fewer_steps(tmp_path: Path):
    """Hugging Face counts updates, of which a step of ours has one for each mini-batch and epoch."""
    lines = ("max_steps: 240", "num_iterations: 3", "steps_per_generation: 2", "save_steps: 60", "eval_steps: 30")
    out = translate(write(tmp_path, "a.yaml", "\n".join(["num_generations: 8", *lines, "warmup_steps: 12"])))
    keys = loaded(out, tmp_path)
    found = [keys[key] for key in ("train.updates_per_step", "train.epochs_per_step", "train.steps")]
    assert found == [2, 3, 240 // 6]
    assert (keys["checkpoint.every_steps"], keys["train.warmup_steps"]) == (60 // 6, 12 // 6)
    assert f"eval.every_steps = {30 // 6}" in said(out.missing, "eval_steps")
    more = translate(write(tmp_path, "b.yaml", "\n".join(["num_generations: 8", *lines, "warmup_steps: 13"])))
    assert more.keys["train.warmup_steps"] == 3  # 13 updates end in the third step of 6


def test_steps_below_one_are_a_share_of_all(tmp_path: Path):
    def trl(*lines: str) -> Translation:
        return translate(write(tmp_path, "a.yaml", "\n".join(["num_generations: 8", *lines])))

    out = trl("max_steps: 200", "save_steps: 0.1", "eval_steps: 0.25")
    assert loaded(out, tmp_path)["checkpoint.every_steps"] == 200 // 10
    assert f"eval.every_steps = {200 // 4}" in said(out.missing, "eval_steps")
    assert trl("max_steps: 3", "save_steps: 0.01").keys["checkpoint.every_steps"] == 1
    odd = trl("max_steps: 24", "save_steps: 0.1", "warmup_ratio: 0.1")  # 2.4: rounded up, as in transformers
    assert (odd.keys["checkpoint.every_steps"], odd.keys["train.warmup_steps"]) == (3, 3)
    unknown = trl("save_steps: 0.1")  # passes over rows that nobody counted
    assert "checkpoint.every_steps" not in unknown.keys
    assert "set checkpoint.every_steps" in said(unknown.differs, "save_steps")
    assert loaded(trl("max_steps: 9", "save_strategy: 'no'"), tmp_path)["checkpoint.every_steps"] == 0
    for setting in ("save_strategy: best", "load_best_model_at_end: true", "metric_for_best_model: reward"):
        assert "checkpoint.keep_best" in said(trl("max_steps: 9", setting).missing, setting.split(":")[0])
    with pytest.raises(ConfigError, match=r"save_steps = 10\.5: must be a whole number"):
        trl("max_steps: 9", "save_steps: 10.5")


# ------------------------------------------------------------------ OpenRLHF


def test_an_openrlhf_command_line(tmp_path: Path):
    out = translate(FILES / "openrlhf.sh", rows=1280)
    keys = loaded(out, tmp_path)
    assert (keys["sampling.prompts_per_step"], keys["sampling.responses_per_prompt"]) == (128, 8)
    assert keys["train.updates_per_step"] == 128 * 8 // 256  # it trains on samples, not on prompts
    assert keys["train.steps"] == 2 * 1280 // 128
    assert (keys["algorithm.clip.low"], keys["algorithm.clip.high"]) == (0.2, 0.28)
    assert (keys["algorithm.kl.coefficient"], keys["algorithm.kl.kind"], keys["algorithm.kl.place"]) == (
        1e-3,
        "k3",
        "loss",
    )
    assert (keys["sampling.dynamic"], keys["preset"]) == (True, "dapo")
    assert (keys["shaping.overlong_buffer_tokens"], keys["shaping.overlong_penalty"]) == (1024, 1.0)
    assert (keys["limits.max_prompt_tokens"], keys["limits.max_response_tokens"]) == (1024, 4096)
    assert keys["data.fields"] == {"question": "question", "answer": "answer"}
    assert (keys["cluster.backend"], keys["cluster.gpus"]) == ("ray", 4)
    assert "correct < G" in said(out.differs, "dynamic_filtering_reward_range")
    assert "pkg.mod:function" in said(out.differs, "remote_rm_url")


def test_what_openrlhf_counts_together_or_leaves_out_of_an_evaluation(tmp_path: Path):
    asked = "--max_len 3000 --generate_max_len 2048 --eval_dataset e.jsonl --eval_steps 5 --num_episodes 1"
    batch = "--rollout_batch_size 128 --n_samples_per_prompt 8"
    out = translate(write(tmp_path, "o.sh", f"{OPENRLHF} {batch} {asked}"), rows=128 * 12)
    assert (out.keys["limits.max_prompt_tokens"], out.keys["limits.max_response_tokens"]) == (3000 - 2048, 2048)
    assert [out.keys[f"eval.{key}"] for key in ("every_steps", "k", "temperature", "top_p")] == [5, 4, 0.6, 1.0]
    assert (out.keys["train.steps"], out.keys["train.warmup_steps"]) == (12, 1)  # 0.03 of them is 0.36, rounded up


def test_a_secret_is_not_repeated():
    answer = dapo(FILES / "openrlhf.sh", "--json")
    assert answer.returncode == 0
    assert "0123456789abcdef" not in answer.stdout + answer.stderr


def test_dotted_flags_are_the_same_as_the_older_ones(tmp_path: Path):
    spellings = {
        "pretrain": ("actor.model_name_or_path", "org/m"),
        "prompt_data": ("data.prompt_dataset", "d.jsonl"),
        "rollout_batch_size": ("rollout.batch_size", "64"),
        "n_samples_per_prompt": ("rollout.n_samples_per_prompt", "8"),
        "train_batch_size": ("train.batch_size", "128"),
        "advantage_estimator": ("algo.advantage.estimator", "group_norm"),
        "eps_clip_low_high": ("actor.eps_clip_low_high", "0.2 0.3"),
        "generate_max_len": ("rollout.max_new_tokens", "512"),
    }
    program = "openrlhf.cli.train_ppo_ray "
    old = program + " ".join(f"--{name} {value}" for name, (_, value) in spellings.items())
    new = program + " ".join(f"--{name} {value}" for name, value in spellings.values())
    first, second = (
        loaded(translate(write(tmp_path, name, text)), tmp_path) for name, text in (("o.sh", old), ("n.sh", new))
    )
    assert first == second


def test_steps_in_which_only_the_critic_learns_are_counted_in_responses(tmp_path: Path):
    sizes = "--rollout_batch_size 64 --n_samples_per_prompt 4 --train_batch_size 128 --freezing_actor_steps 10"
    text = f"openrlhf.cli.train_ppo_ray --pretrain org/m --prompt_data d.jsonl {sizes} --critic_learning_rate 2e-6"
    keys = loaded(translate(write(tmp_path, "a.sh", text), rows=6400), tmp_path)
    assert (keys["algorithm.critic.pretrain_responses"], keys["algorithm.critic.lr"]) == (10 * 64 * 4, 2e-6)


# ------------------------------------------------------------------ what a file leaves out

# What all of them have where a file says nothing.
COMMON: dict[str, object] = {
    "algorithm.clip.low": 0.2,
    "algorithm.clip.high": 0.2,
    "algorithm.kl.coefficient": 0.0,
    "algorithm.loss": "clip",
    "algorithm.loss_aggregation": "token",
    "sampling.dynamic": False,
    "sampling.temperature": 1.0,
    "shaping.overlong_filter": False,
    "shaping.overlong_penalty": 0.0,
    "train.epochs_per_step": 1,
    "train.lr": 1e-6,
    "train.max_grad_norm": 1.0,
    "train.weight_decay": 0.0,
}
DEFAULTS: dict[str, tuple[str, dict[str, object]]] = {
    "trl": (
        "max_steps: 1000",
        {
            "algorithm.clip.dual": "none",
            "algorithm.group.eps": 1e-4,
            "algorithm.group.std": "sample",
            "checkpoint.every_steps": 500,
            "limits.max_response_tokens": 512,
            "sampling.responses_per_prompt": 8,
            "train.gradient_checkpointing": True,
            "train.lr_decay": "linear",
            "train.seed": 42,
            "train.warmup_steps": 0,
        },
    ),
    "verl": (
        "trainer.total_training_steps=1000",
        {
            "algorithm.advantage": "gae",
            "algorithm.clip.dual": 3.0,
            "algorithm.critic.lr": 1e-5,
            "algorithm.critic.pretrain_responses": 0,
            "algorithm.critic.value_clip": 0.5,
            "algorithm.gae.gamma": 1.0,
            "algorithm.gae.lam": 1.0,
            "cluster.gpus": 8,
            "limits.max_prompt_tokens": 512,
            "limits.max_response_tokens": 512,
            "sampling.prompts_per_step": 1024,
            "sampling.responses_per_prompt": 1,
            "train.gradient_checkpointing": True,
            "train.lr_decay": "none",
            "train.tokens_per_microbatch": 16384,
            "train.updates_per_step": 1024 // 256,
            "train.warmup_steps": 0,
            "train.weight_decay": 0.01,
        },
    ),
    "openrlhf": (
        "openrlhf.cli.train_ppo_ray --num_episodes 1",
        {
            "algorithm.advantage": "gae",
            "algorithm.clip.dual": "none",
            "algorithm.critic.lr": 9e-6,
            "algorithm.critic.pretrain_responses": 0,
            "algorithm.critic.value_clip": 0.5,
            "algorithm.gae.gamma": 1.0,
            "algorithm.gae.lam": 1.0,
            "algorithm.kl.coefficient": 0.01,
            "algorithm.kl.kind": "k1",
            "algorithm.kl.place": "reward",
            "cluster.gpus": 8,
            "data.chat_template": False,
            "limits.max_response_tokens": 1024,
            "sampling.prompts_per_step": 1024,
            "sampling.responses_per_prompt": 1,
            "train.betas": [0.9, 0.95],
            "train.gradient_checkpointing": False,
            "train.lr_decay": "cosine",
            "train.seed": 42,
            "train.updates_per_step": 1024 // 128,
            "train.warmup_steps": 30,
        },
    ),
}


@pytest.mark.parametrize("peer", DEFAULTS)
def test_what_a_file_leaves_out_is_as_the_peer_has_it(tmp_path: Path, peer: str):
    """Of TRL 1.16, verl 0.9 and OpenRLHF 0.11; what changes there has to change here too."""
    text, own = DEFAULTS[peer]
    out = translate(write(tmp_path, "a.yaml" if peer == "trl" else "a.sh", text), peer=peer, rows=1024 * 1000)
    wanted = COMMON | own
    assert {key: out.keys[key] for key in wanted} == wanted


# ------------------------------------------------------------------ nothing runs; bad input


def test_nothing_in_a_script_is_run(tmp_path: Path):
    trap = tmp_path / "trap"
    script = f"""
lr=$(touch {trap} && echo 1e-6)
x=`touch {trap}`
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.optim.lr=$lr
"""
    with pytest.raises(ConfigError, match="computed by a command, and nothing is run here"):
        translate(write(tmp_path, "evil.sh", script))
    code = f"import os\nos.system('touch {trap}')\nGRPOConfig(num_generations=8, max_steps=4, beta=os.getpid())\n"
    with pytest.raises(ConfigError, match=r"evil\.py, line 3: beta = .*must be a number"):
        translate(write(tmp_path, "evil.py", code))
    assert not trap.exists()


def test_a_variable_that_is_set_nowhere_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LR", "1e-3")  # the environment is not the script
    path = write(
        tmp_path,
        "s.sh",
        "# one\npython3 -m verl.x \\\n  algorithm.adv_estimator=grpo \\\n  actor_rollout_ref.actor.optim.lr=$LR\n",
    )
    with pytest.raises(ConfigError, match=r"s\.sh, line 4: .*LR is set nowhere in the file") as caught:
        translate(path)
    assert "LR=VALUE" in caught.value.remedy


def test_words_of_a_script():
    text = 'a=2; export b="x ${a}" # no\nrun --k \'$a\' "q=$b" $((a * 3 + 1)) ${c:-d$a} e\\\nf `g h`\n'
    run = [word.text for word in commands_of(text)[2]]
    assert run == ["run", "--k", "$a", "q=x 2", "7", "d2", "ef", "`g h`"]


def test_arithmetic_is_whole_and_bounded():
    assert arithmetic("1024 * (n + 1) / 3", {"n": "4"}) == 1024 * 5 // 3
    for unknown in ("missing + 1", "9**9**9", "f(1)", "1 / 0", "'a' * 9", "10000000 * 10000000 * 10000000"):
        assert arithmetic(unknown, {}) is None


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", "a: [1\nb: 2\n", "a.yaml, line 2: not valid YAML"),
        ("a.yaml", "- 1\n- 2\n", "a.yaml, line 1: no keys and values"),
        ("a.json", "{", "a.json, line 1: not valid YAML"),
        ("a.py", "x = (\n", "a.py, line 1: not valid Python"),
        ("a.py", "x = 1\n", "no call of GRPOConfig"),
        ("a.sh", "echo hello\n", "a.sh, line 1: neither a verl script"),
        ("a.sh", "x algorithm.adv_estimator=opo", "line 1: algorithm.adv_estimator = opo: no such advantage"),
        ("a.sh", "x algorithm.adv_estimator=grpo \\\n trainer.nnodes=ten", "line 2: trainer.nnodes = ten: must be"),
        ("a.sh", "x data.train_batch_size=100 algorithm.adv_estimator=grpo", "cannot be divided by it evenly"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_with_file_line_and_exit_2(tmp_path: Path, name: str, text: str, expected: str):
    answer = dapo(write(tmp_path, name, text))
    assert answer.returncode == 2
    assert expected in answer.stderr.replace(f"{tmp_path}/", "")
    assert "Traceback" not in answer.stderr


def test_files_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00a.b=c")
    (tmp_path / "large.sh").write_text("a.b=c\n" * 300_000)
    bomb = "a0: &a0 {x: 1, y: 2}\n" + "".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40))
    write(tmp_path, "bomb.yaml", bomb)
    doubled = "a=xxxxxxxxxx\n" + "".join(f"a=$a$a{n}\n" for n in range(60))
    write(tmp_path, "doubled.sh", doubled + "x algorithm.adv_estimator=$a")
    write(tmp_path, "deep.sh", "a=" + "${b:-" * 20_000 + "\nx algorithm.adv_estimator=grpo")
    write(tmp_path, "deep.json", "[" * 50_000)
    write(tmp_path, "deep.py", "GRPOConfig(beta=" + "(" * 5_000 + "1" + ")" * 5_000 + ")")
    names = ("binary.sh", "large.sh", "bomb.yaml", "doubled.sh", "deep.sh", "deep.json", "deep.py", "missing.sh", ".")
    for name in names:
        with pytest.raises(ConfigError, match=str(tmp_path)):
            translate(tmp_path / name)


def test_only_a_regular_file_is_read_and_no_more_of_it_than_a_config_has(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.sh")  # opening it would wait for a writer
    for path in (tmp_path / "pipe.sh", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{path}: is no regular file") as caught:
            translate(path)
        assert "to a file" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.sh", VERL + "data.train_batch_size=0", "data.train_batch_size = 0"),
        ("a.sh", VERL + "data.gen_batch_size=-1", "data.gen_batch_size = -1"),
        ("a.sh", VERL + "trainer.nnodes=0", "trainer.nnodes = 0"),
        ("a.sh", OPENRLHF + "--rollout_batch_size 0", "rollout_batch_size = 0"),
        ("a.sh", OPENRLHF + "--max_samples 0", "max_samples = 0"),
        ("a.py", "GRPOConfig(per_device_train_batch_size=0)", "per_device_train_batch_size = 0"),
        ("a.yaml", "num_generations: 8\nnum_iterations: 0\nmax_steps: 10", "num_iterations = 0"),
        ("a.yaml", "num_generations: 8\nsteps_per_generation: 0", "steps_per_generation = 0"),
    ],
)  # fmt: skip
def test_a_count_below_one_is_refused_where_it_is_read(tmp_path: Path, name: str, text: str, expected: str):
    with pytest.raises(ConfigError, match=rf"line \d: {expected}: must be at least 1") as caught:
        translate(write(tmp_path, name, text), rows=10)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "argument", ["max_steps=1e400", "warmup_steps=1e999", "beta=-1e999", "max_steps=1" + "0" * 400, "save_steps=1e16"]
)
def test_a_number_beyond_reason_is_refused_in_python_as_in_text(tmp_path: Path, argument: str):
    with pytest.raises(ConfigError, match=rf"line 1: {argument.partition('=')[0]} = .*: must be a number"):
        translate(write(tmp_path, "a.py", f"GRPOConfig({argument})"))


def test_many_arguments_and_long_values_take_no_long_time(tmp_path: Path):
    names = "".join(f"n{at} = {at}\n" for at in range(4_000))
    used = ", ".join(f"k{at}=n{at} * 2" for at in range(4_000))
    out = translate(write(tmp_path, "many.py", f"{names}GRPOConfig(max_steps=n7 * 2, num_generations=8, {used})"))
    assert out.keys["train.steps"] == 7 * 2
    used = ", ".join(f"k{at}={at}" for at in range(11_000))
    with pytest.raises(ConfigError, match="more than 10,000 settings"):
        translate(write(tmp_path, "most.py", f"GRPOConfig({used})"))
    with pytest.raises(ConfigError, match=r"seed = .*must be a number"):
        translate(write(tmp_path, "digits.py", f"x = 0x{'f' * 9_000}\nGRPOConfig(seed=x)"))


def test_a_name_of_a_file_cannot_add_keys(tmp_path: Path):
    text = recipe_text(verl(tmp_path, "data.train_batch_size=256"), 'a\npreset = "vapo"\n.sh')
    assert tomllib.loads(text)["preset"] == "grpo-naive"


def test_out_that_cannot_be_written_says_so_of_out(tmp_path: Path):
    taken = write(tmp_path, "taken", "a file, not a folder")
    (tmp_path / "a").mkdir()
    for out in (taken / "mine.toml", tmp_path / "a" / ("x" * 245 + ".toml"), tmp_path / ("x" * 300 + ".toml")):
        answer = dapo(FILES / "dapo_32b.sh", "--out", out)
        assert answer.returncode == 2
        assert f"--out {out}: cannot be written" in answer.stderr.replace("\n", "")
        assert "dapo resume" not in answer.stderr
        assert "Traceback" not in answer.stderr


def test_options_that_do_not_fit_the_file_are_refused():
    for name, options, expected in (
        ("grpo.py", ("--peer", "verl"), "--peer verl"),
        ("dapo_32b.sh", ("--gpus", "4"), "--gpus 4"),
        ("openrlhf.sh", ("--gpus", "4"), "--gpus 4"),
    ):
        answer = dapo(FILES / name, *options)
        assert (answer.returncode, expected in answer.stderr) == (2, True)


def test_out_is_whole_new_and_read_back(tmp_path: Path):
    out = tmp_path / "new" / "mine.toml"
    answer = dapo(FILES / "dapo_32b.sh", "--out", out)
    assert answer.returncode == 0
    assert "Not carried over" in answer.stderr
    assert load_recipe(str(out)).config.sampling.prompts_per_step == 512
    assert [path.name for path in out.parent.iterdir()] == ["mine.toml"]
    again = dapo(FILES / "dapo_32b.sh", "--out", out)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_json_has_keys_and_both_lists():
    found = json.loads(dapo(FILES / "dapo_32b.sh", "--json").stdout)
    assert found["keys"]["algorithm.clip.high"] == 0.28
    assert set(found["keys"]) <= known_keys().keys()
    assert {"peer", "origin", "differs", "no_counterpart", "recipe"} <= found.keys()


def test_a_comment_of_ours_cannot_be_ended_by_their_text(tmp_path: Path):
    known = "algorithm.adv_estimator=grpo data.train_batch_size=256 actor_rollout_ref.rollout.n=4"
    path = write(tmp_path, "s.sh", f"x {known} trainer.total_training_steps=1 'a.b=1\npreset = \"vapo\"'")
    assert loaded(translate(path), tmp_path)["preset"] == "grpo-naive"


def test_every_owner_of_a_model_is_a_name():
    assert all(owner and "/" not in owner for owner in OWNERS.values())


WORDS = st.sampled_from(
    [
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "data.train_batch_size=$((",
        "--num_generations", "4", "${x:-", "${", "$x", "x=1", "`", "'", '"', "\\", "\n", " ", "}", ")", "=", "#",
    ]
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(WORDS | st.text(max_size=6), max_size=20))
def test_any_text_is_a_recipe_or_one_message(tmp_path_factory: pytest.TempPathFactory, pieces: list[str]):
    path = tmp_path_factory.getbasetemp() / "any.sh"
    path.write_text("".join(pieces), encoding="utf-8", errors="replace")
    for peer in ("verl", "trl", "openrlhf"):
        with contextlib.suppress(ConfigError):  # anything else is a traceback at the user's
            check(translate(path, peer=peer), "any")


def test_trl_rloo_is_our_rloo_with_its_own_defaults(tmp_path: Path):
    """A Python file, a command line and a YAML file: the loss, the baseline, and what of it has no counterpart."""
    code = 'RLOOTrainer("org/m", accuracy_reward, args=RLOOConfig(max_steps=4, learning_rate=2e-6, fp16=True))'
    script = "trl rloo --model_name_or_path org/m --max_steps 4 --learning_rate 2e-6 --num_generations 2 --fp16 true"
    tree = "model_name_or_path: org/m\nmax_steps: 4\nlearning_rate: 2e-6\nnormalize_advantages: false\nfp16: true\n"
    for name, text in (("a.py", code), ("a.sh", script), ("a.yaml", tree)):
        out = translate(write(tmp_path, name, text), gpus=1)
        keys = out.keys
        assert keys["preset"] == "rloo", name
        assert (keys["algorithm.loss"], keys["algorithm.loss_constant_tokens"]) == ("reinforce", 1)
        assert (keys["algorithm.group.baseline"], keys["algorithm.group.std"]) == ("leave_one_out", "none")
        assert (keys["sampling.responses_per_prompt"], keys["limits.max_response_tokens"]) == (2, 256)
        assert (keys["train.lr"], keys["model.dtype"]) == (2e-6, "float16")
        assert any("KL is part of the reward" in remark.why for remark in out.missing)


def test_trl_rloo_scaled_clipped_and_with_several_updates_says_what_differs(tmp_path: Path):
    code = (
        "RLOOConfig(max_steps=4, beta=0.0, normalize_advantages=True, epsilon=0.1, num_iterations=2, "
        "reward_clip_range=(-1, 1))"
    )
    out = translate(write(tmp_path, "a.py", code))
    assert (out.keys["algorithm.group.std"], out.keys["algorithm.group.std_over"]) == ("sample", "batch")
    assert out.keys["algorithm.clip.low"] == 0.1
    assert any("ratio of a whole response" in remark.why for remark in out.differs)
    assert not any("KL" in remark.why for remark in out.missing)
    assert any(remark.setting.startswith("reward_clip_range") for remark in out.missing)
    with pytest.raises(ConfigError, match="both GRPOConfig and RLOOConfig"):
        translate(write(tmp_path, "b.py", "GRPOConfig(max_steps=4)\nRLOOConfig(max_steps=4)"))
