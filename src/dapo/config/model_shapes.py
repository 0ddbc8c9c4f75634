"""Sizes of a transformer, from its folder's config.json or from a table of common models, and what they add up to."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from dapo.config.hub import is_hub_name, model_file

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # of a mixture, whose sizes mean something else
MOST_STRETCH = 1e6  # times the positions of a model; more, or none, is no number to plan with
LINEAR_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-like decoder: grouped-query attention, gated feed-forward, RMS norms."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    is_tied: bool  # output head = embedding
    has_qkv_bias: bool = False

    @property
    def linear_parameters(self) -> int:
        """Weights of the matrices inside the layers, which LoRA adapts."""
        return sum(inputs * outputs for inputs, outputs in self.linears) * self.layers

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of a layer's matrices, in the order of LINEAR_NAMES."""
        attention, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return [
            (self.hidden, attention),
            (self.hidden, kv),
            (self.hidden, kv),
            (attention, self.hidden),
            (self.hidden, self.feed_forward),
            (self.hidden, self.feed_forward),
            (self.feed_forward, self.hidden),
        ]

    @property
    def parameters(self) -> int:
        embeddings = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        norms = (2 * self.layers + 1) * self.hidden
        bias = self.layers * (self.heads + 2 * self.kv_heads) * self.head_size if self.has_qkv_bias else 0
        return embeddings + self.linear_parameters + norms + bias

    def lora_parameters(self, rank: int, target_modules: Sequence[str] = ()) -> int:
        """Of an adapter on these layers, by name; empty: on all."""
        named = zip(LINEAR_NAMES, self.linears, strict=True)
        sizes = [sum(size) for name, size in named if not target_modules or name in target_modules]
        return self.layers * rank * sum(sizes)

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size


def qwen2(layers: int, hidden: int, feed_forward: int, heads: int, kv_heads: int, vocabulary: int) -> ModelShape:
    """Qwen2 family: biases on q, k, v; the small vocabulary marks the sizes with tied embeddings."""
    tied = vocabulary == 151936
    return ModelShape(layers, hidden, feed_forward, heads, kv_heads, hidden // heads, vocabulary, tied, True)


# From each model's published config.json.
KNOWN = {
    "qwen/qwen2.5-0.5b": qwen2(24, 896, 4864, 14, 2, 151936),
    "qwen/qwen2.5-1.5b": qwen2(28, 1536, 8960, 12, 2, 151936),
    "qwen/qwen2.5-3b": qwen2(36, 2048, 11008, 16, 2, 151936),
    "qwen/qwen2.5-7b": qwen2(28, 3584, 18944, 28, 4, 152064),
    "qwen/qwen2.5-14b": qwen2(48, 5120, 13824, 40, 8, 152064),
    "qwen/qwen2.5-32b": qwen2(64, 5120, 27648, 40, 8, 152064),
    "huggingfacetb/smollm2-135m": ModelShape(30, 576, 1536, 9, 3, 64, 49152, True),
    "huggingfacetb/smollm2-360m": ModelShape(32, 960, 2560, 15, 5, 64, 49152, True),
    "huggingfacetb/smollm2-1.7b": ModelShape(24, 2048, 8192, 32, 32, 64, 49152, True),
}

# Sizes by which benchmarks are named; their weights are random.
BENCH_SHAPES = {
    "135m": KNOWN["huggingfacetb/smollm2-135m"],
    "0.5b": KNOWN["qwen/qwen2.5-0.5b"],
    "qwen3-0.6b": ModelShape(28, 1024, 3072, 16, 8, 128, 151936, True),  # but for its norms of queries and keys
    "1.5b": KNOWN["qwen/qwen2.5-1.5b"],
    "7b": KNOWN["qwen/qwen2.5-7b"],
}


BUNDLED = "bundled"  # as config model.path


def model_location(path: str) -> str:
    """Where a model is: "bundled" is the folder that ships with the package; everything else is as it was typed."""
    return str(Path(__file__).parents[1] / "quickstart" / "model") if path == BUNDLED else path


def config_of(path: str) -> dict[str, Any] | None:
    """The config.json of a model folder; None where there is none that can be read."""
    return read_config(Path(model_location(path)) / "config.json")


def read_config(file: Path) -> dict[str, Any] | None:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Of a model's config.json, stretched positions (YaRN and its kin) included; None where it names no limit."""
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) and text else config
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    named = config.get("rope_scaling") or config.get("rope_parameters")
    stretch = named if isinstance(named, Mapping) else {}
    factor, first = stretch.get("factor"), stretch.get("original_max_position_embeddings")
    if not isinstance(factor, int | float) or not 0 < factor < MOST_STRETCH:
        return positions
    return max(positions, int(factor * (first if is_count(first) else positions)))


def shape_of(path: str, revision: str | None = None) -> ModelShape | None:
    """The shape of a model folder, of a common hub name (-Instruct, -Math, -Coder variants too) or of a hub model in
    the cache; None if unknown. Nothing is fetched."""
    config = config_of(path)
    if config is not None:
        return shape_from_config(config)
    name = path.lower().removesuffix("-instruct").replace("2.5-math-", "2.5-").replace("2.5-coder-", "2.5-")
    if name in KNOWN:
        return KNOWN[name]
    file = model_file(path, "config.json", revision=revision) if is_hub_name(path) else None
    config = read_config(file) if file is not None else None
    return shape_from_config(config) if config is not None else None


def shape_from_config(config: Mapping[str, Any]) -> ModelShape | None:
    """None where it is no Llama-like decoder of which all layers are alike and every weight is read for every token."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    wanted = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if not all(is_count(config.get(key)) for key in wanted) or any(config.get(key) for key in EXPERTS):
        return None
    heads = config["num_attention_heads"]
    kv_heads, head_size = config.get("num_key_value_heads"), config.get("head_dim")
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        feed_forward=config["intermediate_size"],
        heads=heads,
        kv_heads=kv_heads if is_count(kv_heads) else heads,
        head_size=head_size if is_count(head_size) else config["hidden_size"] // heads,
        vocabulary=config["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=str(config.get("model_type", "")).startswith("qwen2"),
    )


def is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def why_no_shape(path: str, revision: str | None) -> str:
    """Why the memory of a model is not estimated, and what would help."""
    if model_file(path, "config.json", revision=revision) is not None:
        return f"not estimated: {path} is not a dense decoder (e.g. it is a mixture of experts)."
    if not is_hub_name(path):
        return f"the shape of {path} is unknown: no config.json there."
    download = shlex.join(["hf", "download", path, "config.json"])
    return f"the shape of {path} is unknown: not in the Hugging Face cache. Download it: {download}"
