"""Sequences laid end to end without padding, and the attention that never crosses from one into the next."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dapo.errors import EngineError

PACKED_ATTENTION = "dapo_packed"

# A bucket of sequences is padded to its longest; a sequence shorter than this share of it opens a new bucket.
SHORTEST_SHARE = 0.75


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length as a padded block of S rows and L columns."""

    rows: int
    length: int
    source: Tensor | None  # [S·L] place of each cell in the packed batch, cells past a row's end repeat its last token;
    # None: the block is the packed batch, cell by cell


@dataclass(frozen=True)
class Packed:
    """A batch of prompts with their responses, concatenated. T tokens in S sequences, N response tokens.

    Row-major order throughout: `targets` are all tokens of the first response, then of the second, and so on, so that
    a result [N] is cut into responses by `split`.
    """

    input_ids: Tensor  # [T]
    position_ids: Tensor  # [T], from 0 in each sequence
    cu_seqlens: Tensor  # [S + 1] int32, where each sequence starts
    max_length: int  # of the longest sequence
    target_index: Tensor  # [N] positions in [0, T) whose next token is a response token
    targets: Tensor  # [N] those next tokens
    lengths: tuple[int, ...]  # [S] tokens of each response
    sequence_lengths: tuple[int, ...]  # [S] tokens of each prompt with its response

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def n_targets(self) -> int:
        return len(self.targets)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """[N] per response token -> one tensor per response."""
        return tuple(torch.split(values, list(self.lengths)))

    @cached_property
    def buckets(self) -> tuple[tuple[Bucket, ...], Tensor | None]:
        """Padded blocks for kernels that know no packing, and [T] where each packed token lies in their sequence.

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
            buckets.append(Bucket(len(members), longest, torch.from_numpy(source.ravel()).to(device)))
            offset += source.size
        return tuple(buckets), torch.from_numpy(home).to(device)


def pack(
    prompts: Sequence[Sequence[int]], responses: Sequence[NDArray[np.int32] | Sequence[int]], device: str | torch.device
) -> Packed:
    """Concatenate prompt and response of each row. A prompt has at least one token; a response may be empty."""
    assert len(prompts) == len(responses), f"{len(prompts)} prompts for {len(responses)} responses"
    assert prompts, "an empty batch cannot be packed"
    n_prompt = np.array([len(prompt) for prompt in prompts])
    n_response = np.array([len(response) for response in responses])
    assert n_prompt.all(), "a prompt is empty: its response's first token would have no prefix"
    length = n_prompt + n_response
    starts = np.concatenate([[0], np.cumsum(length)])

    parts = [np.asarray(part, dtype=np.int64) for row in zip(prompts, responses, strict=True) for part in row]
    input_ids = np.concatenate(parts)
    position_ids = np.arange(starts[-1]) - np.repeat(starts[:-1], length)
    is_response = position_ids >= np.repeat(n_prompt, length)
    target_index = np.flatnonzero(is_response) - 1

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return Packed(
        input_ids=tensor(input_ids),
        position_ids=tensor(position_ids),
        cu_seqlens=tensor(starts.astype(np.int32)),
        max_length=int(length.max()),
        target_index=tensor(target_index),
        targets=tensor(input_ids[is_response]),
        lengths=tuple(n_response.tolist()),
        sequence_lengths=tuple(length.tolist()),
    )


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
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


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
) -> Tensor:
    """Causal attention inside each sequence; q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
    window = window if window is not None and window < packed.max_length else None
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0:
        return _varlen(q, k, v, packed, scaling, window)
    return _bucketed(q, k, v, packed, scaling, window, dropout)


def _bucketed(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, scaling: float | None, window: int | None, dropout: float
) -> Tensor:
    """SDPA over padded blocks. Padding stands at the end of a row, where a causal row never looks."""
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
    return blocks[0] if home is None else torch.cat(blocks).index_select(0, home)  # [T, Hq, D]


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scaling: float | None, window: int | None) -> Tensor:
    """Flash attention over the packed batch itself; needs CUDA and half precision."""
    varlen_attn, grouped = _varlen_kernel()
    output: Tensor = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        packed.cu_seqlens,
        packed.cu_seqlens,
        packed.max_length,
        packed.max_length,
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


def _similar(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Indices of sequences grouped so that in each group the shortest has at least SHORTEST_SHARE of the longest."""
    order = np.argsort(-lengths, kind="stable")
    groups: list[NDArray[np.int64]] = []
    start = 0
    for i in range(1, len(order) + 1):
        if i == len(order) or lengths[order[i]] < SHORTEST_SHARE * lengths[order[start]]:
            groups.append(order[start:i])
            start = i
    return groups


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
