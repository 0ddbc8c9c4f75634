"""Sampling noise as a function of what is sampled, not of when: the same key and position give the same number.

The generator is Philox-4x32-10 (Salmon et al., SC 2011), written in 64-bit integer arithmetic that is exact on every
device. The key's hash fills Philox's key and half of its counter; the position in the response is the rest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Stream = Literal["train", "eval"]

MASK = 0xFFFFFFFF
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
WEYL_A, WEYL_B = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Which response of which problem: everything its noise depends on, but for the position.

    `visit` counts earlier submissions of this problem in this run, so that a second visit explores anew.
    """

    seed: int
    stream: Stream
    problem: str
    visit: int
    response_index: int

    def words(self) -> tuple[int, int, int, int]:
        """128 bits of the key's hash as four 32-bit words."""
        text = json.dumps([self.seed, self.stream, self.problem, self.visit, self.response_index])
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        a, b, c, d = (int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))
        return a, b, c, d


def uniform(words: Tensor, position: Tensor) -> Tensor:
    """Numbers in (0, 1), float64, for words [..., 4] (of `NoiseKey.words`) at position [...] in the response.

    52 random bits and a half: never 0, never 1.
    """
    high, low = philox(words[..., 0], words[..., 1], position & MASK, words[..., 2], words[..., 3])
    bits = ((high >> 6) << 26) | (low >> 6)
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def philox(key_a: Tensor, key_b: Tensor, position: Tensor, word_c: Tensor, word_d: Tensor) -> tuple[Tensor, Tensor]:
    """The first two words of Philox-4x32-10 with key (a, b) and counter (position, 0, c, d); all in [0, 2³²)."""
    x0, x1, x2, x3 = position, torch.zeros_like(position), word_c, word_d
    for i in range(ROUNDS):
        k0 = (key_a + i * WEYL_A) & MASK
        k1 = (key_b + i * WEYL_B) & MASK
        # A product of two 32-bit words wraps around in int64; its bits are those of the unsigned product.
        a, b = x0 * ROUND_A, x2 * ROUND_B
        x0, x1, x2, x3 = ((b >> 32) & MASK) ^ x1 ^ k0, b & MASK, ((a >> 32) & MASK) ^ x3 ^ k1, a & MASK
    return x0, x1
