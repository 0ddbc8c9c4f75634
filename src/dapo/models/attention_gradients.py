"""Packed attention without autograd: a pass that gives its result with what the gradients need, and the gradients.

For half precision on CUDA, by the kernels that `packed_attention.attend` takes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dapo.models.packed_attention import PLANNED_HEAD, planned, runs_flash
from dapo.models.packing import Packed, Span, sum_of_places

flash_forward = torch.ops.aten._flash_attention_forward
flash_backward = torch.ops.aten._flash_attention_backward
cudnn_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def has_state(x: Tensor, head_size: int, window: int | None) -> bool:
    """Whether `attention_with_state` can do it for a layer that reads x."""
    return runs_flash(x, 0.0) and (window is not None or head_size <= PLANNED_HEAD)


def attention_with_state(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, scaling: float, window: int | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`attend` [T, H, D], and besides q, k, v and the result what `attention_gradients` needs; no autograd."""
    window = window if window is not None and window < packed.max_length else None
    q, k, v = in_cells(q, packed), in_cells(k, packed), in_cells(v, packed)
    mixed, state = [], []
    for (q_part, k_part, v_part), span in zip(in_spans(packed, window, q, k, v), spans_of(packed, window), strict=True):
        part, *kept = _kernel_of(span).forward(q_part, k_part, v_part, span, scaling, window)
        mixed.append(part)
        state += kept
    whole = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
    if packed.shared is None:
        return whole, tuple(state)
    return whole.index_select(0, packed.shared.home), (whole, *state)


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
    """Gradients of q, k and v [T, H, D] by the gradient of the result."""
    window = window if window is not None and window < packed.max_length else None
    q, k, v = in_cells(q, packed), in_cells(k, packed), in_cells(v, packed)
    if packed.shared is not None:
        mixed, *state = state
        grad = grad.new_zeros(mixed.shape).index_copy_(0, packed.shared.home, grad)
    found = []
    parts = in_spans(packed, window, grad, q, k, v, mixed)
    for (d, q_part, k_part, v_part, result), span in zip(parts, spans_of(packed, window), strict=True):
        kernel = _kernel_of(span)
        kept, state = state[: kernel.n_kept], state[kernel.n_kept :]
        found.append(kernel.backward(d, q_part, k_part, v_part, result, kept, span, scaling, window))
    whole = (of[0] if len(of) == 1 else torch.cat(of) for of in zip(*found, strict=True))
    d_q, d_k, d_v = (d if packed.shared is None else sum_of_places(d, packed.shared.cells) for d in whole)
    return d_q, d_k, d_v


def in_cells(x: Tensor, packed: Packed) -> Tensor:
    return x if packed.shared is None else x.index_select(0, packed.shared.cells.source)


def spans_of(packed: Packed, window: int | None) -> tuple[Span, ...]:
    """With a window all sequences together: only the packed kernel knows one."""
    if window is None:
        return packed.spans
    return (Span(sum(packed.sequence_lengths), packed.max_length, packed.cu_seqlens),)


def in_spans(packed: Packed, window: int | None, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    sizes = [span.cells for span in spans_of(packed, window)]
    return zip(*(part.split(sizes) for part in parts), strict=True)


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
    """One long sequence [L, H, D], padded as in `_long`."""

    n_kept = 4

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, span: Span, scaling: float, window: int | None) -> tuple[Tensor, ...]:
        assert window is None, "a long sequence with a window is the packed kernel's"
        found = cudnn_forward(*planned(q, k, v), None, True, 0.0, True, False, scale=scaling)
        mixed, logsumexp, seed, offset = found[0], found[1], found[6], found[7]
        return mixed[0].transpose(0, 1)[: span.cells], mixed, logsumexp, seed, offset

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _mixed: Tensor, state: Sequence[Tensor], span: Span,
        scaling: float, _window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        padded, logsumexp, seed, offset = state
        grad, q, k, v = planned(grad, q, k, v)
        longest = q.shape[2]
        found = cudnn_backward(
            grad, q, k, v, padded, logsumexp, seed, offset, None, None, None, longest, longest, 0.0, True,
            scale=scaling,
        )  # fmt: skip
        d_q, d_k, d_v = (d[0].transpose(0, 1)[: span.cells] for d in found)
        return d_q, d_k, d_v


def _kernel_of(span: Span) -> type[_Flash] | type[_CuDNN]:
    return _CuDNN if span.cu_seqlens is None else _Flash
