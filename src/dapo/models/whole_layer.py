"""A decoder layer as one operation, its gradients written out: on a GPU autograd's bookkeeping of twenty small ones
costs the host more time than the card needs for them.

A layer that recomputes keeps its input, and what attention gave where there is room; it makes again only what its
gradients read: not the last product, and attention only if its result was not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dapo.models.adapter import product_in
from dapo.models.attention_gradients import attention_gradients, attention_with_state, has_state, of_tokens
from dapo.models.packing import Packed

N_OTHERS = 4  # arguments of the operation before the weights

Keeps = Literal["all", "attention", "input"]  # for the gradients; the second and the third recompute


class Weights(NamedTuple):
    """Of one layer; a family without a bias or a norm of queries and keys has None there."""

    norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    next_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Settings(NamedTuple):
    """What else a layer is."""

    kernels: Any  # the module: Triton's, or those of a CPU
    packed: Packed
    eps: tuple[float, float]  # of both norms
    head_eps: float  # of the norms of queries and keys
    head_size: int
    scaling: float
    window: int | None
    keeps: Keeps


class Parts(NamedTuple):
    """What the gradients read besides weights, input and attention's result."""

    y: Tensor  # [T, H] normed
    rms: Tensor
    q: Tensor  # [T, Hq, D] rotated, as k
    k: Tensor
    v: Tensor
    flat_q: Tensor | None  # [T·Hq, D] before their norm, where there is one
    q_rms: Tensor | None
    flat_k: Tensor | None
    k_rms: Tensor | None
    x2: Tensor  # [T, H] with attention added
    y2: Tensor  # its norm
    rms2: Tensor
    gate: Tensor
    up: Tensor


def can_be_whole(layer: Any, x: Tensor) -> bool:
    """Plain matrices without adapter, quantized weights or hook, where attention keeps what its gradients need."""
    attention, mlp = layer.self_attn, layer.mlp
    if not has_state(x, attention.head_dim) or (attention.training and attention.attention_dropout):
        return False
    biased = (attention.q_proj, attention.k_proj, attention.v_proj)
    bare = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return all(map(is_plain, biased)) and all(map(is_bare, bare))


def is_plain(linear: Any) -> bool:
    """A matrix, perhaps with a bias: no adapter, no quantized weights, no hook."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return type(linear) is nn.Linear and not any(hooks)


def is_bare(linear: Any) -> bool:
    """A matrix and nothing else."""
    return is_plain(linear) and linear.bias is None


def whole_layer(
    layer: Any,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    packed: Packed,
    kernels: Any,
    window: int | None,
    keeps: Keeps,
) -> Tensor:
    """The formula of `fused_layers.fused_layer` on x [T, H], with cos and sin [T, D]."""
    attention, mlp = layer.self_attn, layer.mlp
    assert cos.shape[-1] == attention.head_dim, "the known families turn all values of a head"
    norm, next_norm = layer.input_layernorm, layer.post_attention_layernorm
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    settings = Settings(
        kernels,
        packed,
        (norm.variance_epsilon, next_norm.variance_epsilon),
        0.0 if q_norm is None else q_norm.variance_epsilon,
        attention.head_dim,
        attention.scaling,
        window,
        keeps,
    )
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    weights = Weights(
        norm.weight, q.weight, k.weight, v.weight, q.bias, k.bias, v.bias,
        None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
        attention.o_proj.weight, next_norm.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
    )  # fmt: skip
    result: Tensor = _Layer.apply(x, cos, sin, settings, *weights)  # type: ignore[no-untyped-call]
    return result


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, settings: Settings, *given: Tensor | None) -> Tensor:
        w = Weights(*given)  # type: ignore[arg-type]
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        q, k, v, read = attention_inputs(x, cos, sin, w, settings)
        attended = attention_with_state(q, k, v, settings.packed, settings.scaling, settings.window)
        x2, y2, rms2, gate, up = feed_forward_inputs(x, attended[0], w, settings)
        kept: tuple[Tensor | None, ...] = () if settings.keeps == "input" else attended
        if settings.keeps == "all":
            kept += (*read[:2], q, k, v, *read[2:], x2, y2, rms2, gate, up)  # Parts
        ctx.settings, ctx.n_attended = settings, len(attended)
        ctx.save_for_backward(x, cos, sin, *w, *kept)
        return x2 + F.linear(settings.kernels.gated_forward(gate, up), w.down)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        settings: Settings = ctx.settings
        kernels, packed = settings.kernels, settings.packed
        x, cos, sin, *rest = ctx.saved_tensors
        w, kept = Weights(*rest[: len(Weights._fields)]), rest[len(Weights._fields) :]
        attended, saved = kept[: ctx.n_attended], kept[ctx.n_attended :]
        if saved:
            parts = Parts(*saved)
        else:
            attended, parts = recomputed(x, cos, sin, w, settings, attended)
        cells, *state = attended
        T, grad = len(x), grads[0].contiguous()
        is_trained = any(ctx.needs_input_grad[N_OTHERS:])

        def of_weight(weight: Tensor, rows: Tensor, read: Tensor) -> Tensor | None:
            return weight_gradient(weight, rows, read) if is_trained else None

        def of_bias(bias: Tensor | None, rows: Tensor) -> Tensor | None:
            return rows.sum(0) if is_trained and bias is not None else None

        d_gate, d_up, product = kernels.gated_backward(grad @ w.down, parts.gate, parts.up)
        of_down = of_weight(w.down, grad, product)
        of_gate, of_up = of_weight(w.gate, d_gate, parts.y2), of_weight(w.up, d_up, parts.y2)
        del product
        d_y2 = torch.mm(d_gate, w.gate).addmm_(d_up, w.up)
        del d_gate, d_up
        d_x2, of_next_norm = kernels.norm_backward(d_y2, grad, parts.x2, w.next_norm, parts.rms2)
        of_o = of_weight(w.o, d_x2, of_tokens(cells, packed).reshape(T, -1))
        d_mixed = torch.mm(d_x2, w.o).view(parts.q.shape)
        d_q, d_k, d_v = attention_gradients(
            d_mixed, parts.q, parts.k, parts.v, cells, state, packed, settings.scaling, settings.window
        )
        d_q, d_k = kernels.rotate(d_q, d_k, cos, sin, is_backward=True)
        d_q, of_q_norm = head_norm_backward(d_q, parts.flat_q, parts.q_rms, w.q_norm, kernels)
        d_k, of_k_norm = head_norm_backward(d_k, parts.flat_k, parts.k_rms, w.k_norm, kernels)
        d_q, d_k, d_v = (d.reshape(T, -1) for d in (d_q, d_k, d_v))
        d_y = torch.mm(d_q, w.q).addmm_(d_k, w.k).addmm_(d_v, w.v)
        d_x, of_norm = kernels.norm_backward(d_y, d_x2, x, w.norm, parts.rms)
        gradients = (  # in the order of Weights
            of_norm.to(w.norm.dtype),
            of_weight(w.q, d_q, parts.y), of_weight(w.k, d_k, parts.y), of_weight(w.v, d_v, parts.y),
            of_bias(w.q_bias, d_q), of_bias(w.k_bias, d_k), of_bias(w.v_bias, d_v), of_q_norm, of_k_norm,
            of_o, of_next_norm.to(w.next_norm.dtype), of_gate, of_up, of_down,
        )  # fmt: skip
        return d_x, *([None] * (N_OTHERS - 1)), *gradients


def weight_gradient(weight: Tensor, rows: Tensor, read: Tensor) -> Tensor | None:
    """rowsᵀ · read; None where the weights have a float32 master, to whose gradient it was added unrounded."""
    master: Tensor | None = getattr(weight, "master", None)
    if master is None:
        return rows.t() @ read
    if master.grad is None:
        master.grad = product_in(torch.float32, rows.t(), read)
    else:
        add_wide_product(master.grad, rows.t(), read)
    return None


def add_wide_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """a · b added to a float32 matrix in the product itself: nothing of 16 bits is written and read again."""
    if a.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def attention_inputs(
    x: Tensor, cos: Tensor, sin: Tensor, w: Weights, settings: Settings
) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
    """q, k, v [T, heads, D], and what made them: y, its RMS, and queries and keys before their norm with theirs."""
    T, D, kernels = len(x), settings.head_size, settings.kernels
    _, y, rms = kernels.norm_forward(x, None, w.norm, settings.eps[0])
    q, k, v = F.linear(y, w.q, w.q_bias), F.linear(y, w.k, w.k_bias), F.linear(y, w.v, w.v_bias)
    flat_q = q_rms = flat_k = k_rms = None
    if w.q_norm is not None:
        assert w.k_norm is not None, "a family that norms its queries norms its keys"
        flat_q, flat_k = q.view(-1, D), k.view(-1, D)
        _, q, q_rms = kernels.norm_forward(flat_q, None, w.q_norm, settings.head_eps)
        _, k, k_rms = kernels.norm_forward(flat_k, None, w.k_norm, settings.head_eps)
    q, k = kernels.rotate(q.view(T, -1, D), k.view(T, -1, D), cos, sin, is_backward=False)
    return q, k, v.view(T, -1, D), (y, rms, flat_q, q_rms, flat_k, k_rms)


def feed_forward_inputs(
    x: Tensor, cells: Tensor, w: Weights, settings: Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x with attention added, its norm, 1/RMS, and the two that are multiplied."""
    added = F.linear(of_tokens(cells, settings.packed).reshape(len(x), -1), w.o)
    x2, y2, rms2 = settings.kernels.norm_forward(x, added, w.next_norm, settings.eps[1])
    return x2, y2, rms2, F.linear(y2, w.gate), F.linear(y2, w.up)


def recomputed(
    x: Tensor, cos: Tensor, sin: Tensor, w: Weights, settings: Settings, attended: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Parts]:
    """What attention gave with its state, made again where it was not kept; and the parts."""
    q, k, v, (y, rms, *heads) = attention_inputs(x, cos, sin, w, settings)
    attended = attended or attention_with_state(q, k, v, settings.packed, settings.scaling, settings.window)
    return attended, Parts._make((y, rms, q, k, v, *heads, *feed_forward_inputs(x, attended[0], w, settings)))


def head_norm_backward(
    grad: Tensor, flat: Tensor | None, rms: Tensor | None, weight: Tensor | None, kernels: Any
) -> tuple[Tensor, Tensor | None]:
    """Gradients through the norm of queries or keys [T, heads, D], where there is one."""
    if weight is None:
        return grad, None
    back, of_weight = kernels.norm_backward(grad.reshape(flat.shape).contiguous(), None, flat, weight, rms)  # type: ignore[union-attr]
    return back.view(grad.shape), of_weight.to(weight.dtype)
