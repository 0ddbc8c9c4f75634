"""verl (0.9) and the released DAPO scripts: Hydra overrides or YAML as a recipe."""

from __future__ import annotations

from dapo.peers.common import (
    COPIES,
    divided,
    steps_of,
    take_correction,
    take_data,
    take_decay,
    take_model,
    take_rest,
    whole_distribution,
    without_top_k,
)
from dapo.peers.settings import Settings, Translation, Value, Weight

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"

MEANS = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}
TOKENS_OF_STEP = {"std": "sample", "std_over": "tokens"}
ADVANTAGES: dict[str, dict[str, str]] = {  # what differs from eq. 9
    "grpo": {},
    "gae": {},
    "rloo": {"baseline": "leave_one_out", "std": "none"},
    "rloo_vectorized": {"baseline": "leave_one_out", "std": "none"},
    "reinforce_plus_plus": {"baseline": "batch"} | TOKENS_OF_STEP,
    "reinforce_plus_plus_baseline": TOKENS_OF_STEP,
}
LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo"}
KL_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}

ALWAYS = "always so here."
OWN_REWARD = 'write it as `function(response, answer, meta)`: rewards.verifier = "pkg.mod:function".'
TOKENS = "micro-batches are made by a token budget: train.tokens_per_microbatch."
REASONS = {
    "data.truncation": "a prompt over limits.max_prompt_tokens is dropped and counted, never truncated.",
    "data.filter_overlong_prompts*": ALWAYS,
    "data.prompt_key": "known columns need no key; others are mapped by data.fields.",
    "data.return_raw_chat": "has no meaning here.",
    "data.shuffle": "each epoch is a new permutation, a function of (train.seed, epoch).",
    "data.val_batch_size": "has no meaning here: rollout.max_concurrent_sequences bounds what runs at once.",
    "data.seed": "one seed for all: train.seed.",
    f"{ACTOR}.ppo_micro_batch_size": TOKENS,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": TOKENS,
    f"{ACTOR}.use_dynamic_bsz": TOKENS,
    f"{ACTOR}.ulysses_sequence_parallel_size": "sequence parallelism is not built.",
    f"{ACTOR}.fsdp_config": "cluster.shard says whether FSDP2 shards; offloading of moments is train.moments = host.",
    f"{ACTOR}.strategy": "FSDP2 (cluster.shard), or one process.",
    f"{ACTOR}.megatron": "Megatron is not supported.",
    f"{ACTOR}.use_torch_compile": "has no meaning here: model.kernels.",
    f"{ACTOR}.optim.min_lr_ratio": "train.lr_decay falls towards 0.",
    f"{ACTOR}.optim.num_cycles": "train.lr_decay falls once.",
    f"{ACTOR}.calculate_entropy": "entropy is logged every step.",
    f"{ACTOR}.shuffle": "groups are shuffled into mini-batches by train.seed.",
    f"{ACTOR}.checkpoint": "a checkpoint holds everything that is needed to resume.",
    "actor_rollout_ref.ref": "the reference, where there is a KL term, runs like the policy.",
    "actor_rollout_ref.hybrid_engine": ALWAYS,
    f"{MODEL}.use_remove_padding": ALWAYS,
    f"{MODEL}.use_fused_kernels": "model.kernels, fused by default.",
    f"{MODEL}.use_shm": "has no meaning here.",
    f"{MODEL}.trust_remote_code": "code that comes with a model is never run.",
    f"{ROLLOUT}.gpu_memory_utilization": "verl's vLLM sleeps while it trains, ours stays: rollout.vllm.",
    f"{ROLLOUT}.log_prob_*": "old log-probs are computed with train.tokens_per_microbatch.",
    f"{ROLLOUT}.calculate_log_probs": "the engine's log-probs are kept and compared every step.",
    f"{ROLLOUT}.enable_chunked_prefill": "the engine decides.",
    f"{ROLLOUT}.max_num_batched_tokens": "the engine decides.",
    f"{ROLLOUT}.max_num_seqs": "of all engines together: rollout.max_concurrent_sequences.",
    f"{ROLLOUT}.max_model_len": "limits.max_prompt_tokens + limits.max_response_tokens.",
    f"{ROLLOUT}.enforce_eager": "the engine decides.",
    f"{ROLLOUT}.free_cache_engine": "the engine decides.",
    f"{ROLLOUT}.engine_kwargs": "the engine decides.",
    f"{ROLLOUT}.load_format": "the engine decides.",
    f"{ROLLOUT}.dtype": "model.dtype.",
    f"{ROLLOUT}.mode": "dynamic sampling streams (sampling.schedule); there is no server.",
    f"{ROLLOUT}.multi_turn": "several turns are an environment here: data.environment and limits.max_turns.",
    f"{ROLLOUT}.agent": "an agent is written as an environment here: data.environment = package.module:Class.",
    f"{ROLLOUT}.prompt_length": "limits.max_prompt_tokens.",
    f"{ROLLOUT}.response_length": "limits.max_response_tokens.",
    ROLLOUT: "the engine decides.",
    f"{MODEL}.override_config": "the model's config.json as it is.",
    "algorithm.gamma": "a group advantage has no discount.",
    "algorithm.lam": "a group advantage has no λ.",
    "trainer.critic_warmup": "a group advantage has no critic.",
    "critic": "a group advantage has no critic.",
    "algorithm.filter_groups.metric": "groups are filtered by the verdict (accuracy), never by the shaped reward.",
    "reward_model.enable": "rewards come from a verifier (rewards.verifier), not from a model.",
    "reward_model.launch_reward_fn_async": "responses are verified while others are generated.",
    "reward_model.num_workers": "rewards.workers.",
    "trainer.val_before_train": "always so where there is an evaluation.",
    "trainer.val_only": "`dapo eval`.",
    "trainer.experiment_name": "the run's folder: --out.",
    "trainer.default_local_dir": "the run's folder: --out.",
    "trainer.default_hdfs_dir": "the run's folder: --out.",
    "trainer.resume_mode": "`dapo resume RUN`.",
    "trainer.resume_from_path": "`dapo resume RUN`.",
    "trainer.log_val_generations": "`dapo report` shows the responses (records.every_steps).",
    "trainer.rollout_data_dir": "records.every_steps writes them into the run's folder.",
    "trainer.balance_batch": ALWAYS,
    "trainer.device": "model.device.",
    "ray_*": "Ray is addressed by its own environment.",
    "global_profiler": "has no meaning here.",
    "algorithm.rollout_correction": "only truncated importance sampling by token: algorithm.correction.cap.",
    "custom_reward_function": OWN_REWARD,
    "reward.custom_reward_function": OWN_REWARD,
}
TASK = (
    f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.agent", f"{MODEL}.override_config", "algorithm.filter_groups.metric",
    "reward_model.enable", "custom_reward_function", "reward.custom_reward_function",
)  # fmt: skip
TRAINING = (f"{ACTOR}.optim.min_lr_ratio", f"{ACTOR}.optim.num_cycles", "algorithm.rollout_correction")


def from_verl(s: Settings, *, rows: int | None) -> Translation:
    """A recipe with the meaning of verl's keys; what has none is listed."""
    out = Translation("verl")
    take_model(out, s.text(f"{MODEL}.path"))
    prompts, generated, train_set = batches(s, out)
    algorithm(s, out)
    lengths_and_shaping(s, out)
    optimizer(s, out)
    rollouts(s, out)
    verifier(s, out)
    evaluation(s, out)
    trainer(s, out, prompts=generated or prompts, rows=rows, train_set=train_set)
    take_rest(s, out, REASONS, task=TASK, training=TRAINING)
    return out


def batches(s: Settings, out: Translation) -> tuple[int, int | None, str]:
    """Prompts per step, prompts per generation batch, and the training set."""
    files = s.texts("data.train_files")
    names = take_data(out, "data.train", files, files.value)
    if not names:
        out.put("data.train", "TRAIN", "not in the file")
        out.means_other("data.train_files", "not in the file: set data.train.")
    prompts = s.count("data.train_batch_size", default=1024)
    out.take("sampling.prompts_per_step", prompts)
    n = s.count(f"{ROLLOUT}.n", default=1)
    out.take("sampling.responses_per_prompt", n)
    mini = s.count(f"{ACTOR}.ppo_mini_batch_size", default=256)
    updates = divided(
        s, prompts.value, mini.value, s.find(f"{ACTOR}.ppo_mini_batch_size"), "prompts per step / prompts per update"
    )
    out.put("train.updates_per_step", updates, f"train_batch_size / {mini.origin}")
    out.means_other(mini.origin, f"counts prompts per update; ours counts updates per step: {updates}.")
    generated = s.count("data.gen_batch_size")
    return prompts.value, generated.value, names[0] if names else ""


def algorithm(s: Settings, out: Translation) -> None:
    estimator = s.text("algorithm.adv_estimator", default="gae")
    if estimator.value not in ADVANTAGES:
        setting = s.find("algorithm.adv_estimator")
        assert setting is not None, "the default is a kind we know"
        raise s.refuse(setting, "no such advantage here.", f"There are {', '.join(ADVANTAGES)}.")
    has_critic = estimator.value == "gae"
    out.take("algorithm.advantage", estimator, "gae" if has_critic else "group")
    mean(s, out)
    loss(s, out, has_critic)
    kl(s, out, has_critic)
    if has_critic:
        critic(s, out)
    else:
        scaled = s.flag("algorithm.norm_adv_by_std_in_grpo", default=True)
        out.take("algorithm.group.std", scaled, "sample" if scaled.value else "none")
        for key, value in ADVANTAGES[estimator.value].items():
            out.put(f"algorithm.group.{key}", value, estimator.origin)
    dynamic(s, out, has_critic)
    correction(s, out)
    entropy = s.real(f"{ACTOR}.entropy_coeff", default=0.0)
    if entropy.value:
        out.take("algorithm.entropy_coefficient", entropy)


def correction(s: Settings, out: Translation) -> None:
    """verl's rollout correction; bounds written "low_high" are IcePop's mask."""
    place = "algorithm.rollout_correction"
    level = s.choice(f"{place}.rollout_is", known=("token", "sequence"), what="importance weights", default="token")
    names = (f"{ACTOR}.tis_imp_ratio_cap", f"{place}.rollout_is_threshold")
    setting = s.find(*names)
    if setting is not None and "_" in str(setting.value):
        low, high = (s.real_of(setting, part) for part in str(setting.value).split("_", 1))
        take_correction(out, s.text(*names), cap=high, floor=low, kind="mask", level=level.value)
        return
    cap = s.real(*names, default=2.0 if level.is_given else None)
    if cap.value is not None and cap.value > 0:
        take_correction(out, cap, cap=cap.value, floor=None, kind="truncate", level=level.value)


def mean(s: Settings, out: Translation) -> None:
    mode = s.text(f"{ACTOR}.loss_agg_mode", default="token-mean")
    if mode.value not in MEANS:
        setting = s.find(f"{ACTOR}.loss_agg_mode")
        assert setting is not None, "the default is known"
        raise s.refuse(setting, "no such mean of the loss here.", f"There are {', '.join(MEANS)}.")
    out.take("algorithm.loss_aggregation", mode, MEANS[mode.value])
    if mode.value == "seq-mean-token-sum":
        out.put("algorithm.loss_constant_tokens", 1, f"{mode.origin}: the sum of a response's tokens")
    if mode.value == "token-mean":
        out.means_other(
            mode.origin, "counted over the whole update, all micro-batches and ranks; older verl counted a micro-batch."
        )


def loss(s: Settings, out: Translation, has_critic: bool) -> None:
    mode = s.choice(f"{ACTOR}.policy_loss.loss_mode", known=LOSSES, what="policy loss", default="vanilla")
    name = LOSSES[mode.value]
    clip(s, out)
    if name == "gspo":
        out.put("algorithm.loss_aggregation", "sequence", f"{mode.origin}: always seq-mean-token-mean in verl")
        out.keys.pop("algorithm.loss_constant_tokens", None)
    if name == "cispo" and out.keys["algorithm.clip.low"] >= 1:
        out.put("algorithm.clip.low", "none", out.origin["algorithm.clip.low"])
    if name != "clip":
        out.put("algorithm.clip.dual", "none", f"{mode.origin}: verl has none there")
    out.take("algorithm.loss", mode, "gspo-token" if name == "gspo" and has_critic else name)


def clip(s: Settings, out: Translation) -> None:
    low, high = s.real(f"{ACTOR}.clip_ratio_low", default=0.2), s.real(f"{ACTOR}.clip_ratio_high", default=0.2)
    both = s.real(f"{ACTOR}.clip_ratio")
    if both.is_given and not (low.is_given and high.is_given):
        out.means_other(both.origin, "verl reads clip_ratio_low and clip_ratio_high (0.2 each); so does this recipe.")
    out.take("algorithm.clip.low", low)
    out.take("algorithm.clip.high", high)
    out.take("algorithm.clip.dual", s.real(f"{ACTOR}.clip_ratio_c", default=3.0))


def kl(s: Settings, out: Translation, has_critic: bool) -> None:
    in_loss, in_reward = s.flag(f"{ACTOR}.use_kl_loss", default=False), s.flag("algorithm.use_kl_in_reward")
    weight = s.real(f"{ACTOR}.kl_loss_coef", default=0.001)
    reward_weight = s.real("algorithm.kl_ctrl.kl_coef", default=0.001)
    s.find(f"{ACTOR}.kl_loss_type", "algorithm.kl_penalty")  # read below, where there is a KL term
    coefficient = Value(0.0, in_loss.origin, in_loss.is_given)
    if in_loss.value and weight.value:
        coefficient = weight
        out.put("algorithm.kl.place", "loss", in_loss.origin)
        take_kl_kind(s, out, f"{ACTOR}.kl_loss_type", default="low_var_kl")
    elif in_reward.value and reward_weight.value and has_critic:
        coefficient = reward_weight
        out.put("algorithm.kl.place", "reward", in_reward.origin)
        take_kl_kind(s, out, "algorithm.kl_penalty", default="kl")
    elif in_reward.value and reward_weight.value:
        out.has_none(in_reward.origin, "a KL penalty in the reward needs an advantage per token (gae); left out.")
    out.take("algorithm.kl.coefficient", coefficient)


def take_kl_kind(s: Settings, out: Translation, key: str, *, default: str) -> None:
    """A + asks for k2's gradient under another value (straight through); the value is what we take."""
    known = [*KL_KINDS, *(f"{kind}+" for kind in KL_KINDS)]
    kind = s.choice(key, known=known, what="estimator of the KL", default=default)
    out.take("algorithm.kl.kind", kind, KL_KINDS[kind.value.rstrip("+")])


def critic(s: Settings, out: Translation) -> None:
    out.take("algorithm.gae.gamma", s.real("algorithm.gamma", default=1.0))
    out.take("algorithm.gae.lam", s.real("algorithm.lam", default=1.0))
    out.put("algorithm.gae.whiten", True, "verl's default")
    out.take("algorithm.critic.lr", s.real("critic.optim.lr", default=1e-5))
    out.take("algorithm.critic.value_clip", s.real("critic.cliprange_value", default=0.5))
    warmup = s.integer("trainer.critic_warmup", default=0)
    out.take("algorithm.critic.pretrain_responses", warmup, warmup.value * out.responses_per_step)
    if warmup.value:
        said = "the policy is frozen meanwhile, and the critic learns Monte-Carlo returns until it stops improving."
        out.means_other(warmup.origin, said)
    for key in [key for key in s.by_key if key.startswith("critic.") and key not in s.asked]:
        s.find(key)
        out.has_none(s.by_key[key], "the critic starts from the policy and shares its other settings.")


def dynamic(s: Settings, out: Translation, has_critic: bool) -> None:
    enabled = s.flag("algorithm.filter_groups.enable", default=False)
    prompts, generated = s.count("data.train_batch_size", default=1024), s.count("data.gen_batch_size")
    most = s.integer("algorithm.filter_groups.max_num_gen_batches")
    if enabled.value and has_critic:
        out.has_none(enabled.origin, "dropping groups by their outcome biases a critic's targets; left out.")
    out.take("sampling.dynamic", enabled, bool(enabled.value and not has_critic))
    if not out.keys["sampling.dynamic"]:
        return
    batch = generated.value or prompts.value
    multiple = divided(s, batch, prompts.value, s.find("data.gen_batch_size"), "generation batch / prompts per step")
    out.put("sampling.schedule", "rounds", "verl's recipe generates in whole batches")
    out.means_other(
        generated.origin if generated.is_given else enabled.origin,
        'kept as rounds; sampling.schedule = "stream" trains on the same groups and wastes less.',
    )
    out.put("sampling.generation_multiple", multiple, f"{generated.origin} / train_batch_size")
    if most.is_given and most.value > 0:
        tried = most.value * batch
        out.put("sampling.max_prompts_tried_per_step", tried, f"{most.origin} x gen_batch_size")
        out.put("sampling.fill_policy", "error", "verl's recipe raises")
        out.means_other(most.origin, f"{tried:,} prompts per step. Other ways out than an error: sampling.fill_policy.")
    elif most.is_given:
        out.means_other(most.origin, "0 means no limit; here it is 10 x prompts_per_step, then sampling.fill_policy.")
    metric = s.text("algorithm.filter_groups.metric")
    if metric.is_given and metric.value != "acc":
        out.means_other(metric.origin, "groups are filtered by the verdict (accuracy), never by the shaped reward.")


def lengths_and_shaping(s: Settings, out: Translation) -> None:
    out.take("limits.max_prompt_tokens", s.integer("data.max_prompt_length", default=512))
    response = s.integer("data.max_response_length", default=512)
    out.take("limits.max_response_tokens", response)
    homes = (
        "reward_model.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    )
    enabled = s.flag(*(f"{home}.enable" for home in homes), default=False)
    length = s.integer(*(f"{home}.len" for home in homes))
    factor = s.real(*(f"{home}.penalty_factor" for home in homes), default=1.0)
    s.find(*(f"{home}.log" for home in homes))
    out.put("shaping.overlong_filter", False, "verl has none")
    is_on = bool(enabled.value and length.value)
    out.take("shaping.overlong_penalty", factor if is_on else enabled, factor.value if is_on else 0.0)
    if is_on:
        out.take("shaping.overlong_buffer_tokens", length)
    limit = s.integer("reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len")
    if limit.is_given and limit.value != response.value:
        out.means_other(limit.origin, "the penalty is measured against limits.max_response_tokens.")


def optimizer(s: Settings, out: Translation) -> None:
    out.take("train.lr", s.real(f"{ACTOR}.optim.lr", default=1e-6))
    out.take("train.weight_decay", s.real(f"{ACTOR}.optim.weight_decay", default=0.01))
    out.take_given("train.betas", s.reals(f"{ACTOR}.optim.betas", count=2))
    take_decay(out, s.text(f"{ACTOR}.optim.lr_scheduler_type", f"{ACTOR}.optim.warmup_style", default="constant"))
    out.take("train.max_grad_norm", s.real(f"{ACTOR}.grad_clip", default=1.0))
    out.take("train.epochs_per_step", s.count(f"{ACTOR}.ppo_epochs", default=1))
    out.take("train.tokens_per_microbatch", s.integer(f"{ACTOR}.ppo_max_token_len_per_gpu", default=16384))
    out.take("train.gradient_checkpointing", s.flag(f"{MODEL}.enable_gradient_checkpointing", default=True))
    rank = s.integer(f"{MODEL}.lora_rank", default=0)
    alpha = s.real(f"{MODEL}.lora_alpha", default=16.0)
    if rank.value:
        out.take("model.lora.rank", rank)
        out.take("model.lora.alpha", alpha)


def rollouts(s: Settings, out: Translation) -> None:
    out.take("sampling.temperature", s.real(f"{ROLLOUT}.temperature", default=1.0))
    whole_distribution(out, s.real(f"{ROLLOUT}.top_p"), s.integer(f"{ROLLOUT}.top_k"))
    engine, parallel = s.text(f"{ROLLOUT}.name"), s.integer(f"{ROLLOUT}.tensor_model_parallel_size", default=1)
    if parallel.value > 1:
        out.put("rollout.engine", "vllm", engine.origin)
        out.take("rollout.tensor_parallel", parallel)
        out.means_other(parallel.origin, "its ranks are trainer ranks too; run on CPUs only so far (docs/scaling.md).")
    elif engine.is_given:
        out.means_other(
            engine.origin,
            'our own engine generates the responses; rollout.engine = "vllm" for an architecture it does not know.',
        )


def verifier(s: Settings, out: Translation) -> None:
    manager = s.text("reward_model.reward_manager", "reward.reward_manager.name", default="naive")
    if manager.value == "dapo":
        out.take("rewards.verifier", manager, "dapo-published")
        out.put("rewards.truncated_may_be_correct", True, "the script looks at the text only")
        out.means_other(manager.origin, 'the published rule, bit for bit; "math" is ours and misses fewer answers.')
    else:
        out.take("rewards.verifier", manager, "math")
        out.means_other(manager.origin, "verl chooses a rule by the data's source; this recipe takes math for all.")


def evaluation(s: Settings, out: Translation) -> None:
    files = s.texts("data.val_files")
    names = take_data(out, "data.eval", files, files.value)
    every, n = s.integer("trainer.test_freq", default=-1), s.count(f"{ROLLOUT}.val_kwargs.n", default=1)
    out.take("eval.every_steps", every, max(0, every.value))
    temperature, top_p = s.real(f"{ROLLOUT}.val_kwargs.temperature", default=0.0), s.real(f"{ROLLOUT}.val_kwargs.top_p")
    top_k = without_top_k(s.integer(f"{ROLLOUT}.val_kwargs.top_k"))
    samples = s.flag(f"{ROLLOUT}.val_kwargs.do_sample", default=False)
    if every.value <= 0 or not names:
        return
    copies = COPIES.get(names[0], 1)
    out.put("eval.k", n.value * copies, n.origin + (f" x {copies} copies in the file" if copies > 1 else ""))
    if not samples.value:
        out.take("eval.temperature", samples, 0.0)
        if temperature.value:
            out.means_other(
                temperature.origin,
                "greedily, as verl's workers do unless val_kwargs.do_sample is true; its agent loops sample still: "
                "set eval.temperature where yours did.",
            )
        return
    out.take("eval.temperature", temperature)
    out.take("eval.top_p", top_p if top_p.value is not None else Value(1.0, "verl's default", is_given=False))
    out.take("eval.top_k", top_k)


def trainer(s: Settings, out: Translation, *, prompts: int, rows: int | None, train_set: str) -> None:
    steps, epochs = s.integer("trainer.total_training_steps"), s.integer("trainer.total_epochs", default=30)
    if steps.is_given:
        out.take("train.steps", steps)
    else:
        steps_of(out, epochs, prompts=prompts, rows=rows, train_set=train_set)
    warmup = s.integer(f"{ACTOR}.optim.lr_warmup_steps", default=-1)
    ratio = s.real(f"{ACTOR}.optim.lr_warmup_steps_ratio", default=0.0)
    if warmup.value < 0:
        warmup = Value(int(ratio.value * out.keys["train.steps"]), ratio.origin, ratio.is_given)
    out.take("train.warmup_steps", warmup)
    save = s.integer("trainer.save_freq", default=-1)
    out.take("checkpoint.every_steps", save, max(0, save.value))
    keep = s.integer("trainer.max_actor_ckpt_to_keep")
    out.take_given("checkpoint.keep", keep)
    nodes, each = s.count("trainer.nnodes", default=1), s.count("trainer.n_gpus_per_node", default=8)
    gpus = nodes.value * each.value
    if gpus > 1:
        out.put("cluster.backend", "ray", "verl runs on Ray")
        out.put("cluster.gpus", gpus, f"{nodes.origin} x {each.origin}")
    loggers = s.texts("trainer.logger")
    known = [name for name in loggers.value if name in ("tensorboard", "wandb", "trackio")]
    out.take_given("tracking.to", loggers, known)
    project = s.text("trainer.project_name")
    if {"wandb", "trackio"} & set(known):
        out.take_given("tracking.project", project)
    elif project.is_given:
        out.has_none(project.origin, "a project name is for wandb and trackio only.", Weight.MINOR)
    others = [name for name in loggers.value if name not in (*known, "console")]
    if others:
        why = f"no tracker {', '.join(others)}; there are tensorboard, wandb, trackio."
        out.has_none(loggers.origin, why, Weight.MINOR)
