"""Sequences laid end to end without padding, a prompt once for all responses that share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo.models.device import sent
from dapo.models.kernels.attention import Sequences
from dapo.models.triton_support import runs_triton

# A bucket of sequences is padded to its longest; a sequence shorter than this share of it opens a new bucket.
SHORTEST_FRACTION = 0.75

# A sequence of this many tokens is long: on CUDA another kernel is faster for it (docs/log.md).
LONG_TOKENS = 2048

# Rows share a prompt's tokens where that saves at least this part of all tokens: attention has to gather them.
SHARING_SAVES = 1 / 16


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length as a padded block of S rows and L columns."""

    rows: int
    length: int
    source: Tensor | None  # [S·L] which of the F cells each is, those past a row's end repeat its last;
    # None: the block is all of them, one by one


@dataclass(frozen=True)
class Span:
    """Neighbours among the sequences: short ones, or a single long one."""

    cells: int  # of all of them, end to end
    max_length: int
    cu_seqlens: Tensor | None  # [S + 1] int32, where each starts; None: a long one


@dataclass(frozen=True)
class Gather:
    """Rows taken from a tensor of T, some more than once; and the way back, where their gradients are summed."""

    source: Tensor  # [M] the row that each is taken from
    order: Tensor  # [M] where the rows went: all places of the first, then of the second, and so on
    starts: Tensor  # [T + 1] int32, where each row's places begin in `order`

    @classmethod
    def of(cls, source: NDArray[np.int64], n_rows: int, device: str | torch.device) -> Gather:
        order = np.argsort(source, kind="stable").astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(np.bincount(source, minlength=n_rows))]).astype(np.int32)
        return cls(*(sent(torch.from_numpy(array), device) for array in (source, order, starts)))

    @cached_property
    def taken(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """For every number of times n that a row is taken: those rows [K], and where they went [K, n]."""
        times = self.starts.diff()
        found = []
        for n in times[times > 0].unique().tolist():
            rows = torch.nonzero(times == n)[:, 0]
            places = self.starts[rows, None] + torch.arange(n, device=rows.device)
            found.append((rows, self.order[places].long()))
        return tuple(found)


@dataclass(frozen=True)
class Shared:
    """How the sequences of a batch share prompts: laid end to end they have F cells, for T tokens."""

    cells: Gather  # [F] the token in each cell
    home: Tensor  # [T] of the cells of each token the first
    targets: Gather  # [N] `target_index`: a prompt's last token is followed by the first one of every response
    borrowed: tuple[int, ...]  # [S] leading tokens of each sequence that the one before it has


@dataclass(frozen=True)
class Packed:
    """A batch of prompts with their responses, concatenated. T tokens in S sequences, N response tokens.

    Row-major order throughout: `targets` are all tokens of the first response, then of the second, and so on, so that
    `split` divides a result [N] into responses. Of an episode only the model's own tokens are targets. A response's
    last token is not among the T: nothing follows it. Where `shared` is set, a prompt is held once for all rows in a
    row that have it.
    """

    input_ids: Tensor  # [T]
    position_ids: Tensor  # [T], from 0 in each sequence
    cu_seqlens: Tensor  # [S + 1] int32, where each sequence starts if they are laid end to end
    max_length: int  # of the longest sequence
    target_index: Tensor  # [N] positions in [0, T) whose next token is a response token
    targets: Tensor  # [N] those next tokens
    lengths: tuple[int, ...]  # [S] targets of each response
    sequence_lengths: tuple[int, ...]  # [S] tokens of each prompt with its response, but for the last
    shared: Shared | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def n_targets(self) -> int:
        return len(self.targets)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """[N] per response token -> one tensor per response."""
        return tuple(torch.split(values, list(self.lengths)))

    def states(self, hidden: Tensor) -> Tensor:
        """[T, H] per token -> [N, H], the state that each response token was drawn from."""
        return hidden.index_select(0, self.target_index) if self.shared is None else take(hidden, self.shared.targets)

    @cached_property
    def sequences(self) -> Sequences:
        """For a kernel that goes to the tokens itself, on a CPU."""
        lengths = torch.tensor(self.sequence_lengths)
        start = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        if self.shared is None:
            fresh, place = torch.zeros_like(lengths), torch.arange(int(start[-1]))
        else:
            fresh, place = torch.tensor(self.shared.borrowed), self.shared.cells.source
        edge = torch.cat([torch.nonzero(fresh == 0)[:, 0], torch.tensor([len(lengths)])])
        return Sequences(place, start, fresh, edge, self.max_length)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All sequences in their order: every long one by itself, those between two long ones together."""
        if self.max_length < LONG_TOKENS:
            return (Span(sum(self.sequence_lengths), self.max_length, self.cu_seqlens),)
        spans: list[Span] = []
        for is_long, members in groupby(self.sequence_lengths, lambda length: length >= LONG_TOKENS):
            lengths = list(members)
            if is_long:
                spans += [Span(length, length, None) for length in lengths]
            else:
                starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
                spans.append(Span(sum(lengths), max(lengths), sent(starts, self.input_ids.device)))
        return tuple(spans)

    @cached_property
    def buckets(self) -> tuple[tuple[Bucket, ...], Tensor | None]:
        """Padded blocks for kernels that know no packing, and [F] where each cell lies in their sequence.

        Sequences of one length are a block as they are, and no token has to move: None.
        """
        device = self.input_ids.device
        lengths = np.asarray(self.sequence_lengths)
        if (lengths == lengths[0]).all():
            return (Bucket(len(lengths), int(lengths[0]), None),), None
        starts = np.concatenate([[0], np.cumsum(lengths)])
        home = np.empty(starts[-1], dtype=np.int64)
        buckets: list[Bucket] = []
        offset = 0
        for members in _similar(lengths):
            longest = int(lengths[members].max())
            column = np.arange(longest)
            within = np.minimum(column[None, :], lengths[members, None] - 1)
            source = starts[members, None] + within  # [S, L]
            is_real = column[None, :] < lengths[members, None]
            home[source[is_real]] = offset + np.flatnonzero(is_real)
            buckets.append(Bucket(len(members), longest, sent(torch.from_numpy(source.ravel()), device)))
            offset += source.size
        return tuple(buckets), sent(torch.from_numpy(home), device)


def pack(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[NDArray[np.int32] | Sequence[int]],
    device: str | torch.device,
    *,
    own: Sequence[NDArray[np.bool_] | None] | None = None,
    sharing_saves: float | None = SHARING_SAVES,
) -> Packed:
    """Concatenate prompt and response of each row. A prompt has at least one token; a response may be empty.

    Neighbours with the same prompt share it if that saves `sharing_saves` of all tokens; None: never. `own` says of
    each row which tokens are the model's: the others are read, and no log-prob of theirs is asked for.
    """
    assert len(prompts) == len(responses), f"{len(prompts)} prompts for {len(responses)} responses"
    assert prompts, "an empty batch cannot be packed"
    n_prompt = np.array([len(prompt) for prompt in prompts])
    n_response = np.array([len(response) for response in responses])
    assert n_prompt.all(), "a prompt is empty: its response's first token would have no prefix"
    rest = np.maximum(n_response - 1, 0)
    length = n_prompt + rest  # [S]
    starts = np.concatenate([[0], np.cumsum(length)])
    is_new = np.array([i == 0 or not is_same(prompts[i], prompts[i - 1]) for i in range(len(prompts))])
    if sharing_saves is None or n_prompt[~is_new].sum() < sharing_saves * starts[-1]:
        is_new[:] = True

    own_prompt = np.where(is_new, n_prompt, 0)
    first_own = np.concatenate([[0], np.cumsum(own_prompt + rest)])  # [S + 1] in [0, T)
    holder = np.maximum.accumulate(np.where(is_new, np.arange(len(prompts)), 0))  # [S] the row that has the prompt
    row = np.repeat(np.arange(len(prompts)), length)  # [F], as the next ones
    position = np.arange(starts[-1]) - starts[row]
    in_prompt = position < n_prompt[row]
    source = np.where(in_prompt, first_own[holder[row]], first_own[row] + own_prompt[row] - n_prompt[row]) + position
    home = np.empty(first_own[-1], dtype=np.int64)
    home[source[::-1]] = np.arange(starts[-1])[::-1]  # the first cell is written last
    is_asked = (position >= n_prompt[row] - 1) & (n_response[row] > 0)
    is_target = [
        np.ones(n, bool) if mask is None else mask for mask, n in zip(own or repeat(None), n_response, strict=False)
    ]
    is_asked[is_asked] = np.concatenate(is_target)  # as many as response tokens: each is asked for by the one before it
    target_index = source[is_asked]

    answers = [np.asarray(response, dtype=np.int64) for response in responses]
    parts = [
        part
        for prompt, is_first, answer, n in zip(prompts, is_new, answers, rest, strict=True)
        for part in ([np.asarray(prompt, dtype=np.int64)] if is_first else []) + [answer[:n]]
    ]

    def tensor(array: NDArray[Any]) -> Tensor:
        return sent(torch.from_numpy(array), device)

    shared = None
    if not is_new.all():
        borrowed = tuple(np.where(is_new, 0, n_prompt).tolist())
        shared = Shared(
            cells=Gather.of(source, len(home), device),
            home=tensor(home),
            targets=Gather.of(target_index, len(home), device),
            borrowed=borrowed,
        )
    return Packed(
        input_ids=tensor(np.concatenate(parts)),
        position_ids=tensor(position[home]),
        cu_seqlens=tensor(starts.astype(np.int32)),
        max_length=int(length.max()),
        target_index=tensor(target_index),
        targets=tensor(np.concatenate(answers)[np.concatenate(is_target)]),
        lengths=tuple(int(mask.sum()) for mask in is_target),
        sequence_lengths=tuple(length.tolist()),
        shared=shared,
    )


def is_same(a: Sequence[int], b: Sequence[int]) -> bool:
    return a is b or (len(a) == len(b) and all(x == y for x, y in zip(a, b, strict=True)))


def take(x: Tensor, gather: Gather) -> Tensor:
    """The rows of x that `gather` names. Gradients are summed in one order and in float32, whatever x is in."""
    taken: Tensor = _Take.apply(x, gather)  # type: ignore[no-untyped-call]
    return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return x.index_select(0, gather.source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return sum_of_places(grads[0], ctx.gather), None


def sum_of_places(grad: Tensor, gather: Gather) -> Tensor:
    """[M, ...] -> [T, ...]: the gradients of each row's places, summed."""
    if runs_triton(grad.device.type) and grad.dtype != torch.float64:
        from dapo.models.kernels.gather import sum_taken

        return sum_taken(grad, gather.order, gather.starts)
    return sum_in_torch(grad, gather)


def sum_in_torch(grad: Tensor, gather: Gather) -> Tensor:
    """`sum_of_places` without a kernel."""
    total = grad.new_zeros(len(gather.starts) - 1, *grad.shape[1:])
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    for rows, went in gather.taken:
        part = grad.index_select(0, went.flatten())
        if went.shape[1] > 1:
            part = part.view(*went.shape, *grad.shape[1:]).sum(1, dtype=wide).to(grad.dtype)
        total.index_copy_(0, rows, part)
    return total


def _similar(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Indices of sequences grouped so that in each group the shortest has at least SHORTEST_FRACTION of the longest."""
    order = np.argsort(-lengths, kind="stable")
    groups: list[NDArray[np.int64]] = []
    start = 0
    for i in range(1, len(order) + 1):
        if i == len(order) or lengths[order[i]] < SHORTEST_FRACTION * lengths[order[start]]:
            groups.append(order[start:i])
            start = i
    return groups
