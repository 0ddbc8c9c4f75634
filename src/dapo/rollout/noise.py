"""Sampling noise as a function of what is sampled, not of when: the same key and position give the same number.

So a response does not depend on the batch it runs in, on the rank, or on a restart: no generator state is kept.

The generator is Philox-4x32-10 (Salmon et al., SC 2011), written in 64-bit integer arithmetic that is exact on every
device. The key's hash fills Philox's key and half of its counter; the position in the response is the rest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from struct import unpack
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Stream = Literal["train", "eval"]

MASK = 0xFFFFFFFF
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
WEYL_A, WEYL_B = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Which response of which problem: everything its noise depends on, but for the position.

    `visit` counts earlier submissions of this problem in this run, so that a second visit explores differently. A turn
    of an episode begins after `start` tokens of it: its positions count from there.
    """

    seed: int
    stream: Stream
    problem: str
    visit: int
    response_index: int
    start: int = 0

    def words(self) -> tuple[int, int, int, int]:
        """128 bits of the key's hash as four 32-bit words."""
        turn = [self.start] if self.start else []
        text = json.dumps([self.seed, self.stream, self.problem, self.visit, self.response_index, *turn])
        a, b, c, d = unpack("<4I", hashlib.blake2b(text.encode(), digest_size=16).digest())
        return a, b, c, d


def uniform(words: Tensor, position: Tensor) -> Tensor:
    """Numbers in (0, 1), float64, for words [..., 4] (of `NoiseKey.words`) at position [...] in the response.

    52 random bits and a half: never 0, never 1.
    """
    high, low = philox(words[..., 0], words[..., 1], position & MASK, words[..., 2], words[..., 3])
    bits = ((high >> 6) << 26) | (low >> 6)
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def uniform_on_host(words: NDArray[np.uint64], position: NDArray[np.uint64]) -> NDArray[np.float64]:
    """`uniform` for words [4, n] at position [n], with a third of the calls, which take most of its time on a CPU."""
    mask, half = np.uint64(MASK), np.uint64(32)
    rounds = np.arange(ROUNDS, dtype=np.uint64)[:, None, None]
    keys = (words[:2] + rounds * np.array([[WEYL_A], [WEYL_B]], np.uint64)) & mask  # [round, 2, n]
    factors = np.array([[ROUND_B], [ROUND_A]], np.uint64)
    turning, still = np.stack([words[2], position & mask]), np.stack([np.zeros_like(position), words[3]])
    for key in keys:
        # Rows are those that become x0 and x2 in `philox`; of one round's results the next one multiplies x2 and x0.
        product = turning * factors
        turning, still = (((product >> half) ^ still) ^ key)[::-1], product & mask
    high, low = turning[1], still[0]
    bits = ((high >> np.uint64(6)) << np.uint64(26)) | (low >> np.uint64(6))
    drawn: NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return drawn


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


def uniform_of(name: str) -> float:
    """A number in (0, 1) from a name; the same everywhere."""
    word = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())
    return (word + 0.5) / 2**64
