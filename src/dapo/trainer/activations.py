"""Which layers recompute their activations in the backward pass: none, all, or as many as memory asks for."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_layers(module: Any, n_layers: int | None = None) -> int:
    """Let the first `n_layers` decoder layers (all, if None) recompute in the backward pass; returns how many do.

    The library checkpoints in training mode only. Modules that act differently there (dropout) stay in evaluation mode.
    """
    layers = list(module.backbone.layers)
    chosen = layers if n_layers is None else layers[:n_layers]
    for layer in layers:
        layer.gradient_checkpointing = layer in chosen
        layer.training = layer in chosen
        layer._gradient_checkpointing_func = recompute
    return len(chosen)


def recompute(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def has_layers(module: nn.Module) -> bool:
    return hasattr(getattr(module, "backbone", None), "layers")
