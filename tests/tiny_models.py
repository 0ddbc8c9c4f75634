"""Random transformers of a few thousand weights, one per family, with a tokenizer: real models, nothing downloaded."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dapo.models.packed_attention import PACKED_ATTENTION
from dapo.models.policy import Policy

VOCABULARY = 40
EOS = 2
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # far from uniform, so that a wrong position or mask shows
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-bias": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
}
# Between them: biases, tied embeddings, norms of q and k, a window in some layers and in all, scaled positions.
EVERYDAY = ("llama-bias", "llama3-rope", "qwen2-window", "qwen3-tied")


def families(everyday: Sequence[str] = EVERYDAY) -> list[Any]:
    """Every family as a test's parameter; those that are not named are for the slow suite."""
    return [family if family in everyday else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


def tiny_policy(family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **changes: object) -> Policy:
    model_class, config_class, extra = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(**{**SHAPE, **extra, **changes})
    model = model_class._from_config(config, attn_implementation=PACKED_ATTENTION)
    for name, parameter in model.named_parameters():  # zero biases and unit norms would hide mistakes
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    return Policy(model.to(dtype), tiny_tokenizer()).eval()
