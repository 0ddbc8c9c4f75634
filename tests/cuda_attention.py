"""CUDA's attention kernels on a CPU, with their arguments and results: what calls them can be tested anywhere."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dapo.models import attention_gradients, packed_attention, whole_layer

EMPTY = torch.empty(0)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """Of one sequence [L, H, D]: the result, and the log of each query's sum [H, L]."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    place = torch.arange(q.shape[1])
    behind = place[:, None] - place[None, :]
    is_seen = (behind >= 0) & (behind < (window or 1 << 30))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~is_seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def by_autograd(forward, grad: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        parts = tuple(part.detach().requires_grad_() for part in parts)
        return torch.autograd.grad(forward(*parts)[0], parts, grad)


def flash_forward(q, k, v, edges, _edges, longest, _longest, dropout, is_causal, debug, *, scale, **window):
    """The arguments and results of CUDA's kernel, for a machine without it."""
    assert (dropout, debug, window["window_size_right"]) == (0.0, False, 0)
    assert int(edges.diff().max()) == longest
    left = window["window_size_left"]
    assert is_causal == (left == -1)
    parts = zip(*(x.tensor_split(edges[1:-1].long()) for x in (q, k, v)), strict=True)
    mixed, sums = zip(*(attention(*part, scale, None if left == -1 else left + 1) for part in parts), strict=True)
    return torch.cat(mixed), torch.cat(sums, 1), EMPTY, EMPTY, EMPTY


def flash_backward(grad, q, k, v, mixed, sums, edges, _edges, longest, _longest, dropout, is_causal, *seed, **how):
    def again(*parts: Tensor) -> tuple[Tensor, ...]:
        return flash_forward(*parts, edges, edges, longest, longest, dropout, is_causal, False, **how)

    assert len(seed) == 2
    assert_close(again(q, k, v)[:2], (mixed, sums))  # what was kept is this sequence's
    return by_autograd(again, grad, q, k, v)


def cudnn_forward(q, k, v, bias, has_sums, dropout, is_causal, debug, *, scale):
    assert (bias, has_sums, dropout, is_causal, debug) == (None, True, 0.0, True, False)
    assert len(q) == 1
    assert q.shape[2] % packed_attention.PLANNED_LENGTH == 0
    mixed, sums = attention(*(x[0].transpose(0, 1) for x in (q, k, v)), scale, None)
    return mixed.transpose(0, 1)[None], sums[None], None, None, q.shape[2], q.shape[2], EMPTY, EMPTY, EMPTY


def cudnn_backward(grad, q, k, v, mixed, sums, seed, offset, *rest, scale):
    assert rest == (None, None, None, q.shape[2], q.shape[2], 0.0, True)
    assert (len(seed), len(offset)) == (0, 0)

    def again(*parts: Tensor) -> tuple[Tensor, ...]:
        return cudnn_forward(*parts, None, True, 0.0, True, False, scale=scale)

    result, its_sums = again(q, k, v)[:2]
    is_padded = (grad == 0).all(-1).all(1)[0]  # [L]: nobody asked for these
    assert_close((result[:, :, ~is_padded], its_sums), (mixed[:, :, ~is_padded], sums))
    return by_autograd(again, grad, q, k, v)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers become one operation on a CPU too; from 16 tokens on a sequence is long."""
    monkeypatch.setattr("dapo.models.packing.LONG_TOKENS", 16)
    monkeypatch.setattr(packed_attention, "PLANNED_LENGTH", 8)
    monkeypatch.setattr(whole_layer, "has_state", lambda *_: True)
    monkeypatch.setattr(attention_gradients, "cudnn_can", lambda *_: True)
    for kernel in (flash_forward, flash_backward, cudnn_forward, cudnn_backward):
        monkeypatch.setattr(attention_gradients, kernel.__name__, kernel)
