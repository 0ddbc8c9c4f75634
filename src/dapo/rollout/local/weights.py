"""The trainer's own weights as few, large matrices: q, k, v and gate, up are laid side by side in memory.

Nothing is copied for good: the parameters become views of the joined matrix, so that the optimizer, which writes in
place, updates both at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dapo.rollout.families import Layer

Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerWeights:
    """A decoder layer as a decode step uses it."""

    qkv: Projection  # [n, H] -> [n, (NQ + 2 NK) D]
    out: Projection
    gate_up: Projection | None  # None: the feed-forward is not silu(gate) · up, and `mlp` is called instead
    down: Projection
    mlp: Projection
    input_norm: Tensor
    post_norm: Tensor
    head_norms: tuple[Tensor, Tensor] | None
    eps: float
    window: int | None


def layer_weights(layer: Layer) -> LayerWeights:
    attention, mlp = layer.attention, layer.mlp
    is_gated = isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation"
    norms = None
    if layer.query_norm is not None and layer.key_norm is not None:
        norms = (layer.query_norm.weight, layer.key_norm.weight)
    return LayerWeights(
        qkv=joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        out=joined([attention.o_proj]),
        gate_up=joined([mlp.gate_proj, mlp.up_proj]) if is_gated else None,
        down=joined([mlp.down_proj]),
        mlp=mlp,
        input_norm=layer.input_norm.weight,
        post_norm=layer.post_norm.weight,
        head_norms=norms,
        eps=layer.input_norm.variance_epsilon,
        window=layer.window,
    )


def joined(linears: Sequence[Any]) -> Projection:
    """One projection for several with the same input. Adapters and other wrapped layers are called one by one."""
    if any(type(linear) is not nn.Linear for linear in linears):
        if len(linears) == 1:
            alone: Projection = linears[0]
            return alone
        return lambda x: torch.cat([linear(x) for linear in linears], dim=-1)
    weight = side_by_side([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return lambda x: F.linear(x, weight)
    if any(bias is None for bias in biases):
        return lambda x: torch.cat([linear(x) for linear in linears], dim=-1)
    bias = side_by_side(biases)
    return lambda x: F.linear(x, weight, bias)


@torch.no_grad()
def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The parameters as one tensor, first dimension by first dimension; they are views of it from now on."""
    if not _are_adjacent(parameters):
        whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
    first = parameters[0].detach()
    return first.as_strided((sum(len(p) for p in parameters), *first.shape[1:]), first.stride())


def _are_adjacent(parameters: Sequence[nn.Parameter]) -> bool:
    """Do they lie in one storage, one behind the other? So it is when an engine on the same weights was here before."""
    end = parameters[0].data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != end or not parameter.is_contiguous():
            return False
        if parameter.untyped_storage().data_ptr() != parameters[0].untyped_storage().data_ptr():
            return False
        end += parameter.numel() * parameter.element_size()
    return True
