"""Causal attention of whole sequences on a CPU and its gradient, by attention.c."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.models.kernels.compiled import at, by_rows, host

HEAD_MULTIPLE = 16  # numbers of a head come in blocks of so many


@dataclass(frozen=True)
class Sequences:
    """Where the tokens of each of S sequences are. Those with the same prompt are adjacent and share it."""

    place: Tensor  # [F] the token in each cell, all sequences end to end
    start: Tensor  # [S + 1] first cell of each sequence
    fresh: Tensor  # [S] its tokens before this one are the prompt that the sequence before has worked on
    edge: Tensor  # [G + 1] first sequence of each prompt
    longest: int

    def __post_init__(self) -> None:
        for index in (self.place, self.start, self.fresh, self.edge):
            assert index.dtype == torch.int64, f"C reads numbers of eight bytes, not {index.dtype}"
            assert index.is_contiguous(), "C reads number after number"

    @property
    def pointers(self) -> tuple[int, ...]:
        return tuple(index.data_ptr() for index in (self.place, self.start, self.fresh, self.edge))


def attention_forward(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D] -> (mixed values like q, log of each softmax's sum [T, Hq])."""
    out, normaliser, c = torch.empty_like(q), q.new_empty(q.shape[:2]), host()
    heads, size = k.shape[1:]

    def work(a: int, b: int) -> None:
        scratch = q.new_empty(c.attention_scratch(sequences.longest, size))
        c.attention_forward(
            at(q), at(k), at(v), *sequences.pointers, scale, at(out), at(normaliser), at(scratch),
            a, b, q.shape[1], heads, size,
        )  # fmt: skip

    by_rows((len(sequences.edge) - 1) * heads, q.numel(), work)
    return out, normaliser


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    normaliser: Tensor,
    grad: Tensor,
    sequences: Sequences,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grad_q, grad_k, grad_v, c = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v), host()
    heads, size = k.shape[1:]

    def work(a: int, b: int) -> None:
        scratch = q.new_empty(c.attention_scratch(sequences.longest, size))
        c.attention_backward(
            at(q), at(k), at(v), at(out), at(normaliser), at(grad), *sequences.pointers, scale,
            at(grad_q), at(grad_k), at(grad_v), at(scratch), a, b, q.shape[1], heads, size,
        )  # fmt: skip

    by_rows((len(sequences.edge) - 1) * heads, q.numel(), work)
    return grad_q, grad_k, grad_v
