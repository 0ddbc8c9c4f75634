"""Decoder layers of the known families with their memory-bound parts fused: norms, gated feed-forward, positions.

A layer's `forward` is replaced, not its modules: parameters, names, adapters and hooks stay as they are, and a call
without `packed` (generation, the library's own forward) runs the library's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dapo.models.kernels import compiled, host
from dapo.models.kernels.build import library
from dapo.models.packed_attention import attend
from dapo.models.packing import Packed
from dapo.models.triton_support import runs_triton
from dapo.models.whole_layer import Keeps, can_be_whole, is_bare, is_plain, whole_layer

BLOCK_ROWS = 512  # of a feed-forward, that one core works on at a time
TRANSPOSED_ROWS = 256  # of a product: for fewer it is not worth while
# Layers that all are: x + attention(norm(x)), then x + down(silu(gate(norm(x))) · up(norm(x))).
LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}


def fuse_layers(backbone: Any) -> int:
    """Fuse every layer of a known family that can be; returns how many. Anything else stays as it is."""
    layers = getattr(backbone, "layers", ())
    fused = [layer for layer in layers if is_known(layer)]
    for layer in fused:
        layer.forward = MethodType(layer_forward, layer)
    if fused and type(backbone.norm).__name__ == type(fused[0].input_layernorm).__name__:
        backbone.norm.forward = MethodType(norm_module_forward, backbone.norm)
    return len(fused)


def is_known(layer: nn.Module) -> bool:
    if type(layer).__name__ not in LAYERS or not type(layer).__module__.startswith("transformers."):
        return False
    attention: Any = layer.self_attn
    return bool(attention.config.hidden_act == "silu")


def runs_fused(x: Tensor) -> bool:
    """Where the kernels run: CUDA with Triton, in the precisions they know; a CPU in float32."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        return True
    return runs_triton(x.device.type) and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def kernels_for(x: Tensor) -> Any:
    """The module of the kernels: Triton's, or for a CPU those compiled, or those in torch."""
    if runs_triton(x.device.type):
        from dapo.models.kernels import layers

        return layers
    return host if library() is None else compiled


def layer_forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """One decoder layer over a packed batch [1, T, H]."""
    packed: Packed | None = kwargs.get("packed")
    if packed is None or args or not runs_fused(hidden_states):
        result: Tensor = type(layer).forward(layer, hidden_states, *args, **kwargs)
        return result
    cos, sin = kwargs["position_embeddings"]
    x, window = hidden_states.squeeze(0), window_of(layer.self_attn)  # whose gradient is a view, unlike that of [0]
    if can_be_whole(layer, x):
        return whole_layer(layer, x, cos[0], sin[0], packed, kernels_for(x), window, keeps_of(layer))[None]
    return fused_layer(layer, x, cos[0], sin[0], packed)[None]


def keeps_of(layer: Any) -> Keeps:
    if not (layer.gradient_checkpointing and layer.training):
        return "all"
    return "attention" if getattr(layer, "keeps_attention", False) else "input"


def recomputes_itself(layer: Any, x: Tensor) -> bool:
    """Whether a layer that reads x keeps what it must by itself, so that nobody else has to run it again."""
    is_fused = getattr(layer.forward, "__func__", None) is layer_forward
    return is_fused and runs_fused(x) and can_be_whole(layer, x)


def fused_layer(layer: Any, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed) -> Tensor:
    """The layer's formula on x [T, H], with cos and sin [T, D] of each token's position."""
    attention, mlp = layer.self_attn, layer.mlp
    norm, next_norm = layer.input_layernorm, layer.post_attention_layernorm
    T, D = len(x), attention.head_dim
    y = rms_norm(x, norm.weight, norm.variance_epsilon)
    q, k, v = (part.view(T, -1, D) for part in projected(y, attention.q_proj, attention.k_proj, attention.v_proj))
    if hasattr(attention, "q_norm"):
        q, k = (rms_norm(h, n.weight, n.variance_epsilon) for h, n in ((q, attention.q_norm), (k, attention.k_norm)))
    assert cos.shape[-1] == D, f"positions turn {cos.shape[-1]} of {D} values of a head; the known families turn all"
    q, k = rotary(q, k, cos, sin)
    mixed = attend(
        q,
        k,
        v,
        packed,
        scaling=attention.scaling,
        window=window_of(attention),
        dropout=attention.attention_dropout if attention.training else 0.0,
        is_fused=True,
    )
    (added,) = projected(mixed.reshape(T, -1), attention.o_proj)
    x, y = add_rms_norm(x, added, next_norm.weight, next_norm.variance_epsilon)
    return feed_forward(mlp, x, y)


def window_of(attention: Any) -> int | None:
    """Tokens that a query looks back over: Qwen decides by layer, Mistral by config, Llama has no window."""
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window


def norm_module_forward(norm: Any, hidden_states: Tensor) -> Tensor:
    if not runs_fused(hidden_states):
        result: Tensor = type(norm).forward(norm, hidden_states)
        return result
    return rms_norm(hidden_states, norm.weight, norm.variance_epsilon)


# ------------------------------------------------------------------ the parts, each with its gradient


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + eps) · weight over the last dimension."""
    normed: Tensor = _Norm.apply(x, None, weight, eps)[1]  # type: ignore[no-untyped-call]
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its RMS norm)."""
    total, normed = _Norm.apply(x, residual, weight, eps)  # type: ignore[no-untyped-call]
    return total, normed


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor | None, Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        other = None if residual is None else residual.reshape(-1, x.shape[-1])
        total, normed, inverse_rms = kernels_for(x).norm_forward(rows.contiguous(), other, weight, eps)
        ctx.save_for_backward(total, weight, inverse_rms)
        ctx.has_residual = residual is not None
        return None if residual is None else total.view(x.shape), normed.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, inverse_rms = ctx.saved_tensors
        grad_total, grad_normed = grads
        assert grad_normed is not None, "autograd fills in zeros"
        shape = grad_normed.shape
        rows = grad_normed.reshape(total.shape).contiguous()
        from_sum = None
        if ctx.has_residual and grad_total is not None:
            from_sum = grad_total.reshape(total.shape).contiguous()
        grad, grad_weight = kernels_for(total).norm_backward(rows, from_sum, total, weight, inverse_rms)
        grad = grad.view(shape)
        return grad, grad if ctx.has_residual else None, grad_weight.to(weight.dtype), None


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [T, Hq, D] and keys [T, Hk, D] rotated by their positions' angles [T, D]."""
    rotated: tuple[Tensor, Tensor] = _Rotary.apply(q, k, cos.contiguous(), sin.contiguous())  # type: ignore[no-untyped-call]
    return rotated


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        rotated: tuple[Tensor, Tensor] = kernels_for(q).rotate(q, k, cos, sin, is_backward=False)
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *kernels_for(grads[0]).rotate(grads[0], grads[1], *ctx.saved_tensors, is_backward=True), None, None


def projected(x: Tensor, *linears: nn.Module) -> Sequence[Tensor]:
    """The products of x [T, H] with several matrices."""
    if kernels_for(x) is compiled and all(map(is_bare, linears)):
        products: tuple[Tensor, ...] = _Products.apply(x, *(linear.weight for linear in linears))  # type: ignore[no-untyped-call]
        return products
    return [linear(x) for linear in linears]


class _Products(torch.autograd.Function):
    """For a CPU: the gradients of x are summed in the products themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(x @ transposed(weight, len(x)) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grad_x = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        is_trained = ctx.needs_input_grad[1:]
        return grad_x, *(grad.t() @ x if wanted else None for grad, wanted in zip(grads, is_trained, strict=True))


def transposed(weight: Tensor, n_rows: int) -> Tensor:
    """weightᵀ, laid out anew where so many rows make up for it: a CPU's products are then faster by up to a quarter."""
    return weight.t().contiguous() if n_rows >= TRANSPOSED_ROWS else weight.t()


def feed_forward(mlp: Any, x: Tensor, y: Tensor) -> Tensor:
    """x + down(silu(gate(y)) · up(y)) of x and y [T, H]."""
    projections = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if kernels_for(y) is compiled and all(map(is_bare, projections)):
        result: Tensor = _FeedForward.apply(x, y, *(linear.weight for linear in projections))  # type: ignore[no-untyped-call]
        return result
    return x + gated(mlp.gate_proj(y), mlp.up_proj(y), mlp.down_proj)


class _FeedForward(torch.autograd.Function):
    """Some rows at a time, for a CPU: their product and the gradients of their gate and up never leave its cache."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gates, ups, out = y.new_empty(len(y), len(gate)), y.new_empty(len(y), len(up)), torch.empty_like(x)
        to_gate, to_up, to_out = (transposed(weight, len(y)) for weight in (gate, up, down))
        for before, rows, g, u, after in in_blocks(x, y, gates, ups, out):
            torch.mm(rows, to_gate, out=g)
            torch.mm(rows, to_up, out=u)
            torch.addmm(before, compiled.gated_forward(g, u), to_out, out=after)
        ctx.save_for_backward(y, gates, ups, gate, up, down)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, gates, ups, gate, up, down = ctx.saved_tensors
        grad, grad_y = grads[0].contiguous(), torch.empty_like(y)
        grad_gate, grad_up, grad_down = (torch.zeros_like(weight) for weight in (gate, up, down))
        for rows, g, u, dx, dy in in_blocks(y, gates, ups, grad, grad_y):
            dg, du, product = compiled.gated_backward(dx @ down, g, u)
            torch.mm(dg, gate, out=dy).addmm_(du, up)
            if any(ctx.needs_input_grad[2:]):
                grad_gate.addmm_(dg.t(), rows)
                grad_up.addmm_(du.t(), rows)
                grad_down.addmm_(dx.t(), product)
        return grad, grad_y, grad_gate, grad_up, grad_down


def in_blocks(*parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of all parts, as many at a time as suits the cores that work on them."""
    return zip(*(part.split(BLOCK_ROWS * torch.get_num_threads()) for part in parts), strict=True)


def gated(gate: Tensor, up: Tensor, down: nn.Module) -> Tensor:
    """down(silu(gate) · up). The product is not kept: the backward pass makes it again while it reads gate and up.

    In torch on a CPU that would be two passes more, so there it is kept.
    """
    if kernels_for(gate) is host:
        plain: Tensor = down(nn.functional.silu(gate) * up)
        return plain
    if is_plain(down):
        result: Tensor = _GatedDown.apply(gate, up, down.weight, down.bias)  # type: ignore[no-untyped-call]
    else:
        result = down(_Gated.apply(gate, up))  # type: ignore[no-untyped-call]
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        product: Tensor = kernels_for(gate).gated_forward(gate.contiguous(), up.contiguous())
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = (x.contiguous() for x in ctx.saved_tensors)
        grad_gate, grad_up, _ = kernels_for(gate).gated_backward(grads[0].contiguous(), gate, up)
        return grad_gate, grad_up


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up, weight)
        return nn.functional.linear(kernels_for(gate).gated_forward(gate, up), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_gate, grad_up, product = kernels_for(gate).gated_backward(grad @ weight, gate, up)
        grad_weight = grad.t() @ product if ctx.needs_input_grad[2] else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[3] else None
        return grad_gate, grad_up, grad_weight, grad_bias
