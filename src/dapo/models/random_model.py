"""Models of a given shape with random weights, made where they are used: for benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from dapo.config.model_shapes import ModelShape

MAX_TOKENS = 32768


def random_model(shape: ModelShape, *, dtype: torch.dtype, device: str, attention: str) -> Any:
    """A causal LM of the shape, with the same weights every time."""
    torch.manual_seed(0)
    with torch.device(device):
        auto: Any = AutoModelForCausalLM
        return auto.from_config(random_config(shape), dtype=dtype, attn_implementation=attention)


def random_config(shape: ModelShape) -> Any:
    """Qwen2 where q, k and v have biases, else Llama."""
    family: Any = Qwen2Config if shape.has_qkv_bias else LlamaConfig
    return family(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.feed_forward,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.is_tied,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )


def training_flops(shape: ModelShape, lengths: list[int]) -> float:
    """Of one forward and backward pass over sequences of these lengths, nothing computed twice.

    Six per weight of a matrix and token; attention looks at half of the square, twice forward and four times backward.
    """
    weights = shape.linear_parameters + shape.hidden * shape.vocabulary
    attention = 6 * shape.layers * shape.heads * shape.head_size * sum(n * n for n in lengths)
    return 6.0 * weights * sum(lengths) + attention
