"""Dropout before an adapter's matrices, as a function of what is trained on, not of when.

A mask depends on the update, the layer, the token and its position. So a gradient does not depend on micro-batches,
ranks or a restart, a layer that recomputes its activations drops the same values again, and no generator is saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MIX_A, MIX_B = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32  # of MurmurHash3's finalizer, as signed numbers


@dataclass(slots=True)
class Draw:
    """What the masks of all layers depend on: nothing is dropped while there is no key."""

    key: tuple[int, int] | None = None  # the run's seed and the update
    tokens: tuple[Tensor, Tensor] | None = None  # [T] ids and positions of the pass


class AdapterDropout(nn.Module):
    """x with a share p of its values set to 0 and the others divided by 1 − p, while a key is drawn."""

    def __init__(self, p: float, layer: str, draw: Draw) -> None:
        super().__init__()
        self.p, self.layer, self.draw = p, layer, draw

    def forward(self, x: Tensor) -> Tensor:
        if self.draw.key is None or self.draw.tokens is None:
            return x
        kept = is_kept(self.p, (*self.draw.key, self.layer), *self.draw.tokens, x.shape[-1])
        return x * kept / (1 - self.p)


def is_kept(p: float, key: tuple[int, int, str], ids: Tensor, positions: Tensor, n_features: int) -> Tensor:
    """[T, H] False with probability p."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=12).digest()
    a, b, c = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4, 8))
    token = mixed(mixed(ids.int() ^ a) ^ mixed(positions.int() ^ b))
    feature = mixed(torch.arange(n_features, dtype=torch.int32, device=ids.device) ^ c)
    return (mixed(token[:, None] ^ feature) & 0x7FFFFFFF) >= int(p * 2**31)


def mixed(h: Tensor) -> Tensor:
    """int32 numbers scattered over all of them, one to one: MurmurHash3's finalizer. Products wrap around."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * MIX_A
    h = (h ^ ((h >> 13) & 0x7FFFF)) * MIX_B
    return h ^ ((h >> 16) & 0xFFFF)


@contextmanager
def dropping(draw: Draw | None, *, seed: int, update: int) -> Iterator[None]:
    """Within it adapters drop values: forward and backward passes of one update."""
    if draw is None:
        yield
        return
    draw.key = (seed, update)
    try:
        yield
    finally:
        draw.key = draw.tokens = None
