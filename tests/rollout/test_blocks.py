"""Dense blocks: a response keeps its keys and values through promotion, moves and the end of others."""

import numpy as np
import pytest
import torch

from dapo.rollout.engine import NoiseKey, Request, SamplingParams
from dapo.rollout.local.blocks import SHORTEST_CLASS, Blocks, capacity_for
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.noise import uniform, uniform_on_host
from tiny_models import tiny_policy

PAGE = 4


def cache_and_table(n: int, pages: int) -> tuple[PagedCache, np.ndarray]:
    sizes = {"n_layers": 2, "n_pages": 1 + n * pages, "page_tokens": PAGE, "n_heads": 2, "head_dim": 3}
    cache = PagedCache(**sizes, dtype=torch.float32, device=torch.device("cpu"))
    cache.data.normal_(generator=torch.Generator().manual_seed(0))
    return cache, np.random.default_rng(0).permutation(n * pages).reshape(n, pages).astype(np.int32) + 1


def test_length_classes_double():
    S = SHORTEST_CLASS
    length = np.array([1, S, S + 1, 2 * S, 2 * S + 1, 5 * S])
    assert capacity_for(length).tolist() == [S, S, 2 * S, 2 * S, 4 * S, 8 * S]


def test_whoever_comes_goes_and_grows_everybody_keeps_what_was_theirs():
    n, pages = 12, 40
    cache, table = cache_and_table(n, pages)
    whole = cache.dense(table)  # [layer, 2, n, head, tokens, D]
    blocks = Blocks(cache, max_tokens=pages * PAGE)
    rng = np.random.default_rng(1)
    length = rng.integers(2, 70, n)
    alive = np.arange(8)  # running hold responses alive[0], alive[1], …; serial = response + 100
    for tick in range(60):
        if tick % 5 == 4 and len(alive) > 3:
            alive = np.delete(alive, rng.integers(len(alive)))
        if tick == 20:
            alive = np.append(alive, [8, 9, 10, 11])
        if tick % 7 == 3:
            alive = rng.permutation(alive)
        order = blocks.arrange(alive + 100, length[alive], table[alive], 1)
        assert sorted(order.tolist()) == list(range(len(alive)))
        assert blocks.spans[-1].end == len(alive)
        for span in blocks.spans:
            for slot, seat in enumerate(order[span.first : span.end]):
                response = alive[seat]
                T = length[response] - 1
                assert span.block.capacity >= length[response]
                assert torch.equal(span.block.data[:, :, slot, :, :T], whole[:, :, response, :, :T])
                assert torch.equal(blocks.read(response + 100, T), whole[:, :, response, :, :T])
                # what a step would write at the newest token's place
                span.block.data[:, :, slot, :, T] = whole[:, :, response, :, T]
        length[alive] += 1


def test_a_cleared_response_leaves_zeros_behind():
    cache, table = cache_and_table(2, 5)
    cache.data[:, :, table[0]] = float("nan")
    blocks = Blocks(cache, max_tokens=20)
    blocks.arrange(np.array([1, 2]), np.array([9, 9]), table, 1)
    blocks.clear(np.array([1]))
    blocks.arrange(np.array([2]), np.array([10]), table[1:], 1)
    assert all(block.data.isfinite().all() for block in blocks.blocks.values())


def test_an_engine_taken_back_to_another_state_remembers_nobody():
    """Responses are numbered from 1 again: a new one must not read the keys and values of an earlier one."""
    policy = tiny_policy()

    def request(i: int) -> Request:
        return Request(i, (3 + i, 4, 5), NoiseKey(0, "train", str(i), 0, 0), 12, group=i)

    def run(engine: LocalEngine, ids: list[int]) -> list[list[int]]:
        engine.submit([request(i) for i in ids])
        done = {}
        while engine.n_in_flight or engine.n_waiting:
            done |= {request.id: completion.tokens.tolist() for request, completion in engine.advance()}
        return [done[i] for i in ids]

    def fresh() -> LocalEngine:
        return LocalEngine(policy, sampling=SamplingParams(), max_concurrent=4, max_tokens=32)

    expected = run(fresh(), [4, 5, 6])
    engine = fresh()
    empty = engine.snapshot()
    engine.submit([request(i) for i in (1, 2, 3)])
    engine.advance()
    engine.restore(empty)
    assert run(engine, [4, 5, 6]) == expected


def test_what_is_written_back_is_what_the_pages_then_hold():
    cache, table = cache_and_table(1, 5)
    expected = torch.randn_like(cache.dense(table)[:, :, 0])  # [layer, 2, head, tokens, D]
    cache.store_dense(table[0], 0, expected[:, :, :, :18])
    assert torch.equal(cache.dense(table)[:, :, 0, :, :18], expected[:, :, :, :18])


def test_the_hosts_noise_is_the_devices():
    words = np.array([NoiseKey(3, "train", "p", 0, i).words() for i in range(50)])
    position = np.arange(50) ** 3
    expected = uniform(torch.from_numpy(words), torch.from_numpy(position)).numpy()
    assert (uniform_on_host(words.T.astype(np.uint64), position.astype(np.uint64)) == expected).all()


@pytest.mark.parametrize("n", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 31, 32, 33, 65])
def test_border_responses_keep_their_keys_where_a_block_and_its_length_class_end(n: int, length: int):
    """Slots grow by sixteen, classes end at 32 and 64 tokens, pages at 4: with what is written there, they stay."""
    cache, table = cache_and_table(n, 18)
    whole = cache.dense(table)
    blocks = Blocks(cache, max_tokens=72)
    serial = np.arange(n) + 100
    for T in range(length, length + 3):
        order = blocks.arrange(serial, np.full(n, T), table, 1)
        assert sorted(order.tolist()) == list(range(n))
        for span in blocks.spans:
            for slot, seat in enumerate(order[span.first : span.end]):
                assert torch.equal(span.block.data[:, :, slot, :, : T - 1], whole[:, :, seat, :, : T - 1])
                span.block.data[:, :, slot, :, T - 1] = whole[:, :, seat, :, T - 1]
