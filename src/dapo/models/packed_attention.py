"""Attention over packed sequences, which never crosses from one into the next, as Hugging Face models call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dapo.errors import EngineError
from dapo.models.kernels.attention import HEAD_MULTIPLE, attention_backward, attention_forward
from dapo.models.kernels.build import library
from dapo.models.packing import Packed, take

PACKED_ATTENTION = "dapo_packed"

# Up to this length of the longest sequence the compiled attention is faster than torch's (docs/log.md).
COMPILED_LENGTH = 512

# cuDNN makes a plan for every length that it meets, in about 0.1 s, so it meets multiples of the first only. It knows
# heads of up to the second.
PLANNED_LENGTH, PLANNED_HEAD = 512, 128
LONG_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]  # the first that can


def packed_hidden(backbone: nn.Module, packed: Packed) -> Tensor:
    """Last hidden state [T, H] of a Hugging Face backbone whose attention is `dapo_packed`."""
    # A mask of four dimensions is taken as it is, so that no [T, T] mask is ever made; the attention ignores it.
    no_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=packed.input_ids.device)
    output = backbone(
        input_ids=packed.input_ids[None],
        position_ids=packed.position_ids[None],
        attention_mask=no_mask,
        use_cache=False,
        packed=packed,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden.squeeze(0)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: Packed | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of a packed batch; query [1, Hq, T, D], key and value [1, Hkv, T, D].

    Without `packed` (a plain call of the Hugging Face model, generation included) it is the library's SDPA.
    """
    if packed is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise EngineError(f"{type(module).__name__} wants attention with {unknown[0]}, which packed attention has not.")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    return attend(q, k, v, packed, scaling=scaling, window=sliding_window, dropout=dropout)[None], None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    *,
    scaling: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    is_fused: bool = False,
) -> Tensor:
    """Causal attention inside each sequence; q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D].

    `is_fused`: by attention.c where that can do it.
    """
    window = window if window is not None and window < packed.max_length else None
    if is_fused and window is None and dropout == 0.0 and runs_compiled(q, k, v, packed.max_length):
        mixed: Tensor = _Attention.apply(q, k, v, packed, scaling)  # type: ignore[no-untyped-call]
        return mixed
    if packed.shared is not None:
        q, k, v = (take(x, packed.shared.cells) for x in (q, k, v))
    if runs_flash(q, dropout):
        mixed = _by_length(q, k, v, packed, scaling, window)
    else:
        mixed = _bucketed(q, k, v, packed, scaling, window, dropout)
    return mixed if packed.shared is None else mixed.index_select(0, packed.shared.home)


def runs_compiled(q: Tensor, k: Tensor, v: Tensor, longest: int) -> bool:
    """What attention.c knows: float32 on a CPU, queries, keys and values of one size, no long sequence."""
    is_float32 = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in (q, k, v))
    is_known = k.shape == v.shape and q.shape[-1] == k.shape[-1] and q.shape[-1] % HEAD_MULTIPLE == 0
    return is_float32 and is_known and longest <= COMPILED_LENGTH and library() is not None


def runs_flash(q: Tensor, dropout: float) -> bool:
    """What CUDA's fast kernels know: half precision, no dropout."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0


class _Attention(torch.autograd.Function):
    """By attention.c, from the packed tokens themselves: nothing is spread or padded, no prompt worked on twice."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: Packed, scaling: float | None) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        mixed, normaliser = attention_forward(q, k, v, packed.sequences, scale)
        ctx.save_for_backward(q, k, v, mixed, normaliser)
        ctx.packed, ctx.scale = packed, scale
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed: Packed = ctx.packed
        q, k, v, mixed, normaliser = ctx.saved_tensors
        grad = grads[0].contiguous()
        return *attention_backward(q, k, v, mixed, normaliser, grad, packed.sequences, ctx.scale), None, None


def _bucketed(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, scaling: float | None, window: int | None, dropout: float
) -> Tensor:
    """SDPA over padded blocks; q, k, v [F, H, D]. Padding is at a row's end, which causal attention never reads."""
    buckets, home = packed.buckets
    blocks = []
    for bucket in buckets:
        rows, length = bucket.rows, bucket.length
        q_block, k_block, v_block = (
            (x if bucket.source is None else x.index_select(0, bucket.source))
            .reshape(rows, length, *x.shape[1:])
            .transpose(1, 2)
            for x in (q, k, v)
        )  # [S, H, L, D]
        mask = _window_mask(length, window, q.device) if window is not None and window < length else None
        block = F.scaled_dot_product_attention(
            q_block,
            k_block,
            v_block,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        blocks.append(block.transpose(1, 2).reshape(rows * length, *q.shape[1:]))
    return blocks[0] if home is None else torch.cat(blocks).index_select(0, home)  # [F, Hq, D]


def _by_length(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scaling: float | None, window: int | None) -> Tensor:
    """Flash attention over sequences end to end, and cuDNN's for long ones; q, k, v [F, H, D] in half precision."""
    if window is not None or q.shape[-1] > PLANNED_HEAD:
        return _varlen(q, k, v, packed.cu_seqlens, packed.max_length, scaling, window)
    mixed = []
    parts = (x.split([span.cells for span in packed.spans]) for x in (q, k, v))
    for span, q_part, k_part, v_part in zip(packed.spans, *parts, strict=True):
        if span.cu_seqlens is None:
            mixed.append(_long(q_part, k_part, v_part, scaling))
        else:
            mixed.append(_varlen(q_part, k_part, v_part, span.cu_seqlens, span.max_length, scaling, None))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def _long(q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """One sequence [L, H, D], by cuDNN where it can. Padding is at the end, which causal attention never reads."""
    length = len(q)
    q, k, v = planned(q, k, v)
    with sdpa_kernel(LONG_BACKENDS, set_priority=True):
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    return mixed[0].transpose(0, 1)[:length]


def planned(*parts: Tensor) -> tuple[Tensor, ...]:
    """Each of a long sequence [L, H, D] as cuDNN reads it, [1, H, L, D] with L padded."""
    more = -len(parts[0]) % PLANNED_LENGTH
    padded = (F.pad(x, (0, 0, 0, 0, 0, more)) if more else x for x in parts)
    return tuple(x.transpose(0, 1)[None] for x in padded)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    """Flash attention over sequences end to end; needs CUDA and half precision."""
    varlen_attn, grouped = _varlen_kernel()
    output: Tensor = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    return output


@cache
def _varlen_kernel() -> tuple[Callable[..., Any], dict[str, bool]]:
    """The kernel, and the keyword that lets it take fewer key heads than query heads: torch 2.11 does so unasked."""
    from torch.nn.attention.varlen import varlen_attn

    has_switch = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return varlen_attn, {"enable_gqa": True} if has_switch else {}


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """[L, L] True where query i may look at key j: i − window < j ≤ i."""
    place = torch.arange(length, device=device)
    behind = place[:, None] - place[None, :]
    return (behind >= 0) & (behind < window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
