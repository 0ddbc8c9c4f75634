"""Gradient checkpointing: activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from typing import Any

from torch import nn


def recompute_activations(module: nn.Module, network: Any) -> None:
    """Switch it on for the Hugging Face `network` inside `module`.

    The library does so in training mode only; dropout stays off, so that values and gradients are the same as without.
    """
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module.train()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.eval()
