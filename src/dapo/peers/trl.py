"""TRL (1.16): a GRPOConfig or RLOOConfig in Python, YAML, JSON or on the command line, as a recipe."""

from __future__ import annotations

import math

from dapo.peers.common import (
    GUESS,
    divided,
    steps_of,
    take_correction,
    take_data,
    take_decay,
    take_model,
    take_rest,
    whole_distribution,
)
from dapo.peers.settings import Settings, Translation, Value, Weight, as_list, shown
from dapo.peers.sources import RLOO

MEANS = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant", "cispo": "token"}
LEVELS = {"token": "clip", "sequence": "gspo", "sequence_token": "gspo-token"}  # the last is trl.experimental's
STDS = {"group": "sample", "true": "sample", "batch": "sample", "none": "none", "false": "none"}
RLOO_KEYS = ("normalize_advantages", "reward_clip_range")  # only its config has them
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
ROWS = (
    "rows are used as they are in the set: write the changed ones to a file (to_json), or yield them from a function, "
    'data.train = "pkg.mod:function".'
)
KEEP_BEST = "checkpoint.keep_best keeps the checkpoint of the best evaluation."
REASONS = {
    "logging_*": "every step is logged.",
    "log_*": "`dapo report` shows the responses (records.every_steps).",
    "num_completions_to_print": "`dapo report` shows the responses.",
    "run_name": "the run's folder: --out.",
    "output_dir": "the run's folder: --out.",
    "overwrite_output_dir": "a run never writes over another.",
    "push_to_hub": "`dapo export RUN --out DIR` makes the folder.",
    "hub_*": "`dapo export RUN --out DIR` makes the folder.",
    "trust_remote_code": "code that comes with a model is never run.",
    "model_init_kwargs": "model.dtype; attention is packed here.",
    "attn_implementation": "attention is packed here.",
    "remove_unused_columns": "has no meaning here.",
    "shuffle_dataset": "each epoch is a new permutation, a function of (train.seed, epoch).",
    "dataloader_*": "has no meaning here.",
    "use_liger_kernel": "model.kernels; the logits matrix never exists here.",
    "use_vllm": "our own engine generates the responses.",
    "vllm_*": "our own engine generates the responses; rollout.engine = vllm for an architecture it does not know.",
    "use_transformers_*": "our own engine generates the responses.",
    "cache_implementation": "our own engine generates the responses.",
    "generation_kwargs": "sampling.temperature only.",
    "chat_template_kwargs": "the tokenizer's chat template as it is (data.chat_template).",
    "min_p": "training samples from the whole distribution.",
    "repetition_penalty": "training samples from the whole distribution.",
    "tf32": "has no meaning here.",
    "optim": "AdamW.",
    "lr_scheduler_kwargs": "train.lr_decay falls towards 0.",
    "gradient_checkpointing_kwargs": "has no meaning here.",
    "deepspeed": "cluster.shard = full is FSDP2.",
    "fsdp*": "cluster.shard = full is FSDP2.",
    "ddp_*": "has no meaning here.",
    "per_device_eval_batch_size": "rollout.max_concurrent_sequences bounds what runs at once.",
    "do_*": "has no meaning here.",
    "eval_on_start": "always so where there is an evaluation.",
    "eval_strategy": "eval.every_steps.",
    "evaluation_strategy": "eval.every_steps.",
    "load_best_model_at_end": KEEP_BEST,
    "metric_for_best_model": KEEP_BEST,
    "greater_is_better": KEEP_BEST,
    "save_only_model": "a checkpoint holds everything that is needed to resume.",
    "reward_weights": "each function is a part with its weight: rewards.parts = "
    '{NAME = {function = "MODULE:NAME", weight = 0.5}}.',
    "reward_clip_range": "rewards are as the verifier gives them.",
    "sync_ref_model": "the reference stays the first model.",
    "ref_model_*": "the reference stays the first model.",
    "disable_dropout": "the model has none here; an adapter's is model.lora.dropout.",
    "entropy_coef_*": "the coefficient stays as it is.",
    "entropy_target": "the coefficient stays as it is.",
    "use_adaptive_entropy": "the coefficient stays as it is: algorithm.entropy_coefficient.",
    "top_entropy_quantile": "all tokens are trained on.",
    "off_policy_mask_threshold": "no such mask.",
    "max_tool_calling_iterations": "limits.max_turns, with data.environment.",
    "trainer.peft_config": "not a call of LoraConfig in this file: set model.lora.rank and model.lora.alpha.",
    "trainer.tools": "tools are written as an environment here: data.environment = package.module:Class.",
    "trainer.rollout_func": "rollouts are the engine's; several turns are an environment here: data.environment.",
    "trainer.environment_factory": "written as an environment here: data.environment = package.module:Class.",
    "trainer.optimizers": "AdamW.",
    "trainer.reward_processing_classes": "rewards come from a verifier (rewards.verifier).",
    "trainer.eval_dataset": "set data.eval.",
    "trainer.processing_class": "the model's own tokenizer.",
    "trainer.callbacks": "subclass dapo.Observer.",
    "lora.*": "the keys of model.lora are all there is.",
    "lora_*": "the keys of model.lora are all there is.",
    "bnb*": "matrices are dequantized to model.dtype.",
    "dataset.shuffle*": "each epoch is a new permutation, a function of (train.seed, epoch).",
    "dataset.rename_column*": "known columns need no names; others are mapped by data.fields.",
    "dataset.remove_columns*": "columns that are not needed are left alone.",
    "dataset.map*": f"{ROWS} Prompts are made from the question by data.template.",
    "dataset.filter*": ROWS,
    "dataset.select*": ROWS,
    "dataset.take*": ROWS,
    "dataset.skip*": ROWS,
    "dataset.train_test_split*": "`dapo data prepare FILE --hold-out N` sets problems aside.",
    "system_prompt*": "prompts are made by data.template, without a system text: put it into each question, or train "
    'without it. Your own questions: data.train = "pkg.mod:function".',
    "dataset.*": "data.train names the set: org/name@COMMIT:split.",
    "report_to": "tracking.to knows tensorboard, wandb and trackio.",
}
TASK = (
    "dataset.map*", "dataset.filter*", "dataset.select*", "dataset.take*", "dataset.skip*", "system_prompt*",
    "reward_weights", "trainer.reward_processing_classes", "chat_template_kwargs",
    "trainer.tools", "trainer.rollout_func", "trainer.environment_factory", "max_tool_calling_iterations",
)  # fmt: skip
TRAINING = (
    "dataset.*", "generation_kwargs", "min_p", "repetition_penalty", "optim", "lr_scheduler_kwargs",
    "sync_ref_model", "ref_model_*", "entropy_coef_*", "entropy_target", "use_adaptive_entropy", "top_entropy_quantile",
    "off_policy_mask_threshold", "trainer.peft_config", "trainer.optimizers", "trainer.callbacks",
    "lora.*", "lora_*", "reward_clip_range",
)  # fmt: skip


def from_trl(s: Settings, *, gpus: int, rows: int | None) -> Translation:
    """A recipe with the meaning of TRL's keys on `gpus` processes; what has none is listed."""
    out = Translation("TRL")
    model = s.text("model_name_or_path", "trainer.model", "model")
    take_model(out, model if model.value and "(" not in str(model.value) else Value(None, model.origin, is_given=False))
    train_set = data(s, out)
    is_rloo = s.find(RLOO) is not None or any(key in s.by_key for key in RLOO_KEYS)
    prompts, updates = batches(s, out, gpus, n_default=2 if is_rloo else 8)
    if is_rloo:
        leave_one_out(s, out, updates)
    else:
        algorithm(s, out)
    lengths(s, out, default=256 if is_rloo else 512)
    optimizer(s, out)
    quantization(s, out, has_adapter=adapter(s, out))
    steps(s, out, rows=rows, updates=updates, train_set=train_set, prompts=prompts)
    evaluation(s, out)
    if gpus > 1:
        out.put("cluster.backend", "torchrun", "--gpus")
        out.put("cluster.gpus", gpus, "--gpus")
    rewards(s, out)
    carried_by_their_own_calls(s)
    take_rest(s, out, REASONS, task=TASK, training=TRAINING)
    return out


def data(s: Settings, out: Translation) -> str:
    name = s.text("dataset_name", "dataset.path", "trainer.train_dataset")
    split, config = s.text("dataset_train_split", "dataset.split"), s.find("dataset_config", "dataset.name")
    if name.value is None or not all(sign.isalnum() or sign in "/._-" for sign in name.value):
        out.put("data.train", "TRAIN", "not a literal in the file")
        out.means_other("train_dataset", "cannot be read from the file: set data.train.")
        return ""
    known = take_data(out, "data.train", name, [name.value])[0]
    if config is not None and known == name.value:
        out.has_none(config, "a data set has no configurations here: name a file instead.", Weight.TASK)
    if split.is_given and split.value != "train" and known == name.value:
        out.take("data.train", name, f"{name.value}:{split.value}")
    return known


def batches(s: Settings, out: Translation, gpus: int, *, n_default: int) -> tuple[int, int]:
    """Prompts and updates per step. TRL counts completions, per device."""
    each = s.count("per_device_train_batch_size", default=8)
    accumulated = s.count("gradient_accumulation_steps", default=1)
    n = s.count("num_generations", default=n_default)
    per_pass = each.value * gpus
    whole, passes = s.count("generation_batch_size"), s.count("steps_per_generation")
    if whole.is_given:
        n_passes = divided(
            s, whole.value, per_pass, s.find("generation_batch_size"), "generation_batch_size / (per device x GPUs)"
        )
    else:
        n_passes = passes.value if passes.is_given else accumulated.value
    completions = per_pass * n_passes
    prompts = divided(
        s, completions, n.value, s.find("num_generations"), f"completions on {gpus} GPU(s) / num_generations"
    )
    updates = divided(
        s, n_passes, accumulated.value, s.find("gradient_accumulation_steps"), "passes per generation / accumulated"
    )
    out.put(
        "sampling.prompts_per_step",
        prompts,
        f"{each.value} per device x {gpus} x {n_passes} passes / {n.value} generations",
    )
    out.take("sampling.responses_per_prompt", n)
    out.put("train.updates_per_step", updates, f"{n_passes} passes / {accumulated.value} accumulated")
    if each.is_given:
        out.means_other(
            each.origin,
            f"counts completions per device: on {gpus} GPU(s) {completions} completions = {prompts} prompts per step. "
            "The number of GPUs is not in the file: --gpus.",
        )
    if updates > 1:
        origin = whole.origin if whole.is_given else passes.origin
        out.means_other(origin, f"the {updates} updates of a step get whole groups; TRL splits its rows at random.")
    out.take("train.epochs_per_step", s.count("num_iterations", default=1))
    return prompts, updates


def algorithm(s: Settings, out: Translation) -> None:
    out.put("algorithm.advantage", "group", "GRPO")
    loss = s.text("loss_type", default="dapo")
    level = s.text("importance_sampling_level", default="token")
    for found, known in ((loss, MEANS), (level, LEVELS)):
        if found.value not in known:
            setting = s.find("loss_type" if found is loss else "importance_sampling_level")
            assert setting is not None, "the defaults are known"
            raise s.refuse(setting, "no such loss here.", f"There are {', '.join(known)}.")
    out.take("algorithm.loss_aggregation", loss, MEANS[loss.value])
    if loss.value == "bnpo":
        out.means_other(loss.origin, "counted over the whole update, not over a device's batch.")
    if loss.value == "dapo" and loss.is_given:
        out.means_other(loss.origin, "the token mean only; dynamic sampling is not in TRL (preset dapo has it).")
    if loss.value == "cispo":
        weights(s, out, loss, level)
    else:
        clip(s, out, level)
    scale = s.text("scale_rewards", default="group")
    std = STDS.get(str(scale.value).lower())
    out.take("algorithm.group.std", scale, std or "sample")
    if std is None:
        out.has_none(scale.origin, "no such std; the group's is taken.")
    if str(scale.value).lower() == "batch":
        out.put("algorithm.group.std_over", "batch_rewards", scale.origin)
    if std != "none":
        out.put("algorithm.group.eps", 1e-4, "TRL adds 1e-4 to the std")
    aggregation = s.text("multi_objective_aggregation", default="sum_then_normalize")
    if aggregation.value not in AGGREGATIONS:
        setting = s.find("multi_objective_aggregation")
        assert setting is not None, "the default is known"
        raise s.refuse(setting, "no such aggregation here.", f"There are {', '.join(AGGREGATIONS)}.")
    out.take_given("rewards.aggregation", aggregation)
    bonus = s.real("entropy_coef", default=0.0)
    if bonus.value:
        out.take("algorithm.entropy_coefficient", bonus)
        if out.keys["algorithm.loss_aggregation"] != "token":
            out.means_other(bonus.origin, "the entropy is averaged as the loss is; TRL's always over tokens.")
    beta = s.real("beta", default=0.0)
    out.take("algorithm.kl.coefficient", beta)
    if beta.value:
        out.put("algorithm.kl.kind", "k3", "TRL's estimator")
        out.put("algorithm.kl.place", "loss", "TRL's place")
        why = "k3 in the loss, at most 10 per token, without the factor of use_bias_correction_kl (TRL's default)."
        out.means_other(beta.origin, why)
    s.find("use_bias_correction_kl")
    out.put("sampling.dynamic", False, "TRL has none")
    importance(s, out)
    out.take("sampling.temperature", s.real("temperature", default=1.0))
    whole_distribution(out, s.real("top_p"), s.integer("top_k"))


def leave_one_out(s: Settings, out: Translation, updates: int) -> None:
    """RLOO: responses as a whole, each against the mean of the group's others."""
    for key, value in (
        ("algorithm.advantage", "group"), ("algorithm.loss", "reinforce"), ("algorithm.loss_aggregation", "constant"),
        ("algorithm.loss_constant_tokens", 1), ("algorithm.group.baseline", "leave_one_out"),
    ):  # fmt: skip
        out.put(key, value, "RLOO")
    scale = s.flag("normalize_advantages", default=False)
    out.take("algorithm.group.std", scale, "sample" if scale.value else "none")
    if scale.value:
        out.put("algorithm.group.std_over", "batch", scale.origin)
        out.put("algorithm.group.eps", 1e-4, "TRL adds 1e-4 to the std")
    epsilon, high = s.real("epsilon", default=0.2), s.real("epsilon_high")
    out.take("algorithm.clip.low", epsilon)
    out.take("algorithm.clip.high", high if high.value is not None else epsilon)
    if updates > 1 or int(out.keys["train.epochs_per_step"]) > 1:
        why = "TRL clips the ratio of a whole response; our loss has none. Use one update and one epoch per step."
        out.means_other(epsilon.origin, why)
    beta = s.real("beta", default=0.05)
    out.put("algorithm.kl.coefficient", 0.0, "RLOO")
    if beta.value:
        why = "RLOO's KL is part of the reward, which needs an advantage per token here: left out."
        out.has_none(beta.origin, why, Weight.TRAINING)
    out.put("sampling.dynamic", False, "TRL has none")
    importance(s, out)
    out.take("sampling.temperature", s.real("temperature", default=1.0))
    whole_distribution(out, s.real("top_p"), s.integer("top_k"))


def clip(s: Settings, out: Translation, level: Value) -> None:
    """The clipped surrogate, of the ratio of a token or of a response (GSPO)."""
    out.take("algorithm.loss", level, LEVELS[level.value])
    low, high, delta = s.real("epsilon", default=0.2), s.real("epsilon_high"), s.real("delta")
    out.take("algorithm.clip.low", low)
    out.take("algorithm.clip.high", high if high.value is not None else low)
    out.take(
        "algorithm.clip.dual", delta if delta.value is not None else Value("none", "TRL's default", is_given=False)
    )


def weights(s: Settings, out: Translation, loss: Value, level: Value) -> None:
    """CISPO: TRL's weights are min(r, ε_high), ours min(r, 1 + ε_high); epsilon has no part in it."""
    if level.value != "token":
        setting = s.find("importance_sampling_level")
        assert setting is not None, "token is the default"
        raise s.refuse(setting, "CISPO has a weight for every token here.", "Use token, or another loss_type.")
    out.take("algorithm.loss", loss)
    low, high = s.real("epsilon", default=0.2), s.real("epsilon_high")
    largest = high if high.value is not None else low
    if largest.value <= 1:
        culprit = s.find("epsilon_high") or s.find("epsilon") or s.find("loss_type")
        assert culprit is not None, "cispo is not the default"
        raise s.refuse(
            culprit,
            f"with loss_type = cispo it is the largest weight, min(r, {largest.value:g}): it shrinks even r = 1.",
            "Write epsilon_high: 5.0, which TRL recommends.",
        )
    out.put("algorithm.clip.low", "none", "CISPO has no lower bound in TRL")
    out.take("algorithm.clip.high", largest, largest.value - 1)
    out.means_other(largest.origin, f"TRL's largest weight; ours is 1 + algorithm.clip.high: {largest.value - 1:g}.")
    s.find("delta")


def importance(s: Settings, out: Translation) -> None:
    """TRL corrects for vLLM's log-probs; our own engine has the trainer's, and its gap is measured."""
    is_vllm, is_on = s.flag("use_vllm", default=False), s.flag("vllm_importance_sampling_correction", default=True)
    mode = s.text("vllm_importance_sampling_mode", default="sequence_mask")
    cap = s.real("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap", default=3.0)
    floor = s.real("vllm_importance_sampling_clip_min")
    if is_vllm.value and is_on.value and mode.is_given:
        level, _, kind = str(mode.value).partition("_")
        if level not in ("token", "sequence") or kind not in ("truncate", "mask"):
            setting = s.find("vllm_importance_sampling_mode")
            assert setting is not None, "it is given"
            raise s.refuse(setting, "no such correction here.", "There are token or sequence with _truncate or _mask.")
        take_correction(out, mode, cap=cap.value, floor=floor.value, kind=kind, level=level)
    if is_vllm.value:
        why = "our own engine generates, from the trainer's weights, so that there is nothing to correct for"
        out.means_other(is_vllm.origin, f'{why}; rollout.engine = "vllm" is there too.')


def lengths(s: Settings, out: Translation, *, default: int) -> None:
    prompt = s.integer("max_prompt_length")
    out.take_given("limits.max_prompt_tokens", prompt)
    if prompt.is_given:
        out.means_other(prompt.origin, "a longer prompt is dropped and counted, not truncated.")
    length = s.integer("max_completion_length", default=default)
    out.take("limits.max_response_tokens", length)
    masked = s.flag("mask_truncated_completions", default=False)
    out.take("shaping.overlong_filter", masked)
    if masked.value and out.keys["algorithm.loss_aggregation"] in ("sequence", "constant"):
        out.means_other(masked.origin, "the loss is divided by the rows that are left; TRL divides by all of them.")
    buffer = s.integer("overlong.soft_punish_cache")
    limit = s.integer("overlong.max_completion_len")
    out.put(
        "shaping.overlong_penalty", 1.0 if buffer.value else 0.0, buffer.origin if buffer.value else "TRL's default"
    )
    out.take_given("shaping.overlong_buffer_tokens", buffer)
    if limit.is_given and limit.value != length.value:
        out.means_other(limit.origin, "the penalty is measured against limits.max_response_tokens.")


def optimizer(s: Settings, out: Translation) -> None:
    out.take("train.lr", s.real("learning_rate", default=1e-6))
    out.take("train.weight_decay", s.real("weight_decay", default=0.0))
    out.take("train.max_grad_norm", s.real("max_grad_norm", default=1.0))
    first, second = s.real("adam_beta1", default=0.9), s.real("adam_beta2", default=0.999)
    if first.is_given or second.is_given:
        out.put("train.betas", [first.value, second.value], "adam_beta1, adam_beta2")
    out.take("train.gradient_checkpointing", s.flag("gradient_checkpointing", default=True))
    out.take("train.seed", s.integer("seed", default=42))
    schedule = s.text("lr_scheduler_type", default="linear")
    take_decay(out, schedule)
    if s.flag("bf16", default=False).value:
        out.put("model.dtype", "bfloat16", "bf16")
    elif s.flag("fp16", default=False).value:
        out.put("model.dtype", "float16", "fp16")


def adapter(s: Settings, out: Translation) -> bool:
    """Whether there is one: by peft's LoraConfig, or by TRL's own keys, which have other defaults."""
    is_pefts = any(key.startswith("lora.") for key in s.by_key)
    is_on = s.flag("use_peft", default=is_pefts or "lora_r" in s.by_key)
    rank = s.integer("lora.r", "lora_r", default=8 if is_pefts else 16)
    alpha = s.real("lora.lora_alpha", "lora_alpha", default=8.0 if is_pefts else 32.0)
    dropout = s.real("lora.lora_dropout", "lora_dropout", default=0.0 if is_pefts else 0.05)
    stabilized = s.flag("lora.use_rslora", "use_rslora", default=False)
    targets = s.texts("lora.target_modules", "lora_target_modules")
    if not is_on.value or not rank.value:
        return False
    out.take("model.lora.rank", rank)
    out.take("model.lora.alpha", alpha)
    out.take_given("model.lora.rank_stabilized", stabilized)
    if dropout.value:
        out.take("model.lora.dropout", dropout)
        out.means_other(dropout.origin, "in updates only: sampling, old log-probs and the reference have none.")
    if not targets.value:
        why = "not given: peft takes its own for the family, often q_proj and v_proj; here all linear layers."
        out.means_other("target_modules", why)
    elif all(name.isidentifier() for name in targets.value):
        out.take("model.lora.target_modules", targets)
    elif targets.value != ["all-linear"]:
        out.has_none(targets.origin, "a pattern; model.lora.target_modules lists the ends of names.")
    return True


def quantization(s: Settings, out: Translation, *, has_adapter: bool) -> None:
    """The frozen weights in 4 or 8 bits, by bitsandbytes there."""
    four = s.flag("bnb.load_in_4bit", "load_in_4bit", default=False)
    eight = s.flag("bnb.load_in_8bit", "load_in_8bit", default=False)
    is_call = any(key.startswith("bnb.") for key in s.by_key)
    levels = s.text("bnb.bnb_4bit_quant_type", "bnb_4bit_quant_type", default="fp4" if is_call else "nf4")
    nested = s.flag("bnb.bnb_4bit_use_double_quant", "use_bnb_nested_quant", default=False)
    found = four if four.value else eight
    if not found.value:
        return
    if not has_adapter:
        out.has_none(
            found.origin, "model.lora.quantization keeps weights under an adapter in fewer bits: model.lora.rank."
        )
        return
    out.take("model.lora.quantization", found, "nf4" if four.value else "int8")
    if four.value:
        out.means_other(found.origin, "a fitted scale per 32 weights; bitsandbytes takes the largest magnitude of 64.")
    else:
        out.means_other(found.origin, "a scale per 64 weights; LLM.int8 has one per row, and outliers in 16 bits.")
    if four.value and levels.value != "nf4":
        out.means_other(levels.origin, "the levels of NF4, which is what there is here.")
    if four.value and nested.value:
        out.means_other(nested.origin, "the scales stay in bfloat16; they are not quantized a second time.")


def steps(s: Settings, out: Translation, *, rows: int | None, updates: int, train_set: str, prompts: int) -> None:
    """TRL counts optimizer updates; a step of ours has several."""
    most, epochs = s.integer("max_steps", default=-1), s.real("num_train_epochs", default=3.0)
    per_step = updates * int(out.keys["train.epochs_per_step"])
    if most.value > 0:
        n = max(1, most.value // per_step)
        out.take("train.steps", most, n)
        if per_step > 1:
            out.means_other(most.origin, f"counts updates; a step of ours has {per_step}: {n} steps.")
    else:
        steps_of(out, epochs, prompts=prompts, rows=rows, train_set=train_set)
    warmup, ratio = s.real("warmup_steps", default=0.0), s.real("warmup_ratio")
    total = int(out.keys["train.steps"])
    if ratio.is_given and not warmup.value:
        warmup = Value(ratio.value, ratio.origin, is_given=True)
    is_fraction = 0 < warmup.value < 1
    n_warm = math.ceil(warmup.value * total) if is_fraction else -(-int(warmup.value) // per_step)
    out.take("train.warmup_steps", warmup, n_warm)
    if n_warm:
        out.means_other(warmup.origin, "the first step has the rate lr / warmup_steps; TRL's first update has none.")


def evaluation(s: Settings, out: Translation) -> None:
    every = s.real("eval_steps")
    if every.is_given:
        n = in_steps(s, out, every, "eval_steps", "eval.every_steps")
        also = "" if n is None else f", and eval.every_steps = {n}"
        why = f"set data.eval to the sets that are evaluated (avg@k, pass@k, maj@k){also}."
        out.has_none(every.origin, why, Weight.MINOR)
    save, strategy = s.real("save_steps", default=500.0), s.text("save_strategy", default="steps")
    if strategy.value == "no":
        out.take("checkpoint.every_steps", strategy, 0)
    elif (n := in_steps(s, out, save, "save_steps", "checkpoint.every_steps")) is not None:
        out.take("checkpoint.every_steps", save, n)
    if strategy.value not in ("no", "steps"):
        why = "checkpoints are written every so many steps: checkpoint.every_steps."
        if strategy.value == "best":
            why = KEEP_BEST
        out.has_none(strategy.origin, why, Weight.MINOR)
    out.take_given("checkpoint.keep", s.integer("save_total_limit"))
    s.find("num_generations_eval")
    reported = s.find("report_to")
    known = (
        [name for name in as_list(reported.value) if name in ("tensorboard", "wandb", "trackio")] if reported else []
    )
    if reported is not None and known:
        out.put("tracking.to", known, str(reported))


def in_steps(s: Settings, out: Translation, found: Value, theirs: str, ours: str) -> int | None:
    """Hugging Face counts updates, or, below 1, a fraction of all of them; 0 and less is never. None: not known."""
    if found.value <= 0:
        return 0
    if found.value >= 1:
        per_step = int(out.keys["train.updates_per_step"]) * int(out.keys["train.epochs_per_step"])
        return max(1, int(s.integer(theirs, default=int(found.value)).value) // per_step)
    if out.origin["train.steps"] == GUESS:
        out.means_other(found.origin, f"a fraction of all steps, and how many there are is not known: set {ours}.")
        return None
    n = math.ceil(float(found.value) * int(out.keys["train.steps"]))
    out.means_other(found.origin, f"a share of all {out.keys['train.steps']:,} steps: every {n:,}.")
    return n


# TRL's own that have a counterpart: comparison with a reference answer, and the penalty of a long response.
KNOWN_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "get_soft_overlong_punishment")


def rewards(s: Settings, out: Translation) -> None:
    functions = s.find("trainer.reward_funcs", "reward_funcs")
    out.put("rewards.verifier", "math", "our default")
    if functions is None:
        out.means_other("rewards.verifier", "the file names no reward: answers are checked by the verifier math, ±1.")
        return
    lost = [name for name in as_list(functions.value) if name.partition("(")[0].strip("()'\" ") not in KNOWN_REWARDS]
    for name in lost:
        why = (
            f"{shown('', name)} is not carried over: answers are checked by the verifier math instead. A function of "
            f'your own works as it is: rewards.verifier = "MODULE:{function_name(name)}", or as one of rewards.parts.'
        )
        out.has_none(functions, why, Weight.TASK)
    if not lost:
        out.means_other(functions, "the reward is ±1 by the verdict here, 0 or 1 there.")


def function_name(reward: str) -> str:
    name = reward.rpartition(".")[2]
    return name if name.isidentifier() else "FUNCTION"


def carried_by_their_own_calls(s: Settings) -> None:
    """Arguments of the trainer that are read where they are made are not listed as lost."""
    s.find("trainer.args")
    if any(key.startswith("lora.") for key in s.by_key):
        s.find("trainer.peft_config")
