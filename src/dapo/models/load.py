"""Policies in and out of Hugging Face folders: safetensors only, never a model's own code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from dapo.config.hub import is_cached, is_hub_name, why_offline
from dapo.config.model_shapes import positions_of
from dapo.errors import EngineError
from dapo.models.fused_layers import fuse_layers
from dapo.models.packed_attention import PACKED_ATTENTION
from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.models.quantized import Kind, QuantizedLinear, quantize_linears

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a run has its own view

# What packed log-probs are compared on: tokens of a prompt, and of the responses that share it. Behind the short one a
# wrong edge shows even in a model whose attention reaches back a few tokens only.
CHECKED_ROWS = ((16, (24, 9)), (2, (9, 5)))
# The noise of a log-prob, in nats: the library rounds each logit to the weights' type, and every layer its states, so
# it grows with the type's step, the size of the logits and the root of the number of layers. In 16 bits, tiny models of
# eleven families, deep random ones and the bundled one lie at 0.05 to 0.25 of it on average, one token at 3.5 at most;
# on a GPU random ones of 0.5 to 7 B, quantized or not, at 0.4 to 1.1. A wrong position, prefix or edge moves the
# average of the tiny ones to 4 or more.
MEAN_GAP, LARGEST_GAP = 2.0, 16.0
# Below this no difference matters; kernels in float32 may sum in another order, or in TF32.
LEAST_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}

ALIGNED_BYTES = 64  # where torch lets a tensor begin


def load_policy(
    path: str,
    *,
    dtype: torch.dtype,
    device: str,
    revision: str | None = None,
    is_fused: bool = True,
    quantization: Kind | None = None,
) -> Policy:
    """A Hugging Face folder or hub name as a policy, in evaluation mode (no dropout: π_old must be reproducible).

    `is_fused` lets kernels take over the memory-bound parts where there are some for this device and family;
    `quantization` keeps the matrices but the head's in 8 or 4 bits, frozen.
    """
    model = load_pretrained(
        AutoModelForCausalLM, path, dtype=dtype, device=device, revision=revision, quantization=quantization
    )
    policy = Policy(model, load_pretrained_tokenizer(path, revision=revision)).eval()
    policy.is_fused = is_fused
    if is_fused:
        fuse_layers(policy.backbone)
    check_packing(policy)
    return policy


def save_policy(policy: Policy, folder: str | Path) -> None:
    """A plain Hugging Face folder: safetensors, tokenizer, generation config. An adapter is merged into the weights."""
    if policy.model is not policy.base:
        save_all_but_weights(policy, folder)
        tensors = {name: tensor.contiguous() for name, tensor in checkpoint_tensors(policy, device="cpu")}
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        return
    policy.model.save_pretrained(folder)
    if policy.tokenizer is not None:
        policy.tokenizer.save_pretrained(folder)


def adapter_tensors(policy: Policy) -> dict[str, Tensor]:
    """A copy on the host of the adapter alone, as peft names it; empty where there is none."""
    if policy.model is policy.base:
        return {}
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(policy.model)
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def save_adapter(policy: Policy, folder: Path, tensors: dict[str, Tensor]) -> None:
    """The adapter alone in peft's format; nothing where there is none."""
    if not tensors:
        return
    config = copy(policy.model.peft_config[policy.model.active_adapter])
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # a set, which is in another order every time
    config.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def save_shape(policy: Policy, folder: str | Path) -> None:
    """config.json, with the class that reads it."""
    config = type(policy.config).from_dict(policy.config.to_dict())
    config.architectures = [type(policy.base).__name__]
    config.save_pretrained(folder)


def save_all_but_weights(policy: Policy, folder: str | Path) -> None:
    """What `save_policy` writes besides `checkpoint_tensors`."""
    save_shape(policy, folder)
    if policy.base.can_generate():
        policy.base.generation_config.save_pretrained(folder)
    if policy.tokenizer is not None:
        policy.tokenizer.save_pretrained(folder)


def checkpoint_tensors(policy: Policy, *, device: str | None = None) -> Iterator[tuple[str, Tensor]]:
    """The policy's weights and lasting buffers as a checkpoint names them, adapters added in; tied ones once.

    On `device`, one by one; a model with an adapter may be too large for its own a second time.
    """
    tensors = {}
    for name, parameter in _weights(policy.base):
        if ".lora_" in name:
            continue
        tensor = parameter.detach()
        owner, _, leaf = name.rpartition(".")
        if owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
            layer = policy.base.get_submodule(owner)
            if leaf == "weight":
                for adapter in layer.active_adapters:
                    tensor = tensor + layer.get_delta_weight(adapter).detach().to(tensor.dtype)
            name = f"{owner}.{leaf}"
        tensors[name] = tensor.to(device=device)
    buffers = dict(policy.base.named_buffers())
    for name in policy.base.state_dict():  # those that are part of a checkpoint
        if name in buffers:
            tensors[name.replace(".base_layer.", ".")] = buffers[name].detach().to(device=device)
    yield from revert_weight_conversion(policy.base, tensors).items()


def load_pretrained(
    auto: Any,
    path: str,
    *,
    dtype: torch.dtype,
    device: str,
    revision: str | None,
    quantization: Kind | None = None,
) -> Any:
    """`auto.from_pretrained` with our attention and our safety settings; its failures as one clear message."""
    # Of os.path a folder that one may not enter, or a name that no file system takes, is just not there.
    if os.path.isfile(path):
        raise EngineError(f"model.path = {path!r}: is a file, not a folder.", remedy="Name the folder of a model.")
    offline = why_offline() if is_hub_name(path) else ""
    try:
        model = auto.from_pretrained(
            path,
            revision=revision,
            dtype=dtype,
            attn_implementation=PACKED_ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, RuntimeError) as error:
        missing = "" if is_cached(path, revision) else offline
        raise EngineError(_why_not(path, error, missing), remedy=_remedy(path, missing)) from error
    if quantization is not None:
        quantize_linears(model, model.get_output_embeddings(), quantization, device)
    model = model.to(device).eval()
    align(model)
    return model


def align(model: Any) -> None:
    """Weights that still lie in their file, at any place there, into memory of their own, on a CPU.

    Its library of products adds in an order that depends on where a matrix begins (on AMD's), and a checkpoint's file
    has other places than the model's: a resumed run would differ in its last bits.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNED_BYTES:
            tensor.data = tensor.data.clone()


def load_pretrained_tokenizer(path: str, *, revision: str | None) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise EngineError(f"model.path = {path!r}: its tokenizer cannot be loaded. {_first_line(error)}") from error


@torch.no_grad()
def check_packing(policy: Policy) -> None:
    """Compare packed log-probs with the library's own forward, unpacked; refuse a model that differs.

    Catches what no list of architectures would: capped or scaled logits, attention with sinks, position offsets.
    """
    prompts, responses = checked_rows(policy)
    packed = pack(prompts, responses, policy.device, sharing_saves=0.0)
    got, _ = policy(packed, temperature=1.0, with_entropy=False)
    expected, noise = unpacked_logprobs(policy, prompts, responses)
    gap = (got.double() - expected).abs()
    least = LEAST_TOLERANCE.get(policy.dtype, 0.0)
    for found, tolerance, what in ((gap.mean(), MEAN_GAP, "on average"), (gap.max(), LARGEST_GAP, "at one token")):
        if not found.item() <= max(least, tolerance * noise):
            raise EngineError(
                f"{type(policy.base).__name__}: packed log-probs differ from the library's own by {found.item():.2g} "
                f"{what} ({max(least, tolerance * noise):.2g} is rounding in {str(policy.dtype).removeprefix('torch.')}"
                "), so this architecture cannot be trained packed (its attention or its output head does something of "
                "its own)."
            )


def checked_rows(policy: Policy) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses; cut where a model has few positions.

    The first response of a prompt repeats it, which a trained model expects of nothing but the prompt's own tokens in
    their own places; the tokens follow no pattern else.
    """
    config = policy.config.get_text_config()
    most = (positions_of(config.to_dict()) or 1 << 20) // 2

    def tokens(n: int, start: int) -> list[int]:
        return [(7 * i + 5 * i * i + 13 * start + 3) % config.vocab_size for i in range(min(n, most))]

    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    for group, (n_prompt, lengths) in enumerate(CHECKED_ROWS):
        prompt = tokens(n_prompt, group)
        for row, n in enumerate(lengths):
            prompts.append(prompt)
            own = prompt * -(-n // n_prompt) if row == 0 else tokens(n, 50 + group)
            responses.append(own[: min(n, most)])
    return prompts, responses


def unpacked_logprobs(policy: Policy, prompts: list[list[int]], responses: list[list[int]]) -> tuple[Tensor, float]:
    """The library's log-probs of all response tokens [N], and how much rounding may move one of them on average.

    In one pass: causal attention never reads what follows a row's end.
    """
    rows = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=policy.device)
    logits = policy.base(input_ids=ids, use_cache=False).logits  # [S, L, V]
    picked = torch.cat(
        [logits[at, len(prompt) - 1 : len(row) - 1] for at, (prompt, row) in enumerate(zip(prompts, rows, strict=True))]
    )  # [N, V]
    targets = torch.tensor([token for response in responses for token in response], device=policy.device)
    picked = picked.double() if policy.dtype == torch.float64 else picked.float()
    logp = picked.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    n_layers = policy.config.get_text_config().num_hidden_layers
    noise = torch.finfo(policy.dtype).eps * picked.pow(2).mean().sqrt().item() * n_layers**0.5
    return logp.double(), noise


def _weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """All parameters by name, and of quantized layers the weights that their codes stand for."""
    for owner, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield f"{owner}.weight", module.weight
    yield from model.named_parameters()


def _why_not(path: str, error: Exception, offline: str) -> str:
    folder = Path(path)
    if not os.path.exists(path) and not is_hub_name(path):
        return f"model.path = {path!r}: no such folder."
    if offline:
        return f"model.path = {path!r}: no such folder, no such model in the cache, and {offline}."
    if os.path.isdir(path):
        if not (folder / "config.json").exists():
            return f"model.path = {path!r}: the folder has no config.json, so it is no Hugging Face model."
        if not any(folder.glob("*.safetensors")):
            return f"model.path = {path!r}: no *.safetensors in the folder; pickled weights are never loaded."
    return f"model.path = {path!r}: cannot be loaded. {_first_line(error)}"


def _remedy(path: str, offline: str) -> str:
    if os.path.isdir(path):
        return "Convert it with transformers' save_pretrained, or name another folder."
    if offline:
        return (
            f"Name a folder that holds the model; or fetch it where there is a network, `hf download {path}`, and set "
            "HF_HOME to that cache."
        )
    return "Name an existing folder, or a hub name (owner/name) while the hub can be reached."


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
