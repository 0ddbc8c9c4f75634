"""Checks across keys: combinations that make no sense, and keys that would have no effect."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dapo.config.schema import Config, LoraConfig
from dapo.config.sources import eval_sources, train_sources
from dapo.errors import ConfigError
from dapo.types import CORRECT, PART_NAME


def check_combinations(config: Config) -> None:
    """Raise on the first combination of values that cannot be trained with."""
    for check in CHECKS:
        check(config)


def check_group_size(config: Config) -> None:
    """A group advantage needs a group; a baseline over the step does not."""
    sampling, algorithm = config.sampling, config.algorithm
    if algorithm.advantage == "group" and algorithm.group.baseline != "batch" and sampling.responses_per_prompt < 2:
        raise _error(
            "sampling.responses_per_prompt",
            sampling.responses_per_prompt,
            "a group of one has no baseline, so a group advantage is undefined.",
            'Use 2 or more, or set algorithm.advantage = "gae".',
        )


def check_dtype(config: Config) -> None:
    """float16 is for GPUs. Whether device = "auto" finds one is known when the run starts."""
    if config.model.dtype == "float16" and config.model.device == "cpu":
        raise _error(
            "model.dtype",
            "float16",
            "is for GPUs, and model.device is cpu: its kernels are slow or missing there, and nothing is gained.",
            'Use "float32" or "auto", or set model.device = "cuda".',
        )


def check_quantization(config: Config) -> None:
    """A quantized base stays whole on its device, and the engine decodes on it."""
    kind = config.base_quantization
    if kind is None:
        return
    if config.rollout.engine == "vllm":
        raise _error(
            "model.lora.quantization",
            kind,
            "rollout.engine = vllm keeps weights of its own in 16 bits, so nothing would be saved.",
            'Set rollout.engine = "local", which decodes on these weights, or model.lora.quantization = "none".',
        )
    if config.rollout.quantization != "none":
        raise _error(
            "rollout.quantization",
            config.rollout.quantization,
            f"model.lora.quantization = {kind}: the frozen matrices are in fewer bits already, and stay so.",
            'Set rollout.quantization = "none", or model.lora.quantization = "none".',
        )
    if config.cluster.backend != "none" and config.cluster.shard == "full":
        raise _error(
            "model.lora.quantization",
            kind,
            "cluster.shard = full divides matrices over the GPUs, and quantized ones cannot be divided.",
            'Set cluster.shard = "none", a whole model on every GPU, or model.lora.quantization = "none".',
        )


def check_exact(config: Config) -> None:
    """Equal log-probs are of the local engine, on whole plain matrices. The device is known when the run starts."""
    if not config.rollout.exact:
        return
    if config.rollout.engine != "local":
        raise _error(
            "rollout.exact",
            True,
            f"rollout.engine = {config.rollout.engine} has kernels of its own, whose last bits the trainer lacks.",
            'Set rollout.engine = "local", or rollout.exact = false.',
        )
    if config.rollout.quantization != "none":
        raise _error(
            "rollout.exact",
            True,
            f"rollout.quantization = {config.rollout.quantization}: the trainer multiplies in more bits.",
            'Set rollout.quantization = "none", or rollout.exact = false.',
        )
    if config.model.lora.rank:
        raise _error(
            "rollout.exact",
            True,
            f"model.lora.rank = {config.model.lora.rank}: an adapter's products are not exact.",
            "Set model.lora.rank = 0 to train all weights, or rollout.exact = false.",
        )
    if config.cluster.backend != "none" and config.cluster.shard == "full":
        raise _error(
            "rollout.exact",
            True,
            "cluster.shard = full divides the matrices over the GPUs, and the trainer multiplies whole ones here.",
            'Set cluster.shard = "none", a whole model on every GPU, or rollout.exact = false.',
        )


def check_clip(config: Config) -> None:
    """The ratio's bounds, as the policy loss has them."""
    algorithm = config.algorithm
    if algorithm.clip.low is None and algorithm.loss != "cispo":
        raise _error(
            "algorithm.clip.low",
            "none",
            f"only the weight of algorithm.loss = cispo has no lower bound; this is {algorithm.loss}.",
            "Use a number above 0 and below 1; the paper has 0.2.",
        )
    if algorithm.clip.low is not None and not 0 < algorithm.clip.low < 1:
        raise _error(
            "algorithm.clip.low",
            algorithm.clip.low,
            "the ratio is clipped at 1 − low, which must lie between 0 and 1; at 1 or more nothing is ever clipped.",
            "Use a number above 0 and below 1; the paper has 0.2.",
        )


def check_overlong(config: Config) -> None:
    """The soft overlong penalty needs its buffer length."""
    shaping, limits = config.shaping, config.limits
    if shaping.overlong_penalty > 0 and shaping.overlong_buffer_tokens is None:
        raise ConfigError(
            "shaping.overlong_buffer_tokens: missing; the soft overlong penalty needs a buffer length.",
            remedy="Set it to about a fifth of limits.max_response_tokens (the paper: 4096 of 20480), "
            "or switch the penalty off with shaping.overlong_penalty = 0.0.",
        )
    if shaping.overlong_buffer_tokens is not None and shaping.overlong_buffer_tokens >= limits.max_response_tokens:
        raise _error(
            "shaping.overlong_buffer_tokens",
            shaping.overlong_buffer_tokens,
            f"must be smaller than limits.max_response_tokens = {limits.max_response_tokens}; "
            "otherwise every response is penalized.",
            f"Use about a fifth of the limit: {max(1, limits.max_response_tokens // 5)}.",
        )


def check_whole_distribution(config: Config) -> None:
    """Training samples from the distribution it scores."""
    sampling = config.sampling
    for key, value, neutral in (
        ("sampling.top_p", sampling.top_p, 1.0),
        ("sampling.top_k", sampling.top_k, 0),
    ):
        if value != neutral:
            raise _error(
                key,
                value,
                "training on a truncated distribution makes the ratio π_θ/π_old wrong: the engine would sample "
                "from the renormalized head, the trainer would score the whole vocabulary.",
                f"Leave it at {neutral} for training; eval.{key.split('.')[1]} may differ.",
            )


def check_updates(config: Config) -> None:
    """The optimizer's values, and enough groups for every update."""
    sampling = config.sampling
    if not all(0 <= beta < 1 for beta in config.train.betas):
        raise _error(
            "train.betas", list(config.train.betas), "each must be at least 0 and below 1.", "Use [0.9, 0.999]."
        )
    if config.train.updates_per_step > sampling.prompts_per_step:
        raise _error(
            "train.updates_per_step",
            config.train.updates_per_step,
            f"a step has only sampling.prompts_per_step = {sampling.prompts_per_step} groups to split.",
            f"Use at most {sampling.prompts_per_step}.",
        )


def check_dynamic(config: Config) -> None:
    """Dynamic sampling: its budget, and what it cannot be combined with."""
    sampling, algorithm = config.sampling, config.algorithm
    for switch in ("carry_over", "partial_rollouts"):
        if getattr(sampling, switch) and not sampling.refill:
            raise _error(
                f"sampling.{switch}",
                True,
                "it keeps what a step had more than it needed; with sampling.refill = false no step has more.",
                f"Set sampling.refill = true, or sampling.{switch} = false.",
            )
    if sampling.dynamic and config.max_prompts_tried_per_step < sampling.prompts_per_step:
        raise _error(
            "sampling.max_prompts_tried_per_step",
            config.max_prompts_tried_per_step,
            f"a step could never fill its sampling.prompts_per_step = {sampling.prompts_per_step} groups.",
            f"Use at least {sampling.prompts_per_step}; the recipe of the paper allows 30 times as many.",
        )
    if sampling.dynamic and algorithm.advantage == "gae":
        raise _error(
            "sampling.dynamic",
            True,
            "dropping groups by their outcome biases the critic's targets.",
            'Set sampling.dynamic = false, or algorithm.advantage = "group".',
        )


def check_importance(config: Config) -> None:
    """Importance weights need two policies, and bounds in order."""
    algorithm = config.algorithm
    floor, cap = algorithm.correction.floor, algorithm.correction.cap
    if floor is not None and cap is not None and floor >= cap:
        raise _error(
            "algorithm.correction.floor",
            floor,
            f"it must be below algorithm.correction.cap = {cap:g}; no weight lies between them.",
            "IcePop has 0.5 and 5.",
        )
    if algorithm.old_logp == "bypass" and algorithm.correction.cap is not None:
        raise _error(
            "algorithm.correction.cap",
            algorithm.correction.cap,
            'with algorithm.old_logp = "bypass" the engine\'s log-probs are π_old: ρ = π_old/π_engine is 1 for every '
            "token, and there is nothing to correct. The policy ratio itself starts at the engine's.",
            'Set algorithm.correction.cap = "none", or algorithm.old_logp = "recompute".',
        )


def check_sequence_loss(config: Config) -> None:
    """One ratio for a response needs one advantage for it."""
    if config.algorithm.loss != "gspo" or not (config.has_critic or config.has_teacher):
        return
    own, other = (
        ('algorithm.advantage = "gae" a critic gives every token', 'algorithm.advantage = "group"')
        if config.has_critic
        else ('algorithm.kl.place = "advantage" the teacher gives every token', 'algorithm.kl.place = "loss"')
    )
    raise _error(
        "algorithm.loss",
        "gspo",
        f"it has one ratio for a response; with {own} an advantage of its own.",
        f'Set algorithm.loss = "gspo-token", or {other}.',
    )


def check_kl(config: Config) -> None:
    """Whether the KL penalty can be in the reward."""
    algorithm = config.algorithm
    if config.has_reference and algorithm.kl.place == "reward" and not config.has_critic:
        raise _error(
            "algorithm.kl.place",
            "reward",
            "a KL penalty per token needs an advantage per token; a group advantage has one per response.",
            'Set algorithm.kl.place = "loss", or algorithm.advantage = "gae".',
        )
    if config.has_teacher and algorithm.kl.kind != "k1":
        raise _error(
            "algorithm.kl.kind",
            algorithm.kl.kind,
            'with algorithm.kl.place = "advantage" the policy gradient is that of the reverse KL for k1 alone.',
            'Set algorithm.kl.kind = "k1".',
        )


def check_carrying(config: Config) -> None:
    """Carry-over, partial rollouts and predictive selection (not the paper's algorithm)."""
    sampling, algorithm = config.sampling, config.algorithm
    for switch in ("carry_over", "partial_rollouts", "predictive"):
        if getattr(sampling, switch) and not sampling.dynamic:
            raise _error(
                f"sampling.{switch}",
                True,
                "it chooses groups by their outcome, which only dynamic sampling does.",
                f"Set sampling.dynamic = true, or sampling.{switch} = false.",
            )
    is_stale = sampling.carry_over or sampling.partial_rollouts
    if is_stale and algorithm.correction.cap is None and algorithm.old_logp != "bypass":
        raise ConfigError(
            "algorithm.correction.cap: missing; carry_over and partial_rollouts train on tokens of older weights.",
            remedy="Set algorithm.correction.cap = 2.0 (truncated importance sampling), as preset dapo-fast does.",
        )
    if (sampling.carry_over or sampling.partial_rollouts) and sampling.max_staleness_updates is None:
        raise ConfigError(
            "sampling.max_staleness_updates: missing; carry_over and partial_rollouts need a bound on how old a token "
            "may be.",
            remedy=f"Set it to train.updates_per_step ({config.train.updates_per_step}) to admit the step before.",
        )


def retired_after_two(G: int) -> float:
    """A pass rate that a problem reaches by two visits with G responses, all correct: (1 + 1.5·G) / (2 + 1.5·G)."""
    return math.floor(100 * (1 + 1.5 * G) / (2 + 1.5 * G)) / 100


def check_retiring(config: Config) -> None:
    """A bound that a problem can reach: its posterior remembers at most two groups, older ones count half each time."""
    above, G = config.sampling.retire_above, config.sampling.responses_per_prompt
    if above is not None and above >= (1 + 2 * G) / (2 + 2 * G):
        twice = retired_after_two(G)
        raise _error(
            "sampling.retire_above",
            above,
            f"no problem would ever be retired: with sampling.responses_per_prompt = {G} the posterior pass rate of "
            f"one that is always solved stays below {(1 + 2 * G) / (2 + 2 * G):.4g}.",
            f"Use {twice:g} or less (two visits, all correct, reach it), or more responses per prompt.",
        )


def check_loss(config: Config) -> None:
    """Some loss must be on."""
    if config.algorithm.advantage == "none" and not config.algorithm.positive_nll and not config.has_teacher:
        raise _error(
            "algorithm.advantage",
            "none",
            "without a policy gradient and with algorithm.positive_nll = 0 nothing is learned.",
            "Set algorithm.positive_nll = 1.0 (rejection-sampling fine-tuning, preset rft), or name a teacher (preset "
            "distillation).",
        )


def check_parts(config: Config) -> None:
    """Each part of the reward has a name, a weight and one source; a verifier without parts returns none."""
    rewards = config.rewards
    judged = (one.verifier for one in train_sources(config) if not one.environment)  # others have their own Score
    silent = next((verifier for verifier in judged if not may_return_parts(verifier)), None)
    for name, part in rewards.parts.items():
        key = f"rewards.parts.{name}"
        if not PART_NAME.fullmatch(name):
            raise ConfigError(
                f"{key}: {name!r} is no name for a part of the reward; metrics and columns carry it.",
                remedy="Use up to 40 letters, digits, - and _, a letter first.",
            )
        if part.weight == 0:
            raise _error(f"{key}.weight", part.weight, "the part would change nothing.", "Use another, or remove it.")
        if name == CORRECT:
            if part.function is not None or part.verifier is not None:
                raise _error(
                    f"{key}.{'verifier' if part.function is None else 'function'}",
                    part.function or part.verifier,
                    "this part is the verifier's own reward, what counts as correct.",
                    "Set rewards.verifier, or give the part another name.",
                )
        elif part.function is not None and part.verifier is not None:
            raise _error(
                f"{key}.verifier", part.verifier, f"it has function = {part.function} as well.", "Name one of the two."
            )
        elif part.function is None and part.verifier is None and silent is not None:
            raise ConfigError(
                f"{key}: names neither a function nor a verifier, and the verifier {silent} returns no parts.",
                remedy=f'Add function = "pkg.mod:function", or let a function of yours return '
                f"dapo.Score(value, correct, parts={{{name!r}: ...}}).",
            )


def may_return_parts(verifier: str) -> bool:
    """A program or a function may; the rules that ship answer with a verdict alone."""
    return ":" in verifier or verifier == "command"


def check_aggregation(config: Config) -> None:
    """Normalizing each part needs groups, and a standard deviation to divide by."""
    if config.rewards.aggregation == "sum_then_normalize":
        return
    key, value = "rewards.aggregation", config.rewards.aggregation
    if config.algorithm.advantage != "group":
        raise _error(
            key,
            value,
            f"each part is normalized within its group, and algorithm.advantage = {config.algorithm.advantage} has no "
            "group advantage.",
            'Set algorithm.advantage = "group", or rewards.aggregation = "sum_then_normalize".',
        )
    if config.algorithm.group.std == "none":
        raise _error(
            key,
            value,
            "algorithm.group.std = none divides by no standard deviation, so that no part is normalized.",
            'Set algorithm.group.std = "sample", or rewards.aggregation = "sum_then_normalize".',
        )


def check_sources(config: Config) -> None:
    """Tables of problem sets: what a source cannot have, and one that is there twice."""
    for source in (*train_sources(config), *eval_sources(config)):
        if source.system_prompt and not source.chat_template:
            raise _error(
                f"{source.key}.system_prompt",
                source.system_prompt,
                "a system message needs a chat template, and data.chat_template is false.",
                "Leave it out, or set data.chat_template = true.",
            )
    seen: dict[tuple[str, ...], str] = {}
    for source in train_sources(config):
        same = (source.path, source.template, source.system_prompt, source.verifier, source.environment)
        if same in seen:
            raise _error(
                f"{source.key}.path",
                source.path,
                f"{seen[same]} is the same set with the same template, system prompt and verifier.",
                "Keep one of them, with the sum of their weights.",
            )
        seen[same] = source.key


def check_advantage(config: Config) -> None:
    """Baseline and std of a response's advantage."""
    group = config.algorithm.group
    if config.algorithm.advantage != "group":
        return
    if group.std_over == "group" and group.baseline != "group" and group.std != "none":
        raise _error(
            "algorithm.group.std_over",
            "group",
            f"algorithm.group.baseline = {group.baseline} is not divided by the std of a group, in any paper.",
            'Set algorithm.group.std_over = "batch", or algorithm.group.std = "none" to divide by nothing.',
        )
    if group.std_over == "tokens" and group.std != "sample":
        raise _error(
            "algorithm.group.std",
            group.std,
            'algorithm.group.std_over = "tokens" whitens with the sample variance, as verl does.',
            'Set algorithm.group.std = "sample", or algorithm.group.std_over = "batch".',
        )
    is_default = (group.baseline, group.std_over) == ("group", "group")
    if config.rewards.aggregation == "normalize_then_sum" and not is_default:
        raise _error(
            "rewards.aggregation",
            config.rewards.aggregation,
            "it has its own two normalizations, within the group and over the step (GDPO).",
            'Leave algorithm.group.baseline and std_over out, or set rewards.aggregation = "sum_then_normalize".',
        )


CHECKS = (
    check_dtype,
    check_quantization,
    check_exact,
    check_sources,
    check_retiring,
    check_loss,
    check_parts,
    check_aggregation,
    check_group_size,
    check_advantage,
    check_clip,
    check_overlong,
    check_whole_distribution,
    check_updates,
    check_dynamic,
    check_importance,
    check_sequence_loss,
    check_kl,
    check_carrying,
)


@dataclass(frozen=True, slots=True)
class Needs:
    """Keys that act only under a condition. `switch` names the one key that turns their section off, if any."""

    keys: tuple[str, ...]  # exact keys, or prefixes ending in a dot
    holds: Callable[[Config], bool]
    condition: str
    switch: str | None = None

    def covers(self, key: str) -> bool:
        return any(key == own or (own.endswith(".") and key.startswith(own)) for own in self.keys)


NEEDS = (
    Needs(
        ("algorithm.correction.floor", "algorithm.correction.kind", "algorithm.correction.level"),
        lambda c: c.algorithm.correction.cap is not None,
        "algorithm.correction.cap",
        "algorithm.correction.cap",
    ),
    Needs(
        ("algorithm.group.std_over",),
        lambda c: c.algorithm.group.std != "none",
        'algorithm.group.std = "sample" or "population"',
        "algorithm.group.std",
    ),
    Needs(  # the others have no surrogate that could be bounded from below
        ("algorithm.clip.dual",),
        lambda c: c.algorithm.clip.dual is None or c.algorithm.loss in ("clip", "gspo", "gspo-token"),
        'algorithm.loss = "clip", "gspo" or "gspo-token"',
        "algorithm.loss",
    ),
    Needs(
        ("algorithm.group.",),
        lambda c: c.algorithm.advantage == "group",
        'algorithm.advantage = "group"',
        "algorithm.advantage",
    ),
    Needs(
        ("algorithm.gae.", "algorithm.critic."),
        lambda c: c.has_critic,
        'algorithm.advantage = "gae"',
        "algorithm.advantage",
    ),
    Needs(
        ("algorithm.kl.kind", "algorithm.kl.place", "algorithm.kl.path"),
        lambda c: c.has_reference,
        "algorithm.kl.coefficient above 0",
        "algorithm.kl.coefficient",
    ),
    Needs(
        ("algorithm.critic.pretrain_responses", "algorithm.critic.pretrain_epochs"),
        lambda c: c.algorithm.critic.path is None,
        'algorithm.critic.path = "none"',
        "algorithm.critic.path",
    ),
    Needs(  # a recipe run for a few steps only never leaves its warm-up; that is fine
        ("train.lr_decay",),
        lambda c: c.train.lr_decay == "none" or max(c.train.warmup_steps, 1) < c.train.steps,
        "train.steps above 1 and above train.warmup_steps",
        "train.steps",
    ),
    Needs(
        tuple(f"model.lora.{key}" for key in LoraConfig.model_fields if key != "rank"),
        lambda c: c.model.lora.rank > 0,
        "model.lora.rank above 0",
        "model.lora.rank",
    ),
    Needs(
        ("shaping.overlong_buffer_tokens",),
        lambda c: c.shaping.overlong_penalty > 0,
        "shaping.overlong_penalty above 0",
        "shaping.overlong_penalty",
    ),
    Needs(
        ("sampling.fill_policy", "sampling.max_prompts_tried_per_step", "sampling.schedule", "sampling.refill"),
        lambda c: c.sampling.dynamic,
        "sampling.dynamic = true",
        "sampling.dynamic",
    ),
    Needs(
        ("sampling.fill_policy", "sampling.max_prompts_tried_per_step", "sampling.generation_multiple"),
        lambda c: c.sampling.refill,
        "sampling.refill = true",
        "sampling.refill",
    ),
    Needs(
        ("sampling.generation_multiple",),
        lambda c: c.sampling.dynamic and c.sampling.schedule == "rounds",
        'sampling.dynamic = true and sampling.schedule = "rounds"',
        "sampling.dynamic",
    ),
    Needs(  # carried groups stream by nature: there are no rounds to wait for
        ("sampling.schedule", "sampling.generation_multiple"),
        lambda c: c.sampling.schedule == "stream" or not (c.sampling.carry_over or c.sampling.partial_rollouts),
        "sampling.carry_over = false and sampling.partial_rollouts = false",
        "sampling.carry_over",
    ),
    Needs(
        ("sampling.finish_overtaken",),
        lambda c: c.sampling.partial_rollouts,
        "sampling.partial_rollouts = true",
        "sampling.partial_rollouts",
    ),
    Needs(
        ("sampling.max_staleness_updates",),
        lambda c: c.sampling.carry_over or c.sampling.partial_rollouts,
        "sampling.carry_over or sampling.partial_rollouts",
    ),
    Needs(
        ("sampling.posteriors",),
        lambda c: c.keeps_posteriors or c.sampling.posteriors is None,
        "sampling.predictive = true or a number for sampling.retire_above",
        "sampling.predictive",
    ),
    Needs(
        ("checkpoint.keep_best",),
        lambda c: not c.checkpoint.keep_best or (c.eval.every_steps > 0 and bool(c.data.eval)),
        "data.eval and eval.every_steps above 0",
        "eval.every_steps",
    ),
    Needs(
        ("algorithm.loss_constant_tokens",),
        lambda c: c.algorithm.loss_aggregation == "constant",
        'algorithm.loss_aggregation = "constant"',
    ),
    Needs(
        ("algorithm.gae.lam",),
        lambda c: c.algorithm.gae.length_adaptive_alpha is None or c.algorithm.gae.lam_critic is None,
        'algorithm.gae.length_adaptive_alpha = "none" or algorithm.gae.lam_critic = "none"',
    ),
    Needs(
        ("eval.k", "eval.temperature", "eval.top_p", "eval.top_k"),
        lambda c: c.eval.every_steps > 0 and bool(c.data.eval),
        "eval.every_steps above 0 and a set in data.eval",
        "eval.every_steps",
    ),
    Needs(
        ("limits.max_turns",),
        lambda c: any(source.environment for source in (*train_sources(c), *eval_sources(c))),
        "data.environment",
        "data.environment",
    ),
    Needs(("model.gpu_memory_gib",), lambda c: c.model.device != "cpu", "a GPU", "model.device"),
    Needs(("rollout.kv_cache_gib",), lambda c: c.rollout.engine == "local", 'rollout.engine = "local"'),
    Needs(("rollout.draft_tokens",), lambda c: c.rollout.engine != "vllm", 'rollout.engine = "local" or "plain"'),
    Needs(("rollout.quantization",), lambda c: c.rollout.engine == "local", 'rollout.engine = "local"'),
    Needs(
        ("rollout.draft_below_rows",),
        lambda c: c.rollout.draft_tokens > 0,
        "rollout.draft_tokens above 0",
        "rollout.draft_tokens",
    ),
    Needs(
        ("rollout.tensor_parallel", "rollout.vllm."), lambda c: c.rollout.engine == "vllm", 'rollout.engine = "vllm"'
    ),
    Needs(
        ("tracking.project",),
        lambda c: bool(set(c.tracking.to) - {"tensorboard"}),
        'tracking.to with "wandb", "trackio", "mlflow" or "swanlab"',
        "tracking.to",
    ),
    Needs(
        ("cluster.gpus", "cluster.ranks_per_gpu", "cluster.shard", "cluster.timeout_s", "checkpoint.format"),
        lambda c: c.cluster.backend != "none",
        'cluster.backend = "torchrun" or "ray"',
    ),
)


def unused_keys(config: Config, origin: dict[str, str]) -> dict[str, str]:
    """Keys of the recipe in a section that one key switches off: key -> what it would need.

    Raises where a key without effect is not excused: it was typed on the command line, or no single switch explains it.
    Keys from presets and defaults are never complained about, nor is a recipe that states a key's default: a run's own
    config.toml has every key, and is a recipe.
    """
    unused = {}
    for key, layer in origin.items():
        if layer not in ("recipe", "--set"):
            continue
        for need in NEEDS:
            if not need.covers(key) or need.holds(config) or (layer == "recipe" and has_default(config, key)):
                continue
            if layer == "--set" or need.switch is None:
                raise ConfigError(
                    f"{key}: has no effect here; it needs {need.condition}.",
                    remedy=f"Leave it out, or set {need.condition}.",
                )
            unused[key] = need.condition
    return unused


def has_default(config: Config, key: str) -> bool:
    """Whether a key has the schema's default value."""
    *path, name = key.split(".")
    section: Any = config
    for part in path:
        section = getattr(section, part)
    field = type(section).model_fields[name]
    return not field.is_required() and bool(getattr(section, name) == field.default)


def _error(key: str, value: object, why: str, remedy: str) -> ConfigError:
    shown = str(value).lower() if isinstance(value, bool) else value
    return ConfigError(f"{key} = {shown}: {why}", remedy=remedy)
