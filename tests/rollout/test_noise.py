"""The noise is a pure function of key and position, uniform, and without memory between neighbours."""

import dataclasses

import numpy as np
import pytest
import torch

from dapo.rollout.noise import MASK, NoiseKey, philox, uniform

KEY = NoiseKey(seed=7, stream="train", problem="p1", visit=0, response_index=3)


def draw(key: NoiseKey, positions: torch.Tensor) -> torch.Tensor:
    return uniform(torch.tensor([key.words()]).expand(len(positions), 4), positions)


def philox_in_python_integers(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int]:
    """The generator as its paper writes it, with Python's unbounded integers."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1


def test_philox_against_python_integers():
    rng = np.random.default_rng(0)
    for k0, k1, position, c, d in rng.integers(0, 2**32, (50, 5)).tolist():
        words = [torch.tensor([x]) for x in (k0, k1, position, c, d)]
        assert tuple(x.item() for x in philox(*words)) == philox_in_python_integers((k0, k1), (position, 0, c, d))


def test_philox_against_the_published_vectors():
    """Random123's known answers for philox4x32-10 whose second counter word is 0."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert [x.item() for x in philox(zero, zero, zero, zero, zero)] == [0x6627E8D5, 0xE169C58D]


@pytest.mark.parametrize(
    "change", [{"seed": 8}, {"stream": "eval"}, {"problem": "p2"}, {"visit": 1}, {"response_index": 4}]
)
def test_every_part_of_the_key_matters(change: dict):
    positions = torch.arange(64)
    other = dataclasses.replace(KEY, **change)
    assert torch.equal(draw(KEY, positions), draw(KEY, positions))
    assert not (draw(KEY, positions) == draw(other, positions)).any()


def test_keys_cannot_run_into_each_other():
    """Problem "1" on visit 12 is not problem "11" on visit 2."""
    a = dataclasses.replace(KEY, problem="1", visit=12)
    b = dataclasses.replace(KEY, problem="11", visit=2)
    assert a.words() != b.words()


def test_position_alone_decides_not_the_batch():
    positions = torch.randperm(100)
    assert torch.equal(draw(KEY, positions), draw(KEY, torch.arange(100))[positions])


def test_uniform_in_position_in_visits_and_in_responses():
    """Chi-square over 64 cells, 3 ways of walking through the noise; 3.3 standard deviations of its distribution."""
    n, cells = 64 * 400, 64
    keys = [dataclasses.replace(KEY, problem=str(i // 16), response_index=i % 16) for i in range(n // 16)]
    words = torch.tensor([key.words() for key in keys])
    walks = {
        "positions of one response": draw(KEY, torch.arange(n)),
        "responses at position 0": uniform(words, torch.zeros(len(words), dtype=torch.int64)),
        "16 positions of many": uniform(words[:, None].expand(-1, 16, -1), torch.arange(16).expand(len(words), 16)),
    }
    for name, noise in walks.items():
        u = noise.flatten().numpy()
        assert 0 < u.min() < u.max() < 1
        count = np.histogram(u, cells, (0, 1))[0]
        chi2 = ((count - len(u) / cells) ** 2 / (len(u) / cells)).sum()
        assert abs(chi2 - (cells - 1)) < 3.3 * np.sqrt(2 * (cells - 1)), f"{name}: {chi2}"


def test_neighbours_are_uncorrelated():
    n = 20_000
    u = draw(KEY, torch.arange(n)).numpy()
    sibling = draw(dataclasses.replace(KEY, response_index=4), torch.arange(n)).numpy()
    for a, b in ((u[:-1], u[1:]), (u[:-2], u[2:]), (u, sibling)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(n)


def test_the_lowest_bits_move_too():
    bits = (draw(KEY, torch.arange(4096)) * 2.0**52).to(torch.int64) & 1
    assert abs(bits.double().mean().item() - 0.5) < 4 * 0.5 / np.sqrt(4096)
