"""OpenRLHF (0.11, and the flat names of earlier versions): a command line as a recipe."""

from __future__ import annotations

import math

from dapo.peers.common import (
    divided,
    steps_of,
    take_correction,
    take_data,
    take_decay,
    take_model,
    take_rest,
    whole_distribution,
)
from dapo.peers.settings import Settings, Translation, Value, Weight

WHITENED = {"std": "sample", "std_over": "tokens"}
ADVANTAGES: dict[str, dict[str, str]] = {  # of a group, what differs from eq. 9
    "gae": {},
    "group_norm": {"std": "sample"},
    "dr_grpo": {"std": "none"},
    "rloo": {"baseline": "leave_one_out", "std": "none"},
    "reinforce": {"baseline": "batch"} | WHITENED,
    "reinforce_baseline": WHITENED,
}
MEANS = {"token-mean": "token", "seq-mean-token-mean": "sequence"}
LOSSES = {"ppo": "clip", "gspo": "gspo"}
TYPES = {"tis": "clip", "icepop": "mask"}  # of weights per token
LEVELS = {"token": "token", "seq": "sequence", "sequence": "sequence", "geo": "geometric"}
ENGINE = "our own engine generates the responses, in the trainer's process."
MEMORY = "cluster.shard = full is FSDP2; train.moments = host offloads the moments."
REASONS = {
    "ckpt.best_metric_key": "checkpoint.keep_best keeps the checkpoint of the best evaluation.",
    "best_metric_key": "checkpoint.keep_best keeps the checkpoint of the best evaluation.",
    "vllm*": ENGINE,
    "enforce_eager": ENGINE,
    "colocate_*": ENGINE,
    "train.colocate_*": ENGINE,
    "async_train": "synchronous; sampling.partial_rollouts keeps unfinished responses (preset dapo-fast).",
    "train.async_*": "synchronous; sampling.partial_rollouts keeps unfinished responses (preset dapo-fast).",
    "train.partial_rollout_enable": "sampling.partial_rollouts (preset dapo-fast).",
    "train.agent_func_path": "an agent is written as an environment here: data.environment = package.module:Class.",
    "train.enable_ema": "no moving average of the weights.",
    "ref*": "the reference, where there is a KL term, runs like the policy.",
    "critic*": "the critic starts from the policy and shares its other settings.",
    "reward_*": "rewards come from a verifier (rewards.verifier).",
    "reward.*": "rewards come from a verifier (rewards.verifier).",
    "remote_rm_url": 'write it as `function(response, answer, meta)`: rewards.verifier = "pkg.mod:function".',
    "normalize_reward": "a group advantage is normalised by its group.",
    "micro_*": "micro-batches are made by a token budget: train.tokens_per_microbatch.",
    "train.micro_batch_size": "micro-batches are made by a token budget: train.tokens_per_microbatch.",
    "rollout.*": "the engine decides.",
    "ds.*": MEMORY,
    "zero_stage": MEMORY,
    "adam_offload": MEMORY,
    "bf16": "model.dtype; bfloat16 on a GPU.",
    "param_dtype": "model.dtype; bfloat16 on a GPU.",
    "packing_samples": "always so here.",
    "flash_attn": "attention is packed here.",
    "attn_implementation": "attention is packed here.",
    "save_path": "the run's folder: --out; `dapo export RUN --out DIR` makes a Hugging Face folder.",
    "ckpt*": "the run's folder: --out; `dapo resume RUN` continues it.",
    "load_checkpoint": "`dapo resume RUN`.",
    "save_hf_ckpt": "`dapo export RUN --out DIR` makes a Hugging Face folder.",
    "logger.*": "tracking.to; keys and names are the tracker's own settings.",
    "logging_steps": "every step is logged.",
    "wandb_*": "tracking.to; keys and names are the tracker's own settings.",
    "use_tensorboard": 'tracking.to = ["tensorboard"].',
    "data.*": "known columns need no key; others are mapped by data.fields, prompts by data.template.",
    "input_template": "data.template.",
    "actor.min_lr_ratio": "train.lr_decay falls towards 0.",
    "actor.optim": "AdamW.",
    "actor.muon": "AdamW.",
    "stop_properly_penalty_coef": "a truncated response is never correct; shaping.overlong_filter leaves it out.",
    "gamma": "a group advantage has no discount.",
    "lambd": "a group advantage has no λ.",
    "algo.advantage": "a group advantage has neither discount nor λ.",
    "use_dynamic_batch": "always so here.",
    "deepspeed_enable_sleep": MEMORY,
    "freezing_actor_steps": "algorithm.critic.pretrain_responses.",
}
TASK = ("train.agent_func_path", "reward_*", "reward.*", "remote_rm_url", "input_template", "data.*")
TRAINING = (
    "train.enable_ema", "critic*", "normalize_reward", "actor.min_lr_ratio", "actor.optim", "actor.muon",
    "stop_properly_penalty_coef", "freezing_actor_steps",
)  # fmt: skip


def from_openrlhf(s: Settings, *, rows: int | None) -> Translation:
    """A recipe with the meaning of OpenRLHF's flags; what has none is listed."""
    out = Translation("OpenRLHF")
    take_model(out, s.text("actor.model_name_or_path", "pretrain"))
    train_set = data(s, out)
    prompts = batches(s, out)
    has_critic = advantage(s, out)
    algorithm(s, out, has_critic)
    lengths(s, out)
    optimizer(s, out)
    episodes, most = (
        s.count("train.num_episodes", "num_episodes", default=1),
        s.count("data.max_samples", "max_samples"),
    )
    steps_of(out, episodes, prompts=prompts, rows=rows, train_set=train_set, limit=most.value)
    ratio = s.real("actor.lr_warmup_ratio", "lr_warmup_ratio", default=0.03)
    out.take("train.warmup_steps", ratio, math.ceil(ratio.value * out.keys["train.steps"]))
    rest_of_run(s, out)
    take_rest(s, out, REASONS, task=TASK, training=TRAINING)
    return out


def data(s: Settings, out: Translation) -> str:
    name = s.text("data.prompt_dataset", "prompt_data")
    question, answer = s.text("data.input_key", "input_key"), s.text("data.label_key", "label_key")
    template = s.flag("data.apply_chat_template", "apply_chat_template", default=False)
    out.take("data.chat_template", template)
    if name.value is None:
        out.put("data.train", "TRAIN", "not in the file")
        out.means_other("prompt_data", "not in the file: set data.train.")
        return ""
    probs = s.reals("data.prompt_probs", "prompt_data_probs")
    known = take_data(out, "data.train", name, str(name.value).split(","), probs.value)[0]
    if question.is_given and answer.is_given:
        fields = {"question": question.value, "answer": answer.value}
        out.put("data.fields", fields, f"{question.origin}, {answer.origin}")
    return known


def batches(s: Settings, out: Translation) -> int:
    """OpenRLHF generates for prompts and trains on samples: prompts x responses."""
    prompts = s.count("rollout.batch_size", "rollout_batch_size", default=1024)
    n = s.count("rollout.n_samples_per_prompt", "n_samples_per_prompt", default=1)
    trained = s.count("train.batch_size", "train_batch_size", default=128)
    setting = s.find("train.batch_size", "train_batch_size")
    updates = divided(s, prompts.value * n.value, trained.value, setting, "responses per step / samples per update")
    if updates > prompts.value:
        raise s.refuse(
            setting or next(iter(s.by_key.values())),
            f"{updates} updates for {prompts.value} prompts: an update would have less than a group.",
            f"Use at least n_samples_per_prompt = {n.value}.",
        )
    out.take("sampling.prompts_per_step", prompts)
    out.take("sampling.responses_per_prompt", n)
    out.put("train.updates_per_step", updates, f"rollout batch x n / {trained.origin}")
    out.means_other(trained.origin, f"counts responses per update; ours counts updates per step: {updates}.")
    out.take("train.epochs_per_step", s.count("train.max_epochs", "max_epochs", default=1))
    return int(prompts.value)


def advantage(s: Settings, out: Translation) -> bool:
    names = ("algo.advantage.estimator", "advantage_estimator")
    estimator = s.text(*names, default="gae")
    if estimator.value not in ADVANTAGES:
        setting = s.find(*names)
        assert setting is not None, "the default is known"
        raise s.refuse(setting, "no such advantage here.", f"There are {', '.join(ADVANTAGES)}.")
    is_group = estimator.value != "gae"
    out.take("algorithm.advantage", estimator, "group" if is_group else "gae")
    no_std = s.flag("algo.advantage.no_std_norm", "no_advantage_std_norm", default=False)
    if is_group:
        for key, value in ADVANTAGES[estimator.value].items():
            out.put(f"algorithm.group.{key}", value, estimator.origin)
        if no_std.value:
            out.put("algorithm.group.std", "none", no_std.origin)
            out.put("algorithm.group.std_over", "group", no_std.origin)
        return False
    out.take("algorithm.gae.lam", s.real("algo.advantage.lambd", "lambd", default=1.0))
    out.take("algorithm.gae.gamma", s.real("algo.advantage.gamma", "gamma", default=1.0))
    out.put("algorithm.gae.whiten", True, "OpenRLHF's default")
    out.take("algorithm.critic.lr", s.real("critic.adam.lr", "critic_learning_rate", default=9e-6))
    out.take("algorithm.critic.value_clip", s.real("critic.value_clip", "value_clip", default=0.5))
    frozen = s.integer("critic.freezing_steps", "freezing_actor_steps", default=-1)
    out.take("algorithm.critic.pretrain_responses", frozen, max(0, frozen.value) * out.responses_per_step)
    return True


def algorithm(s: Settings, out: Translation, has_critic: bool) -> None:
    names = ("actor.loss_agg_mode", "loss_agg_mode")
    mode = s.choice(*names, known=MEANS, what="mean of the loss", default="token-mean")
    out.take("algorithm.loss_aggregation", mode, MEANS[mode.value])
    clip(s, out)
    loss = s.choice("actor.policy_loss_type", "policy_loss_type", known=LOSSES, what="policy loss", default="ppo")
    out.take("algorithm.loss", loss, "gspo-token" if loss.value == "gspo" and has_critic else LOSSES[loss.value])
    if loss.value == "gspo":
        out.put("algorithm.loss_aggregation", "sequence", f"{loss.origin}: the mean over responses")
    bonus = s.real("actor.entropy_coef", "entropy_loss_coef", default=0.0)
    if bonus.value:
        out.take("algorithm.entropy_coefficient", bonus)
    kl(s, out, has_critic)
    enabled = s.flag("algo.dynamic_filtering_enable", "dynamic_filtering", default=False)
    bounds = s.reals("algo.dynamic_filtering_range", "dynamic_filtering_reward_range", count=2)
    if enabled.value and has_critic:
        out.has_none(enabled.origin, "dropping groups by their outcome biases a critic's targets; left out.")
    out.take("sampling.dynamic", enabled, bool(enabled.value and not has_critic))
    if bounds.is_given and bounds.value != [0.0, 1.0]:
        out.means_other(bounds.origin, "a group is kept when 0 < correct < G, whatever the rewards are.")
    correction(s, out)


def correction(s: Settings, out: Translation) -> None:
    """Weights against vLLM's log-probs: a level, mask or clip, and [low, high] or an upper bound alone."""
    level = s.text("algo.advantage.is_correction_level", default="off")
    older = s.flag(  # a flag, per token
        "algo.advantage.is_correction_enable", "enable_vllm_is_correction", "vllm_enable_is_correction", default=False
    )
    kinds = ("algo.advantage.is_correction_type", "vllm_is_correction_type")
    named = s.text(*kinds, default="icepop" if s.flag("use_icepop", default=False).value else "tis")
    shape = s.text("algo.advantage.is_correction_mode", default=TYPES.get(named.value, "") if older.value else "mask")
    gating = s.text("algo.advantage.is_correction_gating", default="ratio")
    threshold = s.reals("algo.advantage.is_correction_threshold", "vllm_is_truncated_threshold")
    name = "token" if older.value else level.value
    if name == "off":
        return
    if name not in LEVELS or gating.value != "ratio":
        unknown = gating if name in LEVELS else level
        out.has_none(unknown.origin, "importance weights are bounded by their own value: algorithm.correction.")
        return
    if not shape.value:
        why = (
            "responses are masked by their geometric mean, and tokens have weights of their own: algorithm.correction."
        )
        out.has_none(named.origin, why)
        return
    bounds = threshold.value or [0.5, 5.0]
    kind = "truncate" if shape.value == "clip" else "mask"
    floor = bounds[0] if len(bounds) > 1 and bounds[0] > 0 else None
    given = threshold if threshold.is_given else older if older.is_given else level
    take_correction(out, given, cap=bounds[-1], floor=floor, kind=kind, level=LEVELS[name])


def clip(s: Settings, out: Translation) -> None:
    both = s.real("actor.eps_clip", "eps_clip", default=0.2)
    pair = s.reals("actor.eps_clip_low_high", "eps_clip_low_high", count=2)
    low, high = pair.value or (both.value, both.value)
    origin = pair.origin if pair.is_given else both.origin
    out.put("algorithm.clip.low", low, origin)
    out.put("algorithm.clip.high", high, origin)
    dual = s.real("actor.dual_clip", "dual_clip")
    out.take(
        "algorithm.clip.dual", dual if dual.value is not None else Value("none", "OpenRLHF's default", is_given=False)
    )


def kl(s: Settings, out: Translation, has_critic: bool) -> None:
    weight = s.real("algo.kl.init_coef", "init_kl_coef", default=0.01)
    in_loss = s.flag("algo.kl.use_loss", "use_kl_loss", default=False)
    kind = s.text("algo.kl.estimator", "kl_estimator", default="k1")
    target = s.find("algo.kl.target", "kl_target")
    if target is not None:
        out.has_none(target, "β stays as it is.")
    if weight.value and not in_loss.value and not has_critic:
        out.has_none(weight.origin, "a KL penalty in the reward needs an advantage per token (gae); left out.")
        out.put("algorithm.kl.coefficient", 0.0, "see below")
        return
    out.take("algorithm.kl.coefficient", weight)
    if weight.value:
        out.take("algorithm.kl.kind", kind)
        out.put("algorithm.kl.place", "loss" if in_loss.value else "reward", in_loss.origin)


def lengths(s: Settings, out: Translation) -> None:
    whole = s.integer("data.max_len", "max_len")
    prompt = s.integer("prompt_max_len")
    response = s.integer("rollout.max_new_tokens", "generate_max_len")
    if whole.value and response.value is None:
        response = Value(whole.value // 2, f"half of {whole.origin}", is_given=True)
        out.means_other(whole.origin, "counts prompt and response together; half of it each.")
    if response.value is None:
        response = Value(1024, "OpenRLHF's default", is_given=False)
    out.take("limits.max_response_tokens", response)
    if prompt.is_given:
        out.take("limits.max_prompt_tokens", prompt)
    elif whole.value and whole.value > response.value:
        out.put("limits.max_prompt_tokens", whole.value - response.value, f"{whole.origin} less the response")
    buffer = s.real("reward.overlong_buffer_len", "overlong_buffer_len")
    factor = s.real("reward.overlong_penalty_factor", "overlong_penalty_factor", default=1.0)
    out.put("shaping.overlong_filter", False, "OpenRLHF has none")
    if buffer.value:
        out.take("shaping.overlong_penalty", factor)
        out.take("shaping.overlong_buffer_tokens", buffer, int(buffer.value))
    else:
        out.put("shaping.overlong_penalty", 0.0, "OpenRLHF's default")
    out.take("sampling.temperature", s.real("rollout.temperature", "temperature", default=1.0))
    whole_distribution(out, s.real("rollout.top_p", "top_p"), s.integer("rollout.top_k", "top_k"))


def optimizer(s: Settings, out: Translation) -> None:
    out.take("train.lr", s.real("actor.adam.lr", "actor_learning_rate", default=1e-6))
    out.take("train.weight_decay", s.real("actor.adam.weight_decay", "l2", default=0.0))
    betas = s.reals("actor.adam.betas", "adam_betas", count=2)
    out.put("train.betas", betas.value or [0.9, 0.95], betas.origin)
    out.take("train.max_grad_norm", s.real("actor.max_norm", "max_norm", default=1.0))
    out.take("train.seed", s.integer("train.seed", "seed", default=42))
    checkpointing = s.flag("actor.gradient_checkpointing_enable", "gradient_checkpointing", default=False)
    out.take("train.gradient_checkpointing", checkpointing)
    out.take_given("train.tokens_per_microbatch", s.integer("train.max_tokens_per_gpu", "train_max_tokens_per_gpu"))
    rank, alpha = s.integer("ds.lora.rank", "lora_rank", default=0), s.real("ds.lora.alpha", "lora_alpha", default=16.0)
    if rank.value:
        out.take("model.lora.rank", rank)
        out.take("model.lora.alpha", alpha)
    schedule = s.text("actor.lr_scheduler", "lr_scheduler", default="cosine_with_min_lr")
    take_decay(out, schedule)


def rest_of_run(s: Settings, out: Translation) -> None:
    save, every = (
        s.integer("ckpt.save_steps", "save_steps", default=-1),
        s.integer("eval.steps", "eval_steps", default=-1),
    )
    out.take("checkpoint.every_steps", save, max(0, save.value))
    out.take_given("checkpoint.keep", s.integer("ckpt.max_num", "max_ckpt_num"))
    sets = s.text("eval.dataset", "eval_dataset")
    k, temperature = (
        s.integer("eval.n_samples_per_prompt", "eval_n_samples_per_prompt", default=4),
        s.real("eval.temperature", "eval_temperature", default=0.6),
    )
    if sets.is_given and every.value > 0:
        take_data(out, "data.eval", sets, [str(sets.value)])
        out.take("eval.every_steps", every)
        out.take("eval.k", k)
        out.take("eval.temperature", temperature)
        out.put("eval.top_p", 1.0, "OpenRLHF's default")
    nodes, each = (
        s.count("actor.num_nodes", "actor_num_nodes", default=1),
        s.count("actor.num_gpus_per_node", "actor_num_gpus_per_node", default=8),
    )
    gpus = nodes.value * each.value
    if gpus > 1:
        out.put("cluster.backend", "ray", "OpenRLHF runs on Ray")
        out.put("cluster.gpus", gpus, f"{nodes.origin} x {each.origin}")
    if s.find("use_wandb", "logger.wandb.key") is not None:
        out.put("tracking.to", ["wandb"], "use_wandb")
        out.take_given("tracking.project", s.text("logger.wandb.project", "wandb_project"))
        why = "not repeated here; wandb reads its own settings ($WANDB_API_KEY)."
        out.has_none("the tracker's key", why, Weight.MINOR)
    out.put("rewards.verifier", "math", "our default")
    url = s.find("reward.remote_url", "remote_rm_url", "reward_pretrain", "reward.model_name_or_path")
    out.means_other(
        url or "reward",
        'rewards come from a verifier: math here. Your own: rewards.verifier = "pkg.mod:function" with '
        "function(response, answer, meta).",
    )
