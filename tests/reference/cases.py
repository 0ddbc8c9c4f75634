"""Which keys of the schema are compared with the reference trainer, from which base, with which values.

A case changes one key and leaves the rest; the base is one in which the key has an effect. A key that a step's
mathematics does not read stands in `ELSEWHERE`, with the test that shows what it does, or in `NOT_IN_A_STEP`, with the
reason.
"""

from dataclasses import dataclass, field
from typing import Any, get_args

from dapo.config.schema import PolicyLossName

# Each preset as its paper has it; what is not named has the schema's default.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo-naive": {
        "algorithm.advantage": "group",
        "algorithm.loss_aggregation": "sequence",
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.2,
        "train.warmup_steps": 20,
    },
    "grpo": {
        "algorithm.advantage": "group",
        "algorithm.loss_aggregation": "sequence",
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.2,
        "algorithm.kl.coefficient": 0.04,
    },
    "dr-grpo": {
        "algorithm.advantage": "group",
        "algorithm.loss_aggregation": "constant",
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.2,
        "algorithm.group.std": "none",
    },
    "dapo": {
        "algorithm.advantage": "group",
        "algorithm.loss_aggregation": "token",
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.28,
        "shaping.overlong_filter": True,
        "shaping.overlong_penalty": 1.0,
        "sampling.dynamic": True,
        "train.warmup_steps": 20,
    },
    "dapo-fast": {
        "algorithm.advantage": "group",
        "algorithm.loss_aggregation": "token",
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.28,
        "algorithm.correction.cap": 2.0,
        "shaping.overlong_filter": True,
        "shaping.overlong_penalty": 1.0,
        "sampling.dynamic": True,
        "sampling.carry_over": True,
        "sampling.partial_rollouts": True,
        "sampling.finish_overtaken": True,
        "sampling.predictive": True,
        "sampling.max_staleness_updates": 16,
        "train.warmup_steps": 20,
    },
    "cispo": {
        "algorithm.advantage": "group",
        "algorithm.loss": "cispo",
        "algorithm.loss_aggregation": "token",
        "algorithm.clip.low": None,
        "algorithm.clip.high": 4.0,
        "shaping.overlong_penalty": 1.0,
        "sampling.dynamic": True,
    },
    "gspo": {
        "algorithm.advantage": "group",
        "algorithm.loss": "gspo",
        "algorithm.loss_aggregation": "sequence",
        "algorithm.clip.low": 3e-4,
        "algorithm.clip.high": 4e-4,
    },
    "scalerl": {
        "algorithm.advantage": "group",
        "algorithm.loss": "cispo",
        "algorithm.loss_aggregation": "prompt",
        "algorithm.clip.low": None,
        "algorithm.clip.high": 4.0,
        "algorithm.group.std_over": "batch",
        "sampling.dynamic": True,
        "sampling.refill": False,
        "sampling.retire_above": 0.9,
        "train.weight_decay": 0.01,
    },
    "reinforce++": {
        "algorithm.advantage": "group",
        "algorithm.loss_aggregation": "token",
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.2,
        "algorithm.group.baseline": "batch",
        "algorithm.group.std_over": "tokens",
    },
    "rloo": {
        "algorithm.advantage": "group",
        "algorithm.loss": "reinforce",
        "algorithm.loss_aggregation": "constant",
        "algorithm.loss_constant_tokens": 1,
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.2,
        "algorithm.group.baseline": "leave_one_out",
        "algorithm.group.std": "none",
    },
    "rft": {
        "algorithm.advantage": "none",
        "algorithm.loss_aggregation": "token",
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.2,
        "algorithm.positive_nll": 1.0,
    },
    "distillation": {
        "algorithm.advantage": "none",
        "algorithm.loss_aggregation": "token",
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.2,
        "algorithm.kl.coefficient": 1.0,
        "algorithm.kl.kind": "k1",
        "algorithm.kl.place": "advantage",
    },
    "ppo": {
        "algorithm.advantage": "gae",
        "algorithm.loss_aggregation": "token",
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.2,
        "algorithm.gae.lam": 1.0,
        "algorithm.gae.whiten": True,
        "algorithm.critic.value_clip": 0.5,
        "algorithm.critic.pretrain_responses": 4096,
        "algorithm.critic.pretrain_epochs": 1,
    },
    "vanilla-ppo": {
        "algorithm.advantage": "gae",
        "algorithm.loss_aggregation": "sequence",
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.2,
        "algorithm.gae.lam": 0.95,
        "algorithm.gae.whiten": True,
        "algorithm.critic.lr": 2e-6,
        "algorithm.critic.value_clip": 0.5,
        "train.epochs_per_step": 4,
    },
    "vapo": {
        "algorithm.advantage": "gae",
        "algorithm.loss_aggregation": "token",
        "algorithm.clip.low": 0.2,
        "algorithm.clip.high": 0.28,
        "algorithm.positive_nll": 0.1,
        "algorithm.gae.lam_critic": 1.0,
        "algorithm.gae.length_adaptive_alpha": 0.05,
        "algorithm.gae.length_adaptive_floor": 400,
        "algorithm.gae.whiten": True,
        "algorithm.critic.pretrain_responses": 4096,
    },
}

# GSPO's two forms differ only where a response's tokens have advantages of their own, and the first refuses those.
OF_GROUPS = tuple(name for name in get_args(PolicyLossName) if name != "gspo-token")
OF_TOKENS = tuple(name for name in get_args(PolicyLossName) if name != "gspo")
DAPO = {"preset": "dapo"}
CORRECTED = {"preset": "dapo", "algorithm.correction.cap": 1.5}
MASKED = {"preset": "grpo", "algorithm.correction.cap": 1.5, "algorithm.correction.kind": "mask"}
OVER_BATCH = {"preset": "dapo", "algorithm.group.std_over": "batch"}
CISPO = {"preset": "dapo", "algorithm.loss": "cispo"}
GSPO = {"preset": "dapo", "algorithm.loss": "gspo"}
GRPO = {"preset": "grpo"}
# One pass over the rows: a critic doubles the work, and presets and `train.epochs_per_step` show a second one.
ONE_EPOCH = {"algorithm.critic.lr": 1e-2, "train.epochs_per_step": 1}
PPO = {"preset": "ppo"} | ONE_EPOCH
VAPO = {"preset": "vapo"} | ONE_EPOCH
KL_IN_REWARD = PPO | {"algorithm.kl.coefficient": 0.2, "algorithm.kl.place": "reward"}
DISTILLED = {"preset": "distillation"}
BESIDE = DISTILLED | {"algorithm.advantage": "group"}  # beside the verdict
KL_IN_LOSS = PPO | {"algorithm.kl.coefficient": 0.2}
FORMAT = {"format": {"function": "unused:format", "verifier": None, "weight": 0.5}}
WEIGHTED = {"correct": {"function": None, "verifier": None, "weight": 2.0}}
PENALTY = {
    "tidy": {"function": None, "verifier": "exact", "weight": 1.5},
    "format": {"function": "unused:format", "verifier": None, "weight": -0.7},  # unknown for some responses
}
TWO_PARTS = DAPO | {"rewards.parts": FORMAT}
GDPO = DAPO | {"rewards.aggregation": "normalize_then_sum"}
ALL_TERMS = VAPO | {"algorithm.kl.coefficient": 0.2, "algorithm.correction.cap": 1.5, "algorithm.gae.whiten": True}


@dataclass(frozen=True)
class Case:
    """`key` takes each of `values` in turn. `is_seen`: two values give two results; else all give the same one."""

    key: str
    values: tuple[Any, ...]
    base: dict[str, Any] = field(default_factory=dict)
    is_seen: bool = True

    @property
    def name(self) -> str:
        return f"{self.key} in {self.base['preset']}"


CASES = (
    Case("limits.max_response_tokens", (12, 14, 20), DAPO),
    Case("limits.max_response_tokens", (12, 20), {"preset": "dr-grpo"}),
    Case("rewards.parts", ({}, FORMAT, FORMAT | WEIGHTED, PENALTY), DAPO),
    Case("rewards.parts", ({}, FORMAT), PPO),
    Case("rewards.aggregation", ("sum_then_normalize", "normalize_then_sum"), DAPO),
    Case("rewards.aggregation", ("sum_then_normalize", "normalize_then_sum"), TWO_PARTS),
    Case("rewards.parts", ({}, FORMAT, FORMAT | WEIGHTED, PENALTY), GDPO),
    Case("rewards.control", ("none", "shuffled", "negated"), TWO_PARTS),
    Case("algorithm.group.std", ("sample", "population"), GDPO | {"rewards.parts": FORMAT}),
    Case("algorithm.group.eps", (1e-6, 0.1), GDPO | {"rewards.parts": FORMAT}),
    Case("rewards.control", ("none", "shuffled", "negated"), DAPO),
    Case("rewards.control", ("none", "shuffled", "negated"), VAPO),  # who is right decides what is imitated
    Case("shaping.overlong_filter", (True, False), DAPO),
    Case("shaping.overlong_filter", (True, False), PPO),  # whitening and the critic leave them out too
    Case("shaping.overlong_penalty", (1.0, 0.5, 0.0), DAPO),
    Case("shaping.overlong_penalty", (1.0, 0.0), PPO),
    Case("shaping.overlong_buffer_tokens", (4, 6, 10), DAPO),
    Case("sampling.prompts_per_step", (4, 5), DAPO),
    Case("sampling.responses_per_prompt", (4, 5), DAPO),
    Case("sampling.temperature", (1.0, 0.7, 1.6), GRPO),
    Case("sampling.temperature", (0.7, 1.6), KL_IN_REWARD),
    Case("algorithm.advantage", ("group", "gae", "none"), {"preset": "ppo", "algorithm.positive_nll": 0.3}),
    Case("algorithm.loss", OF_GROUPS, DAPO),
    Case("algorithm.loss", OF_TOKENS, PPO),
    Case("algorithm.loss_aggregation", ("token", "sequence", "prompt", "constant"), DAPO),
    Case("algorithm.loss_aggregation", ("token", "sequence", "prompt", "constant"), GSPO),
    Case("algorithm.loss_aggregation", ("token", "sequence", "prompt", "constant"), ALL_TERMS),
    Case("algorithm.loss_constant_tokens", (None, 5, 40), {"preset": "dr-grpo"}),
    Case("algorithm.old_logp", ("recompute", "bypass"), DAPO),
    Case("algorithm.old_logp", ("recompute", "bypass"), KL_IN_REWARD),
    Case("algorithm.correction.cap", (None, 0.8, 1.5), DAPO),
    Case("algorithm.correction.floor", (None, 0.7), CORRECTED),
    Case("algorithm.correction.kind", ("truncate", "mask"), CORRECTED | {"algorithm.correction.floor": 0.7}),
    Case("algorithm.correction.level", ("token", "sequence", "geometric"), CORRECTED),
    Case("algorithm.correction.level", ("token", "sequence", "geometric"), MASKED),
    Case("algorithm.correction.floor", (None, 0.7), MASKED),
    Case("algorithm.positive_nll", (0.0, 0.1, 1.0), VAPO),
    Case("algorithm.clip.low", (0.05, 0.2, 0.6), DAPO),
    Case("algorithm.clip.low", (None, 0.05, 0.2), CISPO),
    Case("algorithm.clip.low", (0.1, 0.5), GSPO),
    Case("algorithm.clip.high", (0.05, 0.28, 0.9), DAPO),
    Case("algorithm.clip.high", (0.05, 0.28), CISPO),
    Case("algorithm.clip.high", (0.05, 0.28), GSPO),
    Case("algorithm.clip.dual", (None, 1.1, 1.5), DAPO),
    Case("algorithm.clip.dual", (None, 1.02), GSPO),
    Case("algorithm.group.std", ("sample", "population", "none"), DAPO),
    Case("algorithm.group.eps", (1e-6, 0.1, 0.5), DAPO),
    Case("algorithm.group.baseline", ("group", "leave_one_out", "batch"), DAPO | {"algorithm.group.std": "none"}),
    Case("algorithm.group.baseline", ("group", "batch"), OVER_BATCH),
    Case("algorithm.group.std_over", ("group", "batch", "batch_rewards", "tokens"), DAPO),
    Case("algorithm.group.std", ("sample", "population"), OVER_BATCH),
    Case("algorithm.group.eps", (1e-6, 0.1), OVER_BATCH),
    Case("algorithm.entropy_coefficient", (0.0, 0.1), DAPO | {"sampling.temperature": 0.7}),
    Case("algorithm.entropy_coefficient", (0.0, 0.1), ALL_TERMS),
    Case("algorithm.gae.gamma", (1.0, 0.9), PPO),
    Case("algorithm.gae.lam", (0.95, 0.5, 1.0), PPO),
    Case("algorithm.gae.lam_critic", (None, 1.0, 0.3, 0.0), PPO | {"algorithm.gae.lam": 0.95}),
    Case("algorithm.gae.length_adaptive_alpha", (None, 0.05, 0.3), VAPO | {"algorithm.gae.length_adaptive_floor": 1}),
    Case("algorithm.gae.length_adaptive_floor", (1.0, 1.5, 400.0), VAPO),
    Case("algorithm.gae.whiten", (True, False), PPO | {"shaping.overlong_filter": True}),
    Case("algorithm.critic.lr", (None, 0.0, 3e-3, 1e-2), PPO),
    Case("algorithm.critic.lr", (None, 1e-2), PPO | {"train.warmup_steps": 3, "train.lr_decay": "linear"}),
    Case("algorithm.critic.value_clip", (None, 0.5, 0.05), PPO),
    Case("algorithm.critic.path", (None, "{folder}/critic"), PPO),
    Case("algorithm.kl.coefficient", (0.0, 0.04, 0.5), GRPO),
    Case("algorithm.kl.kind", ("k1", "k2", "k3", "abs"), GRPO),
    Case("algorithm.kl.kind", ("k1", "k2", "k3", "abs"), KL_IN_REWARD),
    Case("algorithm.kl.place", ("loss", "reward", "advantage"), KL_IN_LOSS | {"algorithm.kl.kind": "k1"}),
    Case("algorithm.kl.place", ("loss", "advantage"), BESIDE),
    Case("algorithm.kl.path", (None, "{folder}/policy"), GRPO),
    Case("algorithm.kl.path", (None, "{folder}/policy"), BESIDE),
    Case("algorithm.kl.coefficient", (0.5, 1.0), DISTILLED),
    Case("algorithm.advantage", ("group", "gae", "none"), DISTILLED),
    Case("algorithm.loss", OF_TOKENS, DISTILLED),
    Case("algorithm.old_logp", ("recompute", "bypass"), DISTILLED),
    Case("sampling.temperature", (0.7, 1.6), BESIDE),
    Case("train.steps", (5, 9), DAPO | {"train.lr_decay": "linear", "train.warmup_steps": 1}),
    Case("train.lr", (0.0, 2e-2, 3e-2), PPO),
    Case("train.warmup_steps", (0, 3, 7), DAPO),
    Case("train.lr_decay", ("none", "linear", "cosine"), DAPO | {"train.warmup_steps": 1}),
    Case("train.updates_per_step", (1, 2, 3, 4), DAPO),
    Case("train.epochs_per_step", (1, 2, 3), PPO),
    Case("train.tokens_per_microbatch", (1, 40, 16384), ALL_TERMS, is_seen=False),
    Case("train.weight_decay", (0.0, 0.1), PPO),
    Case("train.betas", ((0.9, 0.999), (0.5, 0.9)), PPO),
    Case("train.max_grad_norm", (0.05, 0.5, 100.0), PPO),
    Case("train.gradient_checkpointing", (False, True, "auto"), PPO, is_seen=False),
    Case("train.moments", ("float32", "host"), PPO, is_seen=False),
    Case("train.seed", (0, 7), DAPO | {"rewards.control": "shuffled"}),
    Case("model.path", ("{folder}/reference", "{folder}/policy"), GRPO),  # which the penalty is for leaving
    Case("model.kernels", ("plain", "fused"), PPO, is_seen=False),
)

# Values that no case can have, and why.
LEFT_OUT = {
    ("shaping.overlong_buffer_tokens", None): "refused while there is a penalty; without one nobody reads it",
    ("train.moments", "int8"): "rounds: tests/trainer/test_optimizer.py::test_8_bit_moments_track_float32",
}

RUN = "tests/trainer/test_run.py::"
REFUSED = "tests/config/test_load.py::test_bad_overrides_name_key_value_reason_and_remedy"
SAMPLING = "tests/reference/test_sampling_keys.py::"
SCHEDULE = SAMPLING + "test_schedule_and_generation_multiple_change_what_is_tried_not_what_is_chosen"
EPISODES = "tests/trainer/test_episode_runs.py::"
DRAFTS = "tests/rollout/test_draft.py::test_drafts_change_no_bit_of_a_response"
MIXTURE = (
    "tests/trainer/test_mixture_runs.py::"
    "test_each_source_is_judged_by_its_own_verifier_and_a_stopped_run_resumes_exactly"
)
WHOLE_RUN = "tests/reference/test_whole_step.py::"

# What acts before a step or beside its mathematics -> the test that shows how.
ELSEWHERE = {
    "preset": WHOLE_RUN + "test_every_preset_does_what_the_papers_say",
    "model.dtype": "tests/trainer/test_loss_scale.py::test_a_power_of_two_gives_the_same_updates_bit_for_bit",
    "model.lora.rank": "tests/models/test_fused_layers.py::test_an_adapter_on_every_matrix_is_trained_the_same",
    "model.lora.alpha": "tests/models/test_fused_layers.py::test_an_adapter_on_every_matrix_is_trained_the_same",
    "model.lora.target_modules": "tests/models/test_policy_folders.py::test_lora_on_some_layers_and_its_scale",
    "model.lora.rank_stabilized": "tests/models/test_policy_folders.py::test_lora_on_some_layers_and_its_scale",
    "model.lora.dropout": (
        "tests/trainer/test_qlora.py::test_dropout_does_not_depend_on_micro_batches_recomputation_or_a_restart"
    ),
    "model.lora.quantization": (
        "tests/trainer/test_qlora.py::test_a_run_is_that_of_lora_on_the_weights_the_codes_stand_for"
    ),
    "data.fields": "tests/data/test_problem_sets.py::test_fields_map_any_column",
    "data.template": "tests/data/test_prompt_format.py::test_templates_hold_the_question_as_it_is",
    "data.chat_template": "tests/data/test_prompt_format.py::test_the_chat_template_is_applied_once",
    "limits.max_prompt_tokens": (
        "tests/data/test_prompt_format.py::test_prompts_over_the_limit_are_dropped_and_counted_never_cut"
    ),
    "data.environment": EPISODES + "test_a_run_of_episodes_trains_records_and_resumes_exactly",
    "data.train.NAME.environment": EPISODES + "test_an_environment_of_one_source_leaves_the_others_alone",
    "limits.max_turns": "tests/rollout/test_episodes.py::test_what_runs_over_is_truncated",
    "rewards.verifier": "tests/rewards/test_pool.py::test_user_functions_give_values_and_their_errors_are_crashes",
    "rewards.cpu_seconds": "tests/rewards/test_pool.py::test_a_stuck_worker_is_killed_and_its_neighbours_lose_nothing",
    "rewards.memory_mb": "tests/rewards/test_pool.py::test_memory_is_bounded",
    "rewards.workers": "tests/rewards/test_pool.py::test_border_two_workers_judge_every_task_once_in_order",
    "rewards.truncated_may_be_correct": (
        "tests/rewards/test_pool.py::test_truncated_is_never_correct_but_for_the_published_rule"
    ),
    "sampling.top_p": REFUSED,
    "sampling.top_k": REFUSED,
    "sampling.dynamic": SAMPLING + "test_dynamic",
    "sampling.refill": SAMPLING + "test_without_refilling",
    "sampling.schedule": SCHEDULE,
    "sampling.generation_multiple": SCHEDULE,
    "sampling.max_prompts_tried_per_step": SAMPLING + "test_max_prompts_tried_per_step",
    "sampling.fill_policy": SAMPLING + "test_fill_policy",
    "sampling.carry_over": SAMPLING + "test_carry_over",
    "sampling.finish_overtaken": SAMPLING + "test_finish_overtaken",
    "sampling.partial_rollouts": SAMPLING + "test_partial_rollouts",
    "sampling.predictive": SAMPLING + "test_predictive",
    "sampling.posteriors": (
        "tests/trainer/test_probe.py::test_a_run_starts_from_the_counts_and_resumes_without_the_file"
    ),
    "sampling.retire_above": (
        "tests/sampling/test_predictive.py::"
        "test_solved_problems_are_retired_until_nothing_else_is_left_or_they_are_failed"
    ),
    "data.train.NAME.weight": "tests/data/test_mixture.py::test_no_source_is_ever_a_whole_turn_off_its_share",
    "data.train.NAME.template": MIXTURE,
    "data.train.NAME.verifier": MIXTURE,
    "data.train.NAME.system_prompt": (
        "tests/data/test_prompt_format.py::test_a_row_that_is_a_chat_goes_to_the_model_as_it_is"
    ),
    "sampling.max_staleness_updates": SAMPLING + "test_max_staleness_updates",
    "algorithm.critic.pretrain_responses": WHOLE_RUN + "test_value_pretraining_fits_the_critic_to_what_came_out",
    "algorithm.critic.pretrain_epochs": WHOLE_RUN + "test_value_pretraining_fits_the_critic_to_what_came_out",
    "train.max_generated_tokens": RUN + "test_a_budget_of_tokens_ends_the_run_after_the_step_that_spends_it",
    "train.max_minutes": RUN + "test_a_budget_of_minutes_counts_steps_also_those_before_a_resume",
    "train.max_bad_updates": "tests/trainer/test_update.py::test_a_non_finite_loss_is_skipped_counted_and_bounded",
    "train.max_wait_s": "tests/waiting/test_watchdog.py::test_a_wait_beyond_its_limit_ends_the_run_by_name",
    "rollout.engine": "tests/rollout/test_local_engine.py::test_writes_what_the_plain_engine_writes",
    "rollout.max_concurrent_sequences": (
        "tests/rollout/test_local_engine.py::test_border_every_request_is_answered_once_by_five_rows_or_sixteen"
    ),
    "rollout.kv_cache_gib": "tests/rollout/test_local_engine.py::test_out_of_pages_the_same_tokens_a_little_later",
    "rollout.draft_tokens": DRAFTS,
    "rollout.draft_below_rows": DRAFTS,
    "rollout.exact": "tests/rollout/test_exact.py::test_sampled_and_trained_log_probs_are_the_same_bits",
    "rollout.quantization": (
        "tests/rollout/test_float8.py::test_log_probs_are_those_of_a_model_whose_products_are_rounded"
    ),
    "rollout.on_fault": (
        RUN + "test_logits_that_are_not_finite_are_events_and_the_config_says_whether_the_run_goes_on"
    ),
    "cluster.backend": (
        "tests/distributed/test_parts.py::test_ranks_in_step_make_as_many_passes_and_count_every_row_once"
    ),
    "cluster.shard": "tests/distributed/test_one_rank.py::test_one_sharded_rank_computes_what_the_plain_path_computes",
}

NOT_IN_A_STEP = {
    "model.revision": "names a commit of a hub",
    "model.device": "where the same arithmetic happens",
    "model.gpu_memory_gib": "how much room it has there",
    "data.train": "names the problems; groups are given here",
    "data.eval": "evaluation",
    "data.train.NAME.path": "names the problems; groups are given here",
    "data.eval.NAME.path": "evaluation",
    "data.eval.NAME.template": "evaluation",
    "data.eval.NAME.system_prompt": "evaluation",
    "data.eval.NAME.verifier": "evaluation",
    "data.eval.NAME.environment": "evaluation",
    "rollout.tensor_parallel": "how an engine is laid out",
    "rollout.vllm.gpu_memory_utilization": "how an engine is laid out",
    "eval.every_steps": "evaluation",
    "eval.k": "evaluation",
    "eval.temperature": "evaluation",
    "eval.top_p": "evaluation",
    "eval.top_k": "evaluation",
    "checkpoint.every_steps": "files",
    "checkpoint.keep": "files",
    "checkpoint.keep_best": "files",
    "checkpoint.resumable": "files",
    "checkpoint.format": "files",
    "records.every_steps": "files",
    "tracking.to": "files",
    "tracking.project": "files",
    "cluster.gpus": "how many processes share the work",
    "cluster.ranks_per_gpu": "how many of them share a card",
    "cluster.timeout_s": "how long a process waits",
}
