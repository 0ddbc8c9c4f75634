"""Packed attention without autograd: a pass that gives its result with what the gradients need, and the gradients.

For half precision on CUDA, by the kernels that `packed_attention.attend` takes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dapo.models.packed_attention import PLANNED_HEAD, PLANNED_LENGTH, planned, runs_flash
from dapo.models.packing import Packed, Span, sum_of_places

flash_forward = torch.ops.aten._flash_attention_forward
flash_backward = torch.ops.aten._flash_attention_backward
cudnn_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def has_state(x: Tensor, head_size: int) -> bool:
    """Whether `attention_with_state` can do it for a layer that reads x."""
    return runs_flash(x, 0.0) and head_size <= PLANNED_HEAD


def attention_with_state(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, scaling: float, window: int | None
) -> tuple[Tensor, ...]:
    """`attend` in cells [F, H, D] (see `of_tokens`), and what `attention_gradients` needs besides; no autograd."""
    window = window if window is not None and window < packed.max_length else None
    q, k, v = in_cells(q, packed), in_cells(k, packed), in_cells(v, packed)
    spans = spans_of(packed, window, q, k, v)
    mixed, state = [], []
    for (q_part, k_part, v_part), span in zip(in_spans(spans, q, k, v), spans, strict=True):
        part, *kept = _kernel_of(span).forward(q_part, k_part, v_part, span, scaling, window)
        mixed.append(part)
        state += kept
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed), *state


def attention_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    state: Sequence[Tensor],
    packed: Packed,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v [T, H, D] by that of the result of every token [T, H, D]; `mixed` is in cells."""
    window = window if window is not None and window < packed.max_length else None
    q, k, v = in_cells(q, packed), in_cells(k, packed), in_cells(v, packed)
    if packed.shared is not None:
        grad = grad.new_zeros(mixed.shape).index_copy_(0, packed.shared.home, grad)
    spans = spans_of(packed, window, q, k, v)
    found = []
    for (d, q_part, k_part, v_part, part), span in zip(in_spans(spans, grad, q, k, v, mixed), spans, strict=True):
        kernel = _kernel_of(span)
        kept, state = state[: kernel.n_kept], state[kernel.n_kept :]
        found.append(kernel.backward(d, q_part, k_part, v_part, part, kept, span, scaling, window))
    whole = (of[0] if len(of) == 1 else torch.cat(of) for of in zip(*found, strict=True))
    d_q, d_k, d_v = (d if packed.shared is None else sum_of_places(d, packed.shared.cells) for d in whole)
    return d_q, d_k, d_v


def in_cells(x: Tensor, packed: Packed) -> Tensor:
    return x if packed.shared is None else x.index_select(0, packed.shared.cells.source)


def of_tokens(x: Tensor, packed: Packed) -> Tensor:
    """[F, ...] in cells -> [T, ...]: where sequences share a prompt, its first cells."""
    return x if packed.shared is None else x.index_select(0, packed.shared.home)


def spans_of(packed: Packed, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Span, ...]:
    """With a window, or where there is no cuDNN, all sequences together: the packed kernel knows them all."""
    if window is None and (all(span.cu_seqlens is not None for span in packed.spans) or cudnn_can(q, k, v)):
        return packed.spans
    return (Span(sum(packed.sequence_lengths), packed.max_length, packed.cu_seqlens),)


def in_spans(spans: Sequence[Span], *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(part.split([span.cells for span in spans]) for part in parts), strict=True)


def cudnn_can(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch lets cuDNN attend here, by the rules of its SDPA; asked once for each kind of heads."""
    kind = (q.device, q.dtype, q.shape[1:], k.shape[1:])
    if kind not in _CUDNN_CAN:
        some_q, some_k, some_v = (x[:PLANNED_LENGTH].transpose(0, 1)[None] for x in (q, k, v))
        asked = torch.backends.cuda.SDPAParams(some_q, some_k, some_v, None, 0.0, True, q.shape[1] != k.shape[1])
        _CUDNN_CAN[kind] = bool(torch.backends.cuda.can_use_cudnn_attention(asked))
    return _CUDNN_CAN[kind]


_CUDNN_CAN: dict[Any, bool] = {}


class _Flash:
    """Sequences end to end; q, k, v [F, H, D]."""

    n_kept = 1

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, span: Span, scaling: float, window: int | None) -> tuple[Tensor, ...]:
        edges, longest = span.cu_seqlens, span.max_length
        found = flash_forward(
            q.contiguous(), k.contiguous(), v.contiguous(), edges, edges, longest, longest, 0.0, window is None, False,
            scale=scaling, window_size_left=-1 if window is None else window - 1, window_size_right=0,
        )  # fmt: skip
        return found[0], found[1]

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, state: Sequence[Tensor], span: Span,
        scaling: float, window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        edges, longest = span.cu_seqlens, span.max_length
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        found: tuple[Tensor, Tensor, Tensor] = flash_backward(
            grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(), mixed, state[0], edges, edges, longest,
            longest, 0.0, window is None, *no_dropout,
            scale=scaling, window_size_left=-1 if window is None else window - 1, window_size_right=0,
        )  # fmt: skip
        return found


class _CuDNN:
    """One long sequence [L, H, D], padded to a length that has a plan."""

    n_kept = 3

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, span: Span, scaling: float, window: int | None) -> tuple[Tensor, ...]:
        assert window is None, "a long sequence with a window is the packed kernel's"
        found = cudnn_forward(*planned(q, k, v), None, True, 0.0, True, False, scale=scaling)
        mixed, logsumexp, seed, offset = found[0], found[1], found[6], found[7]
        return mixed[0].transpose(0, 1)[: span.cells], logsumexp, seed, offset

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, state: Sequence[Tensor], span: Span,
        scaling: float, _window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """What was padded has gradient 0, so zeros may stand there in the result as well."""
        logsumexp, seed, offset = state
        grad, q, k, v, mixed = planned(grad, q, k, v, mixed)
        longest = q.shape[2]
        found = cudnn_backward(
            grad, q, k, v, mixed, logsumexp, seed, offset, None, None, None, longest, longest, 0.0, True, scale=scaling
        )
        d_q, d_k, d_v = (d[0].transpose(0, 1)[: span.cells] for d in found)
        return d_q, d_k, d_v


def _kernel_of(span: Span) -> type[_Flash] | type[_CuDNN]:
    return _CuDNN if span.cu_seqlens is None else _Flash
