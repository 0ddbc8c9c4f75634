"""A cluster before it is rented: which layouts fit, what a step costs by phase, from a cost model that is stated here.

The model: a pass takes (bytes read / bandwidth + FLOPs / rate), which do not overlap. Both rates were measured on one
H200 (4.3 TB/s and 790 TFLOP/s of 4.8 and 989 on its data sheet); other cards are taken to reach the same fractions of
theirs. Nothing larger than one GPU was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from dapo.config.machine import CARDS_GIB, GIB
from dapo.config.model_shapes import ModelShape
from dapo.config.schema import Config
from dapo.planning.plan import memory_of

# Of a card's data sheet: memory bandwidth in TB/s and dense bfloat16 in TFLOP/s.
SHEET = {
    "a100": (2.04, 312.0),
    "a100-40gb": (1.56, 312.0),
    "l40s": (0.86, 362.0),
    "h20": (4.0, 148.0),
    "h100": (3.35, 989.0),
    "h200": (4.8, 989.0),
    "b200": (8.0, 2250.0),
}
REACHED_BANDWIDTH, REACHED_FLOPS = 4.3 / 4.8, 790 / 989  # measured, H200
# Our decoder reaches of it, with 1,024 responses: 0.61, 0.68, 0.84 at 135 M, 1.5 B, 7 B; the larger ones count.
DECODE_FRACTION = 0.75
# vLLM 0.24 at its best setting, measured: 31 µs of host work per response and step, plus a quarter of the device's.
VLLM_HOST_S, VLLM_FRACTION = 31e-6, 0.25
SYNC_S = 20e-6  # one sum over the GPUs of a replica, twice a layer: an assumption
TRAIN_FRACTION = 0.5  # of the matrix rate, in a packed forward-backward pass: an assumption
LINK_BYTES = 40e9  # per GPU and second between nodes, where weights are gathered: an assumption
LENGTH_SIGMA = 0.9  # of the log-normal lengths: an assumption
MEAN_FRACTION = 0.2  # mean response length as a fraction of the limit, unless given


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to place a run on the GPUs."""

    shard: str  # full or none
    tensor_parallel: int  # GPUs of one replica
    parts_gib: dict[str, float]
    slots: int  # concurrent responses of a replica; 0: it does not fit

    @property
    def fits(self) -> bool:
        return self.slots > 0


@dataclass(frozen=True, slots=True)
class Rates:
    """What the cost model says of one card with one model."""

    tick_base_s: float  # a decode step's share for the weights
    tick_per_response_s: float
    train_tokens_per_s: float  # of one GPU: all passes over a token that is trained on
    gather_s: float  # all weights to every engine
    passes_s: float  # of weights gathered for one micro-batch


def layouts_of(config: Config, shape: ModelShape, *, card: str, gpus: int, mean_tokens: float) -> list[Layout]:
    """Sharded or not, one GPU or several to a replica; with the responses that fit in the memory left."""
    made = []
    for shard in ("none", "full"):
        for tensor_parallel in (1, 2, 4, 8):
            if tensor_parallel > gpus or gpus % tensor_parallel:
                continue
            engine = "vllm" if tensor_parallel > 1 or config.rollout.engine == "vllm" else "local"
            rollout = config.rollout.model_copy(update={"engine": engine, "tensor_parallel": tensor_parallel})
            own = config.model_copy(update={"rollout": rollout})
            memory = memory_of(own, shape, is_cuda=True, gpus=gpus if shard == "full" else 1)
            free = 0.9 * CARDS_GIB[card] * GIB - memory.fixed
            # A running response holds its prompt and, on average, half of its final length.
            held = config.limits.max_prompt_tokens / 4 + mean_tokens / 2
            slots = int(free // (memory.kv_bytes_per_token * held)) if free > 0 else 0
            if engine == "local":
                slots = min(slots, -(-config.rollout.max_concurrent_sequences // gpus))
            parts = {name: size / GIB for name, size in memory.parts.items()}
            made.append(Layout(shard, tensor_parallel, parts, max(0, slots)))
    return made


def choose(layouts: list[Layout], config: Config) -> Layout | None:
    """The recipe's own tensor parallelism where it fits, else the smallest; not sharded where that fits."""
    fitting = [layout for layout in layouts if layout.fits]
    wanted = [layout for layout in fitting if layout.tensor_parallel == config.rollout.tensor_parallel]
    return next(iter(wanted or sorted(fitting, key=lambda layout: layout.tensor_parallel)), None)


def rates_of(config: Config, shape: ModelShape, layout: Layout, *, card: str, gpus: int, mean_tokens: float) -> Rates:
    sheet_bandwidth, sheet_flops = SHEET[card]
    bandwidth, flops = sheet_bandwidth * 1e12 * REACHED_BANDWIDTH, sheet_flops * 1e12 * REACHED_FLOPS
    tp, P = layout.tensor_parallel, shape.parameters
    context = config.limits.max_prompt_tokens / 4 + mean_tokens / 2
    base = 2 * P / tp / bandwidth
    per_response = context * 2 * shape.kv_values_per_token / tp / bandwidth + 2 * P / tp / flops
    if config.rollout.engine == "vllm" or tp > 1:
        base += 2 * shape.layers * SYNC_S * (tp > 1)
        per_response = max(per_response, VLLM_FRACTION * per_response + VLLM_HOST_S)
    else:
        base, per_response = base / DECODE_FRACTION, per_response / DECODE_FRACTION
    # π_old once (2P), forward and backward (6P) in every epoch, and the forward again where it is recomputed (2P);
    # attention adds 4·L·H·context per token and pass.
    passes = 1 + config.train.epochs_per_step * (3 + bool(config.train.gradient_checkpointing))
    attention = 4 * shape.layers * shape.heads * shape.head_size * (context + mean_tokens / 2)
    train = flops * TRAIN_FRACTION / (passes * (2 * P + attention))
    gather = 2 * P / LINK_BYTES if layout.shard == "full" or tp > 1 else 0.0
    passes_s = (2 * 2 * P + 4 * P) / LINK_BYTES if layout.shard == "full" and gpus > 1 else 0.0
    return Rates(base, per_response, train, gather, passes_s)


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step by phase, and what it adds up to."""

    rollout_s: float
    training_s: float
    idle_fraction: float  # of the rollout: GPU time lost while responses of the long tail are waited for
    wasted_fraction: float  # of the generated tokens: not trained on

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.training_s

    @property
    def rollout_fraction(self) -> float:
        return self.rollout_s / self.step_s

    def hours(self, steps: int) -> float:
        return steps * self.step_s / 3600

    def gpu_hours(self, gpus: int, steps: int) -> float:
        return gpus * self.hours(steps)


def training_seconds(config: Config, rates: Rates, *, gpus: int, trained_tokens: float) -> float:
    """All updates of a step: the longer of computing and gathering, which overlap, and the weights to the engines."""
    per_gpu = trained_tokens / gpus
    microbatches = max(config.updates_per_step, per_gpu / config.train.tokens_per_microbatch)
    return max(per_gpu / rates.train_tokens_per_s, microbatches * rates.passes_s) + rates.gather_s
