"""What both sides of `dapo bench step` do, and the random model that they do it with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.errors import ConfigError

OVERLONG_BUFFER = 16  # of the recipe whose other keys are taken over
CHARACTERS = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz?.,:"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What both sides do: `prompts` groups per step, all used, every response exactly `tokens` long, one update."""

    prompts: int
    responses: int
    tokens: int
    steps: int  # the first is not counted
    hidden: int
    layers: int
    micro: int  # rows of TRL's micro-batches; ours are by tokens
    device: str
    threads: int
    lr: float = 1e-4
    seed: int = 0
    use_vllm: bool = False


CPU = {"prompts": 8, "responses": 8, "tokens": 64, "steps": 8, "hidden": 128, "layers": 4, "micro": 64}
CUDA = {"prompts": 32, "responses": 16, "tokens": 512, "steps": 4, "hidden": 576, "layers": 30, "micro": 64}


def check(plan: StepPlan) -> None:
    if plan.steps < 2:
        raise ConfigError("--steps 1: the first step is not counted.", remedy="Run at least 2.")
    if plan.responses < 2:
        raise ConfigError(
            f"--responses {plan.responses}: a group of one has no baseline, so its advantage is undefined.",
            remedy="Use 2 or more.",
        )
    if plan.tokens <= OVERLONG_BUFFER:
        raise ConfigError(
            f"--tokens {plan.tokens}: the recipe's overlong buffer is {OVERLONG_BUFFER} tokens.", remedy="Use more."
        )
    if plan.hidden % 8:
        raise ConfigError(f"--hidden {plan.hidden}: four heads of an even size must fit.", remedy="A multiple of 8.")
    if plan.prompts * plan.responses % plan.micro:
        raise ConfigError(
            f"--micro {plan.micro}: {plan.prompts} x {plan.responses} rows cannot be split into such micro-batches.",
            remedy="Choose a divisor.",
        )


def save_models(plan: StepPlan, folder: Path) -> int:
    """The same random weights twice: `model` knows no end token, so responses have one length; TRL wants one.

    Returns the number of parameters.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    words = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=plan.hidden, intermediate_size=4 * plan.hidden,
        num_hidden_layers=plan.layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2 * plan.tokens + 64, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(plan.seed)
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    for name, end in (("model", None), ("peer", "<eos>")):
        model.config.eos_token_id = model.generation_config.eos_token_id = None if end is None else words.index(end)
        model.save_pretrained(folder / name)
        tokenizer(words, end).save_pretrained(folder / name)
    return sum(parameter.numel() for parameter in model.parameters())


def tokenizer(words: list[str], end: str | None) -> Any:
    """One token per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>", eos_token=end)
