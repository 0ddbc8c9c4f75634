"""`--fit`: settings that let a run fit into a card, by the estimate that `dapo explain` prints.

What changes a run least comes first: recomputing activations and smaller micro-batches give the same gradients, 8-bit
moments nearly the same updates, an adapter trains something else, and over weights in 8 or 4 bits
it starts elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.config.load import suggest
from dapo.config.machine import CARDS_GIB, GIB, gpu_memory_gib
from dapo.config.model_shapes import ModelShape
from dapo.config.schema import Config
from dapo.errors import ConfigError
from dapo.planning.plan import Memory, concurrency_of, memory_of

SIZES_GIB = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)  # of cards, for the remedy of one that is too small
COMFORTABLE = 8  # responses of full length at once, below which smaller micro-batches are worth their time
FREE = 0.1  # of the card is left alone, as in `Memory.full_length_responses`
LORA_RANK = 32
# What is left to try below the frozen weights as they are, closest to them first.
FEWER_BITS = {None: (("int8", 8), ("nf4", 4)), "int8": (("nf4", 4),), "nf4": ()}


@dataclass(frozen=True, slots=True)
class Choice:
    """One key that `--fit` sets, and why."""

    key: str
    value: Any
    why: str

    @property
    def override(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True, slots=True)
class Fit:
    """What was chosen, and what the estimate says then."""

    config: Config
    choices: list[Choice]
    memory: Memory
    at_full_length: int  # responses at the limit that memory holds at once

    @property
    def is_possible(self) -> bool:
        return self.at_full_length > 0


def card_gib(text: str, *, option: str = "--fit") -> float:
    """The memory of "24gb", of a card by name, or of this machine's smallest card ("auto")."""
    if text.lower() in CARDS_GIB:
        return CARDS_GIB[text.lower()]
    if text.lower() == "auto":
        found = gpu_memory_gib()
        if not found:
            raise ConfigError(f"{option} auto: no GPU was found here.", remedy=f"Name its memory: {option} 24gb.")
        return min(found)
    size = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:gi?b)?", text.lower())
    if size is None or not float(size[1]):
        raise ConfigError(
            f"{option} {text}: neither a memory size nor a known GPU.",
            remedy=f"For example {option} 24gb or {option} auto. {suggest(text.lower(), [*CARDS_GIB])}",
        )
    return float(size[1])


def fit(config: Config, shape: ModelShape, device_gib: float, kept: Collection[str] = ()) -> Fit:
    """The mildest settings with which a run fits a card of so many GiB; keys in `kept` stay as they are."""
    best = None
    for harsher in levels(config, kept):
        best = with_room(config, shape, device_gib, harsher, kept)
        if best.is_possible:
            return with_kv_cache(best, device_gib, kept)
    assert best is not None, "the first level changes nothing"
    return best


def levels(config: Config, kept: Collection[str]) -> Iterator[list[Choice]]:
    """What changes the training itself, from nothing to most."""
    yield []
    is_sharded = config.cluster.gpus > 1  # 8-bit moments share a scale per block of a whole tensor
    moments = (
        Choice("train.moments", "host", "AdamW's moments in host memory: the same updates, slower")
        if is_sharded
        else Choice("train.moments", "int8", "AdamW's moments in 8 bits, 2 bytes per weight instead of 8")
    )
    if config.train.moments == "float32" and moments.key not in kept:
        yield [moments]
    adapter: list[Choice] = []
    if config.model.lora.rank == 0 and not config.has_critic and "model.lora.rank" not in kept:
        why = "an adapter instead of all weights; it usually needs a larger train.lr, about ten times"
        adapter = [Choice("model.lora.rank", LORA_RANK, why)]  # its moments are small
        yield adapter
    is_16bit = config.rollout.engine != "vllm" and config.rollout.quantization == "none"
    may_quantize = is_16bit and config.cluster.shard != "full"
    if (adapter or config.model.lora.rank) and may_quantize and "model.lora.quantization" not in kept:
        for kind, bits in FEWER_BITS[config.base_quantization]:
            why = f"QLoRA: the frozen weights in {bits} bits, slower"
            yield [*adapter, Choice("model.lora.quantization", kind, why)]


def with_room(
    config: Config, shape: ModelShape, device_gib: float, harsher: Sequence[Choice], kept: Collection[str]
) -> Fit:
    """Those, and of what leaves the gradients alone as much as is needed."""
    chosen = {one.key: one for one in harsher}
    found = estimate(config, shape, device_gib, chosen)
    for choice in same_gradients(config, kept):
        if found.at_full_length >= min(COMFORTABLE, allowed(config, found.memory, device_gib)):
            break
        tried = estimate(config, shape, device_gib, chosen | {choice.key: choice})
        if tried.memory.fixed < found.memory.fixed:
            chosen, found = chosen | {choice.key: choice}, tried
    return found


def same_gradients(config: Config, kept: Collection[str]) -> Iterator[Choice]:
    if not config.train.gradient_checkpointing and "train.gradient_checkpointing" not in kept:
        yield Choice("train.gradient_checkpointing", "auto", "recompute activations in as few layers as needed")
    tokens = config.train.tokens_per_microbatch
    longest = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    while tokens > longest and "train.tokens_per_microbatch" not in kept:
        tokens = max(longest, tokens // 2)
        yield Choice("train.tokens_per_microbatch", tokens, "smaller micro-batches, the same updates")


def with_kv_cache(found: Fit, device_gib: float, kept: Collection[str]) -> Fit:
    """The engine gets what is left, or what it needs if that is less."""
    config, memory = found.config, found.memory
    room = (1 - FREE) * device_gib * GIB - memory.fixed
    if config.rollout.engine == "vllm":
        own = memory.parts["engine's own weights"]
        share = math.floor(100 * (room + own) / (device_gib * GIB)) / 100
        choice = Choice("rollout.vllm.gpu_memory_utilization", share, "vLLM's weights and KV cache: what is left")
    else:
        limit = config.limits.max_prompt_tokens + config.limits.max_response_tokens
        needed = allowed(config, memory, device_gib) * limit * memory.kv_bytes_per_token
        size = math.floor(100 * min(room, needed) / GIB) / 100
        why = "enough for every sequence at its limit" if needed <= room else "what is left of the card"
        choice = Choice("rollout.kv_cache_gib", max(size, 0.01), f"KV cache: {why}")
        set_already = config.rollout.kv_cache_gib
        if config.rollout.engine != "local" or (set_already is not None and set_already * GIB <= room):
            return found
    if choice.key in kept:
        return found
    return Fit(changed(config, choice), [*found.choices, choice], memory, found.at_full_length)


def allowed(config: Config, memory: Memory, device_gib: float) -> int:
    return concurrency_of(config, memory, device_gib=device_gib, gpus=config.cluster.gpus).allowed


def estimate(config: Config, shape: ModelShape, device_gib: float, chosen: dict[str, Choice]) -> Fit:
    for choice in chosen.values():
        config = changed(config, choice)
    gpus = config.cluster.gpus
    memory = memory_of(config, shape, is_cuda=True, gpus=gpus)
    fits = concurrency_of(config, memory, device_gib=device_gib, gpus=gpus).at_full_length
    return Fit(config, list(chosen.values()), memory, fits)


def changed(config: Config, choice: Choice) -> Config:
    """The config with one key set; nothing is checked here, because the choices are checked as overrides."""

    def put(section: Any, path: list[str]) -> Any:
        name, *rest = path
        return section.model_copy(update={name: put(getattr(section, name), rest) if rest else choice.value})

    made: Config = put(config, choice.key.split("."))
    return made


def refuse(
    found: Fit,
    name: str,
    typed: str,
    device_gib: float,
    shape: ModelShape,
    kept: Collection[str],
    *,
    option: str = "--fit",
) -> None:
    """ConfigError for a run that fits by no choice, with the smallest card on which it does."""
    if found.is_possible:
        return
    tried = ", ".join(one.override for one in found.choices) or "nothing is left to change"
    larger = [size for size in SIZES_GIB if size > device_gib and fit(found.config, shape, size, kept).is_possible]
    card = f"a card of {larger[0]} GB or more ({option} {larger[0]}gb)" if larger else "more GPUs (cluster.gpus)"
    raise ConfigError(
        f"{option} {typed}: {name} does not fit. It needs {found.memory.fixed / GIB:.1f} GiB and room for one response "
        f"of full length; {(1 - FREE) * device_gib:.1f} of {device_gib:g} GiB are available (tried: {tried}).",
        remedy=f"Use {card}, a smaller model.path, or shorter responses (limits.max_response_tokens).",
    )
