"""W x + s·B A x in the precision of W: two narrow products, the second added to the layer's own in place.

peft multiplies in the adapter's float32, so that every 16-bit result is widened, multiplied, added and rounded again:
more traffic than the layer itself. Here the adapter's weights are rounded for the products; they stay float32, and
their gradients are summed and kept in it.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def is_adapted(layer: Any) -> bool:
    return hasattr(layer, "lora_A")


def compact(model: nn.Module) -> None:
    """Let every layer with an adapter compute it this way."""
    for layer in model.modules():
        if is_adapted(layer):
            layer.forward = MethodType(adapted_forward, layer)


def adapter_of(layer: Any) -> tuple[Tensor, Tensor, float]:
    """A [r, in], B [out, r] and s."""
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


def adapted_forward(layer: Any, x: Tensor) -> Tensor:
    result: Tensor = layer.base_layer(x.reshape(-1, x.shape[-1]))
    if not (layer.disable_adapters or layer.merged):
        (name,) = layer.active_adapters
        read = layer.lora_dropout[name](x).reshape(len(result), -1)
        result = _Added.apply(result, read, *adapter_of(layer))  # type: ignore[no-untyped-call]
    return result.view(*x.shape[:-1], -1)


class _Added(torch.autograd.Function):
    """result + s·(x Aᵀ) Bᵀ, in place."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        narrow_a, narrow_b = a.to(result.dtype), (b * scale).to(result.dtype)
        inner = x @ narrow_a.t()
        result.addmm_(inner, narrow_b.t())
        ctx.mark_dirty(result)
        ctx.save_for_backward(x, inner, narrow_a, narrow_b)
        ctx.scale, ctx.dtype = scale, a.dtype
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, a, b = ctx.saved_tensors
        grad = grads[0]
        d_inner = grad @ b
        d_x = d_inner @ a if ctx.needs_input_grad[1] else None
        d_a, d_b = product_in(ctx.dtype, d_inner.t(), x), product_in(ctx.dtype, grad.t(), inner)
        return grad, d_x, d_a, d_b.mul_(ctx.scale), None


def product_in(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    """a · b, summed and kept in a type that may be wider than theirs."""
    if a.is_cuda and a.dtype.itemsize < dtype.itemsize:
        product: Tensor = torch.ops.aten.mm.dtype(a, b, dtype)
        return product
    return a.to(dtype) @ b.to(dtype)
