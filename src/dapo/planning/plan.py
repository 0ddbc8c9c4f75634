"""What a config means in plain numbers: work per step and per run, parts that are on, memory by part."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dapo.config.horizon import horizon
from dapo.config.machine import CONTEXT_BYTES, GIB
from dapo.config.model_shapes import ModelShape, shape_of
from dapo.config.schema import Config


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of one step and of the whole run; tokens are upper bounds, every response at the limit."""

    responses_per_step: int
    prompts_per_update: float
    updates_per_step: int
    max_response_tokens_per_step: int
    max_prompts_tried_per_step: int
    steps: int
    updates: int
    responses: int
    max_trained_tokens: int


def work_of(config: Config) -> Work:
    tokens = config.responses_per_step * config.limits.max_response_tokens
    return Work(
        responses_per_step=config.responses_per_step,
        prompts_per_update=config.sampling.prompts_per_step / config.train.updates_per_step,
        updates_per_step=config.updates_per_step,
        max_response_tokens_per_step=tokens,
        max_prompts_tried_per_step=config.max_prompts_tried_per_step,
        steps=config.train.steps,
        updates=config.train.steps * config.updates_per_step,
        responses=config.train.steps * config.responses_per_step,
        max_trained_tokens=config.train.steps * tokens,
    )


def parts_of(config: Config) -> list[tuple[str, str]]:
    """(part, setting) of the algorithm, in the order of the papers. Parts that are off are listed too."""
    algorithm, sampling, shaping = config.algorithm, config.sampling, config.shaping
    return [
        ("advantage", _advantage(config)),
        ("policy loss", algorithm.loss),
        ("clip", _clip(config)),
        ("loss aggregation", _mean(config)),
        ("dynamic sampling", _dynamic(config)),
        ("overlong filtering", "on" if shaping.overlong_filter else "off"),
        (
            "soft overlong penalty",
            f"on, over the last {shaping.overlong_buffer_tokens:,} tokens before {config.limits.max_response_tokens:,}"
            if shaping.overlong_penalty
            else "off",
        ),
        ("reward parts", _parts(config)),
        ("KL to a reference", _kl(config) if config.has_reference else "off"),
        ("critic", _critic(config) if config.has_critic else "off"),
        ("entropy bonus", f"{algorithm.entropy_coefficient:g}" if algorithm.entropy_coefficient else "off"),
        ("positive-example NLL", f"{algorithm.positive_nll:g}" if algorithm.positive_nll else "off"),
        ("importance correction", _correction(config)),
        ("control experiment", f"verdicts {config.rewards.control}" if config.rewards.control != "none" else "off"),
        ("carry-over", _switch(sampling.carry_over)),
        ("partial rollouts", _partial(config)),
        ("predictive selection", _switch(sampling.predictive)),
        ("retired problems", _retired(config)),
    ]


def _kl(config: Config) -> str:
    kl = config.algorithm.kl
    place = {"loss": "", "reward": " in the reward", "advantage": " in every token's advantage: on-policy distillation"}
    return f"{kl.coefficient:g} x {kl.kind}{place[kl.place]}" + (f", from {kl.path}" if kl.path else "")


def _partial(config: Config) -> str:
    sampling = config.sampling
    if not sampling.partial_rollouts or not sampling.finish_overtaken:
        return _switch(sampling.partial_rollouts)
    return "on; a step waits for groups that would be too old in the next"


def _clip(config: Config) -> str:
    clip = config.algorithm.clip
    if config.algorithm.loss == "reinforce":
        return "none: the loss has no ratio"
    if clip.low is None:
        return f"weights of at most {1 + clip.high:g}, no lower bound"
    kind = "clip-higher" if clip.high > clip.low else "symmetric"
    return f"[{1 - clip.low:g}, {1 + clip.high:g}], {kind}" + (f", dual {clip.dual:g}" if clip.dual else "")


def _correction(config: Config) -> str:
    """How tokens are weighted by ρ = π_old/π_engine; and why, where nobody asked for it."""
    correction = config.algorithm.correction
    if correction.cap is None:
        return "off (effective sample size and KL are measured)"
    ratio = {"token": "ρ", "sequence": "Πρ of a response", "geometric": "Πρ^(1/|o|) of a response"}[correction.level]
    if correction.kind == "mask":
        weight = f"{ratio} inside [{correction.floor or 0:g}, {correction.cap:g}], else 0"
    else:
        low = f", at least {correction.floor:g}" if correction.floor is not None else ""
        weight = f"min({ratio}, {correction.cap:g}){low}"
    is_vllm = config.rollout.engine == "vllm"
    return f"{weight}, ρ = π_old/π_engine" + (" (default 2 with vLLM: training-inference mismatch)" if is_vllm else "")


def _switch(is_on: bool) -> str:
    return "on (not the paper's algorithm)" if is_on else "off"


def _retired(config: Config) -> str:
    above = config.sampling.retire_above
    return "off" if above is None else f"those with a pass rate of {above:g} or more (not the paper's algorithm)"


def _advantage(config: Config) -> str:
    algorithm = config.algorithm
    if algorithm.advantage == "none":
        said = ["supervised loss on correct responses"] if algorithm.positive_nll else []
        return f"none: {' and '.join([*said, 'distillation'] if config.has_teacher else said)}"
    if not config.has_critic:
        return _group_advantage(config)
    gae = algorithm.gae
    adaptive = gae.length_adaptive_alpha
    floor = f"max({{}}, {gae.length_adaptive_floor:g})" if gae.length_adaptive_floor > 1 else "({})"
    lam = f"λ {gae.lam:g}" if adaptive is None else f"λ = 1 − 1/{floor.format(f'{adaptive:g}·length')}"
    critic = f", critic λ {gae.lam_critic:g}" if gae.lam_critic is not None else ""
    return f"GAE, γ {gae.gamma:g}, {lam} ({_reach(config)}){critic}" + (", whitened" if gae.whiten else "")


def _group_advantage(config: Config) -> str:
    group = config.algorithm.group
    baseline = {
        "group": f"group of {config.sampling.responses_per_prompt}",
        "leave_one_out": f"leave-one-out in a group of {config.sampling.responses_per_prompt}",
        "batch": "less the mean of the step's responses",
    }[group.baseline]
    over = {
        "group": "",
        "batch": " over the step's responses",
        "batch_rewards": " of the rewards over the step's responses",
        "tokens": " over the step's tokens (whitened)",
    }[group.std_over]
    return f"{baseline}, std {group.std}" + (over if group.std != "none" else "")


def _parts(config: Config) -> str:
    """Which parts the reward has, how they are put together, and that the verifier alone decides what is kept."""
    rewards = config.rewards
    is_normalized = rewards.aggregation == "normalize_then_sum"
    if not rewards.parts:
        return "correct alone, normalized over the step as well" if is_normalized else "off"
    listed = ", ".join(f"{name} x {weight:g}" for name, weight in rewards.weights.items())
    how = "each normalized in its group, their sum over the step (GDPO)" if is_normalized else "summed, then normalized"
    kept = "; groups are kept by correct alone, whatever the others say" if config.sampling.dynamic else ""
    return f"{listed}; {how}{kept}"


def _reach(config: Config) -> str:
    """How much of a response at the limit hears of its reward and not only of the critic's values."""
    limit = config.limits.max_response_tokens
    reach = horizon(config.algorithm.gae, limit)
    if math.isinf(reach):
        return "effective horizon: the whole response"
    return f"effective horizon: about {reach:,.0f} tokens" + (
        f" of a response of {limit:,}" if config.algorithm.gae.length_adaptive_alpha is not None else ""
    )


def _critic(config: Config) -> str:
    n_responses = config.algorithm.critic.pretrain_responses
    pretraining = f"pretrained on at most {n_responses:,} responses" if n_responses else "not pretrained"
    return f"on, lr {config.critic_lr:g}, {pretraining}"


def _mean(config: Config) -> str:
    constant = config.algorithm.loss_constant_tokens or config.limits.max_response_tokens
    return {
        "token": "token mean over the update (eq. 12)",
        "sequence": "mean per response, then over responses (eq. 5)",
        "prompt": "token mean per prompt, then over prompts (eq. 8 literally)",
        "constant": f"token sum / (responses x {constant:,})",
    }[config.algorithm.loss_aggregation]


def _dynamic(config: Config) -> str:
    sampling = config.sampling
    if not sampling.dynamic:
        return "off"
    if not sampling.refill:
        return f"on, without refilling: of {sampling.prompts_per_step:,} prompts per step the mixed groups"
    how = (
        f"rounds of {sampling.generation_multiple} x prompts_per_step" if sampling.schedule == "rounds" else "streaming"
    )
    few = f"if too few groups are mixed: {sampling.fill_policy}"
    return f"on, {how}, at most {config.max_prompts_tried_per_step:,} prompts per step; {few}"


# ------------------------------------------------------------------ memory

# Torch's allocator keeps blocks that nothing fits into: so much of what comes and goes. With it the estimate is within
# 9 % of the card's own count for every recipe on an H200 (docs/results/capped-recipes.json).
UNUSED_PART = 4
COME_AND_GO = ("activations", "output head", "engine's logits", "dequantized matrices")
NOT_HELD = (*COME_AND_GO, "allocator's unused blocks", "CUDA itself")  # by the run itself, all the time
HEAD_LOGITS = {True: 1 << 28, False: 1 << 24}  # of one chunk, on CUDA or not; the whole [T, V] never has to exist


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device by part, and what that leaves for the KV cache."""

    parameters: int
    parts: dict[str, int]
    kv_bytes_per_token: int

    @property
    def fixed(self) -> int:
        return sum(self.parts.values())

    def full_length_responses(self, device_gib: float, tokens: int) -> int:
        """Responses at the limit whose KV fits in the memory left, with a tenth of the device kept free."""
        return max(0, int((0.9 * device_gib * GIB - self.fixed) // (self.kv_bytes_per_token * tokens)))


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many responses one copy of the model generates at once, by each of the things that bound it."""

    replicas: int  # copies of the model that generate
    allowed: int  # by rollout.max_concurrent_sequences, which is shared by all replicas
    at_full_length: int  # that memory holds when every one of them is at the limit


def concurrency_of(config: Config, memory: Memory, *, device_gib: float, gpus: int) -> Concurrency:
    replicas = max(1, gpus // config.rollout.tensor_parallel)
    limit = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    return Concurrency(
        replicas=replicas,
        allowed=-(-config.rollout.max_concurrent_sequences // replicas),
        at_full_length=memory.full_length_responses(device_gib, limit),
    )


def memory_of(config: Config, shape: ModelShape, *, is_cuda: bool, gpus: int) -> Memory:
    """An estimate from the shape, by the rules named in the code; sharded parts are divided by `gpus`.

    It is what a run cannot do without. Where a card has room, the logits of a whole micro-batch are kept as well, up to
    a twentieth of it.
    """
    weight = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "auto": 2 if is_cuda else 4}[config.model.dtype]
    lora = config.model.lora
    gpus = 1 if config.base_quantization else gpus  # every GPU holds all of it
    trained = shape.lora_parameters(lora.rank, lora.target_modules) if lora.rank else shape.parameters
    # Gradients accumulate in float32; AdamW keeps two moments, and a float32 master where weights are 16 bits. An 8-bit
    # moment has a float32 scale per 256 weights.
    moments = {"float32": 2 * max(4, weight), "int8": 2 * (1 + 4 / 256), "host": 0}[config.train.moments]
    per_trained = moments + (4 if weight == 2 else 0)
    models = 2 if config.has_critic else 1  # updated one after the other: the gradients of one are there at a time
    sharded = {
        "weights": int(models * weight_bytes(config, shape, weight)),
        "gradients and optimizer": int(trained * (models * per_trained + max(4, weight))),
    }
    parts = {name: size // gpus for name, size in sharded.items()}
    teacher = config.algorithm.kl.path
    if config.has_reference and (teacher or not lora.rank or gpus > 1):  # else it is the policy without its adapter
        reference = shape_of(teacher) if teacher else shape
        parts["reference model"] = (reference or shape).parameters * weight // gpus
    if config.rollout.engine == "vllm":
        parts["engine's own weights"] = shape.parameters * weight // config.rollout.tensor_parallel
    elif gpus > 1:
        parts["engine's gathered weights"] = shape.parameters * weight
    if config.rollout.quantization == "fp8":
        parts["engine's second copy of the layers, FP8"] = shape.linear_parameters
    if config.base_quantization:  # one for the product, the next one on its way
        parts["dequantized matrices"] = 2 * weight * max(inputs * outputs for inputs, outputs in shape.linears)
    parts["activations"] = activation_bytes(config, shape, weight, is_cuda=is_cuda)
    parts["output head"] = head_bytes(config, shape, weight, is_cuda=is_cuda)
    if is_cuda and config.rollout.engine == "local":
        # The logits of a decode step, in the graphs' memory and in that of the step that ran before they were captured.
        rows = -(-config.rollout.max_concurrent_sequences // gpus)
        parts["engine's logits"] = 2 * rows * shape.vocabulary * 4
    if is_cuda:
        parts["allocator's unused blocks"] = sum(parts.get(name, 0) for name in COME_AND_GO) // UNUSED_PART
        parts["CUDA itself"] = CONTEXT_BYTES
    return Memory(shape.parameters, parts, shape.kv_values_per_token * weight // config.rollout.tensor_parallel)


def weight_bytes(config: Config, shape: ModelShape, weight: int) -> float:
    """Quantized are the matrices inside the layers: a code of 8 or 4 bits per weight, and half a bit of scales."""
    if config.base_quantization is None:
        return shape.parameters * weight
    code = {"int8": 1, "nf4": 1 / 2}[config.base_quantization]
    return (shape.parameters - shape.linear_parameters) * weight + shape.linear_parameters * (code + 1 / 16)


def head_bytes(config: Config, shape: ModelShape, weight: int, *, is_cuda: bool) -> int:
    """A chunk of logits in float32, their gradient, and the float32 sum of the head's own, where that is trained."""
    logits = min(HEAD_LOGITS[is_cuda], micro_batch_tokens(config) * shape.vocabulary)
    own = 0 if config.model.lora.rank else shape.vocabulary * shape.hidden * 4
    return logits * (4 + weight) + own


def micro_batch_tokens(config: Config) -> int:
    """Of the largest: the budget, or a longer row, or all of an update that is smaller, a shared prompt once."""
    prompt, response = config.limits.max_prompt_tokens, config.limits.max_response_tokens
    prompts = -(-config.sampling.prompts_per_step // config.train.updates_per_step)
    shares = not (config.has_critic and config.algorithm.critic.pretrain_responses)  # those have a prompt each
    update = prompts * config.sampling.responses_per_prompt * (prompt + response)
    if shares:
        update = prompts * (prompt + config.sampling.responses_per_prompt * response)
    return min(max(config.train.tokens_per_microbatch, prompt + response), update)


def layer_bytes(shape: ModelShape, weight: int, *, is_fused: bool) -> int:
    """Saved by one layer for its backward pass, per token.

    Fused: 4 vectors of the hidden size (residuals and what the matrices read), queries and attention's output, k and v,
    and 2 of the feed-forward size. Plain: about 10 of the hidden size (norms keep float32 copies) and 4 of the other.
    """
    kv = 2 * shape.kv_heads * shape.head_size
    if is_fused:
        return (4 * shape.hidden + 2 * shape.heads * shape.head_size + kv + 2 * shape.feed_forward) * weight
    return (10 * shape.hidden + kv + 4 * shape.feed_forward) * weight


def layers_to_checkpoint(
    shape: ModelShape, tokens: int, room: int, *, weight: int, is_fused: bool, keeps_attention: bool
) -> int | None:
    """The fewest layers that must recompute so that a micro-batch's activations fit into `room` bytes; None: no number.

    One that recomputes keeps its input, and with `keeps_attention` what attention gave and its sums; one of them at a
    time holds a whole layer's activations again.
    """
    layer, kept = layer_bytes(shape, weight, is_fused=is_fused), shape.hidden * weight
    if keeps_attention:
        kept += shape.heads * (shape.head_size * weight + 4)
    for n in range(shape.layers + 1):
        if tokens * ((shape.layers - n + (n > 0)) * layer + n * kept) <= room:
            return n
    return None


def activation_bytes(config: Config, shape: ModelShape, weight: int, *, is_cuda: bool) -> int:
    """Saved for the backward pass of one micro-batch; under auto the least, with every layer recomputed."""
    layer = layer_bytes(shape, weight, is_fused=is_cuda and config.model.kernels == "fused")
    # As peft has it: what each matrix reads, in the adapter's float32. `models/adapter.py` keeps less, but with it too
    # what a card counted is near this (21.3 GiB for 20.7, 20.0 for 20.8: docs/results/capped-recipes.json).
    if config.model.lora.rank and weight < 4:
        layer += 4 * sum(inputs for inputs, _ in shape.linears)
    tokens = micro_batch_tokens(config)
    if config.train.gradient_checkpointing:
        return tokens * (layer + shape.layers * shape.hidden * weight)
    return tokens * layer * shape.layers
