"""The critic of PPO and VAPO: the policy's backbone with a scalar head that starts at zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel

from dapo.errors import EngineError
from dapo.models.fused_layers import fuse_layers
from dapo.models.load import load_pretrained
from dapo.models.packed_attention import packed_hidden
from dapo.models.packing import Packed

HEAD_FILE = "value_head.safetensors"


class Critic(nn.Module):
    """V(s_t): how much reward is to be expected from here."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        weight = next(backbone.parameters())
        # Zero, so that an untrained critic says 0 everywhere and the first advantages are the rewards.
        self.value_head = nn.Linear(
            backbone.config.get_text_config().hidden_size, 1, device=weight.device, dtype=weight.dtype
        )
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def device(self) -> torch.device:
        return self.value_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.value_head.weight.dtype

    def forward(self, packed: Packed, *, features_only: bool = False) -> Tensor:
        """V(s_t) [N] for every response token, s_t being the prompt and the response *before* token t. Float32 up.

        `features_only`: what the head is given instead, [N, H].
        """
        hidden = packed.states(packed_hidden(self.backbone, packed))  # [N, H]
        hidden = hidden.to(torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        head = self.value_head
        if features_only:
            return hidden
        return nn.functional.linear(hidden, head.weight.to(hidden.dtype), head.bias.to(hidden.dtype))[:, 0]


def load_critic(
    path: str, *, dtype: torch.dtype, device: str, revision: str | None = None, is_fused: bool = True
) -> Critic:
    """A saved critic, or a fresh one on the backbone of a policy's folder or hub name."""
    critic = Critic(load_pretrained(AutoModel, path, dtype=dtype, device=device, revision=revision)).eval()
    if is_fused:
        fuse_layers(critic.backbone)
    head_file = Path(path) / HEAD_FILE
    if head_file.exists():
        weights = load_file(head_file, device=device)
        expected = {name: tensor.shape for name, tensor in critic.value_head.state_dict().items()}
        found = {name: tensor.shape for name, tensor in weights.items()}
        if found != expected:
            raise EngineError(f"{head_file}: the value head has {found}, the backbone needs {expected}.")
        critic.value_head.load_state_dict(weights)
    return critic


def save_critic(critic: Critic, folder: str | Path, weights: dict[str, Tensor] | None = None) -> None:
    """The backbone as a Hugging Face folder, the value head beside it. `weights`: all of them, where it is sharded."""
    weights = critic.state_dict() if weights is None else weights
    parts: dict[str, dict[str, Tensor]] = {"backbone": {}, "value_head": {}}
    for name, tensor in weights.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor.contiguous()
    critic.backbone.save_pretrained(folder, state_dict=parts["backbone"])
    save_file(parts["value_head"], Path(folder) / HEAD_FILE)
