"""The pass through all decoder layers: of a decode step, and of whatever has to have its very bits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dapo.rollout.local.ops import Ops
from dapo.rollout.local.rows import DeviceRows
from dapo.rollout.local.weights import LayerWeights


def through_layers(
    ops: Ops,
    weights: Sequence[LayerWeights],
    x: Tensor,
    rows: DeviceRows,
    longest: int,
    *,
    inputs: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """x [n, H] before the last layer's feed-forward is added, and that; x is used up. `inputs` takes each layer's."""
    y: Tensor | None = None
    for i, layer in enumerate(weights):
        h = ops.add_norm(x, y, layer.input_norm, layer.eps)
        if inputs is not None:
            inputs.append(x.clone())
        y = layer.out(ops.mix(layer.qkv(h), i, layer.head_norms, layer.eps, layer.window, rows, longest))
        h = ops.add_norm(x, y, layer.post_norm, layer.eps)
        y = layer.mlp(h) if layer.gate_up is None else layer.down(ops.gate(layer.gate_up(h)))
    assert y is not None, "a model has layers"
    return x, y
