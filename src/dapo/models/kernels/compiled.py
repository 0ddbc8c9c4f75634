"""The parts of layers and of the head for a CPU by host.c: one pass over the numbers where torch makes several."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from functools import cache
from typing import overload

import torch
from torch import Tensor

from dapo.models.kernels.build import library

ROWS_PER_SUM = 1024  # that a weight's gradient is summed over row by row; these sums are added by torch
PARALLEL_NUMBERS = 2**17  # for fewer a thread costs more than it saves


def norm_forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + residual, its RMS norm, 1 / RMS [T, 1]) of x [T, H]."""
    residual = None if residual is None else residual.contiguous()
    total = x if residual is None else torch.empty_like(x)
    normed, inverse_rms = torch.empty_like(x), x.new_empty(len(x), 1)
    c, width = host(), x.shape[-1]

    def work(a: int, b: int) -> None:
        c.norm_forward(
            at(x, a), at(residual, a), at(weight), eps, at(total, a), at(normed, a), at(inverse_rms, a), b - a, width
        )

    by_rows(len(x), x.numel(), work)
    return total, normed, inverse_rms


def norm_backward(
    grad: Tensor, from_sum: Tensor | None, total: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    grad_x, width = torch.empty_like(total), total.shape[-1]
    sums: dict[int, Tensor] = {}  # of the weight's gradient, by the first row they were summed over
    c = host()

    def work(a: int, b: int) -> None:
        for first in range(a, b, ROWS_PER_SUM):
            part, n = torch.zeros_like(weight), min(ROWS_PER_SUM, b - first)
            c.norm_backward(
                at(grad, first), at(from_sum, first), at(total, first), at(weight), at(inverse_rms, first),
                at(grad_x, first), at(part), n, width,
            )  # fmt: skip
            sums[first] = part

    by_rows(len(grad), grad.numel(), work)
    return grad_x, torch.stack([sums[first] for first in sorted(sums)]).sum(0)


def gated_forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    product, c, width = torch.empty_like(gate), host(), gate.shape[-1]

    def work(a: int, b: int) -> None:
        c.gated_forward(at(gate, a), at(up, a), at(product, a), b - a, width, width)

    by_rows(len(gate), gate.numel(), work)
    return product


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and the product once more."""
    grad_gate, grad_up, product = (torch.empty_like(gate) for _ in range(3))
    c, width = host(), gate.shape[-1]

    def work(a: int, b: int) -> None:
        rows = (at(x, a) for x in (grad, gate, up, grad_gate, grad_up, product))
        c.gated_backward(*rows, (b - a) * width)

    by_rows(len(gate), gate.numel(), work)
    return grad_gate, grad_up, product


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, is_backward: bool) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, heads, D] rotated by their angles [T, D]; the gradient is rotated back."""
    turned_q, turned_k = _turned(q.contiguous(), cos, sin, is_backward), _turned(k.contiguous(), cos, sin, is_backward)
    return turned_q, turned_k


def _turned(x: Tensor, cos: Tensor, sin: Tensor, is_backward: bool) -> Tensor:
    out, c = torch.empty_like(x), host()
    _, heads, size = x.shape
    direction = -1.0 if is_backward else 1.0

    def work(a: int, b: int) -> None:
        c.rotate(at(x, a), at(cos, a), at(sin, a), direction, at(out, a), b - a, heads, size)

    by_rows(len(x), x.numel(), work)
    return out


def logit_scores(
    logits: Tensor, target: Tensor, *, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, log-normaliser, entropy), each [N], of logits [N, V] before the temperature."""
    logp, normaliser, entropy = (logits.new_zeros(len(logits)) for _ in range(3))
    c, (n, n_tokens), target = host(), logits.shape, target.contiguous()

    def work(a: int, b: int) -> None:
        c.logit_scores(
            at(logits, a), target.data_ptr() + 8 * a, 1 / temperature, at(logp, a), at(normaliser, a),
            at(entropy, a) if with_entropy else None, b - a, n_tokens,
        )  # fmt: skip

    by_rows(n, logits.numel(), work)
    return logp, normaliser, entropy


def logit_gradient(
    logits: Tensor, target: Tensor, normaliser: Tensor, grad_logp: Tensor, *, temperature: float, dtype: torch.dtype
) -> Tensor:
    """d(Σ grad_logp · logp)/d(logits) [N, V] in `dtype`; float32 ones take the place of the logits."""
    c, (n, n_tokens), target, grad = host(), logits.shape, target.contiguous(), grad_logp.contiguous()

    def work(a: int, b: int) -> None:
        rows = at(logits, a), target.data_ptr() + 8 * a, at(normaliser, a), at(grad, a)
        c.logit_gradient(*rows, 1 / temperature, b - a, n_tokens)

    by_rows(n, logits.numel(), work)
    return logits.to(dtype)


# ------------------------------------------------------------------ calling


def host() -> CDLL:
    found = library()
    assert found is not None, "host.c is not compiled here: ask `library` first"
    return found


@overload
def at(x: Tensor, row: int = 0) -> int: ...
@overload
def at(x: Tensor | None, row: int = 0) -> int | None: ...
def at(x: Tensor | None, row: int = 0) -> int | None:
    """The address of a row of a contiguous tensor of 4-byte numbers; None for None."""
    if x is None:
        return None
    assert x.is_contiguous(), "C reads number after number"
    assert x.element_size() == 4, f"C reads numbers of four bytes, not {x.dtype}"
    return x.data_ptr() + 4 * row * x.stride(0) if row else x.data_ptr()


def by_rows(n: int, numbers: int, work: Callable[[int, int], None]) -> None:
    """work(first, end) over n rows of so many numbers together: at once, or shared among as many threads as torch has.

    A call into C holds no lock of Python's.
    """
    n_parts = min(torch.get_num_threads(), n, numbers // PARALLEL_NUMBERS)
    if n_parts < 2:
        work(0, n)
        return
    edges = [n * i // n_parts for i in range(n_parts + 1)]
    list(threads(n_parts).map(work, edges[:-1], edges[1:]))


@cache
def threads(n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix="dapo-host")


os.register_at_fork(after_in_child=threads.cache_clear)  # threads do not survive a fork
