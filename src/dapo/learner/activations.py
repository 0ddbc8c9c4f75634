"""Which layers recompute their activations in the backward pass: none, all, or as few as memory asks for."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dapo.config.model_shapes import shape_from_config
from dapo.models.device import device_memory
from dapo.models.fused_layers import recomputes_itself
from dapo.planning.plan import layers_to_checkpoint

# Of the free memory so much is left alone: fragments, workspaces of the libraries, the optimizer's temporaries.
KEPT_FREE = 0.1
HEAD_BYTES = 4 << 30  # logits of one chunk, their gradient, the weight's gradient in float32


def checkpoint_layers(module: Any, n_layers: int | None = None, *, keeps_attention: bool = False) -> int:
    """Let the first `n_layers` decoder layers (all, if None) recompute in the backward pass; returns how many do.

    With `keeps_attention` a layer that can keeps what attention gave: twice the memory of its input alone.
    The library's layers do so in training mode only; what is inside of them stays in evaluation mode, so no dropout
    comes on. A backbone without a list of such layers is left to the library, which knows all or nothing.
    """
    if getattr(module, "exact", None) is not None:  # its pass keeps inputs alone and makes the rest again by itself
        n_layers = 0
    layers = list(getattr(module.backbone, "layers", ()))
    if not layers or not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
        return checkpoint_whole(module)
    n = len(layers) if n_layers is None else min(n_layers, len(layers))
    for i, layer in enumerate(layers):
        layer.gradient_checkpointing = layer.training = i < n
        layer.keeps_attention = keeps_attention
        layer._gradient_checkpointing_func = partial(recompute, layer)
    return n


def recompute(layer: Any, function: Any, x: Tensor, *args: Any) -> Any:
    if recomputes_itself(layer, x):
        return function(x, *args)
    return checkpoint(function, x, *args, use_reentrant=False)


def checkpoint_whole(module: Any) -> int:
    module.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module.train()
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.eval()
    return int(module.backbone.config.get_text_config().num_hidden_layers)


def fit_layers(module: Any, tokens: int, *, bytes_to_come: int, is_fused: bool) -> int:
    """Recompute in as few layers as a micro-batch of `tokens` needs to fit what is free of the device.

    `bytes_to_come`: gradients and moments that the optimizer has not allocated yet. On a CPU nothing is recomputed.
    """
    device = module.device
    if device.type != "cuda":
        return checkpoint_layers(module, 0)
    shape = shape_from_config(module.backbone.config.to_dict())
    if shape is None:
        return checkpoint_layers(module)
    free, _ = device_memory(device)
    room = int((1 - KEPT_FREE) * free) - bytes_to_come - HEAD_BYTES
    x = torch.empty(0, shape.hidden, dtype=module.dtype, device=device)
    layers = list(getattr(module.backbone, "layers", ()))
    can_keep = bool(layers) and all(recomputes_itself(layer, x) for layer in layers)
    for keeps in (True, False) if can_keep else (False,):
        n = layers_to_checkpoint(
            shape, tokens, room, weight=module.dtype.itemsize, is_fused=is_fused, keeps_attention=keeps
        )
        if n is not None:
            return checkpoint_layers(module, n, keeps_attention=keeps)
    return checkpoint_layers(module)
