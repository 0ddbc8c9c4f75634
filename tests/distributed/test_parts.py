"""The parts of a distributed run that need no second process: messages, splitting, slots, and what is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_world import Place, on_ranks
from toy import recipe

from dapo.config.schema import ClusterConfig
from dapo.distributed.judge import SharedJudge
from dapo.distributed.message import from_bytes, to_bytes
from dapo.distributed.staging import StagedAllGather, StagedReduceScatter, card_of, sum_on_host
from dapo.distributed.world import ENVELOPE_BYTES, Ranks, World, buckets, check_launch, end_with, one_rank
from dapo.errors import ConfigError, EngineError, OutOfMemoryError
from dapo.learner.microbatches import Micro, own_microbatches, own_rows, split_over_ranks
from dapo.rollout.engine import NoiseKey, Request, SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.make import refuse_layout
from dapo.rollout.shared import SharedEngine
from dapo.types import Judgement, Task, Verdict
from tiny_models import tiny_policy


class Rows:
    """As much of a batch as splitting looks at."""

    def __init__(self, tokens: list[int]) -> None:
        self.sizes = tokens

    def tokens(self, row: int) -> int:
        return self.sizes[row]


def test_a_message_comes_back_as_it_was():
    meta = {"texts": ["ä\0b", ""], "n": [1, 2], "x": 0.1}
    arrays = {"tokens": np.arange(5, dtype=np.int32), "none": np.zeros(0, np.float64), "logp": np.array([-0.1, np.nan])}
    got_meta, got = from_bytes(to_bytes(meta, arrays))
    assert got_meta == meta
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array)


@given(st.lists(st.integers(1, 900), max_size=40), st.integers(1, 9))
def test_every_row_goes_to_one_rank_and_no_rank_has_a_row_too_many(tokens: list[int], n_ranks: int):
    parts = split_over_ranks(Rows(tokens), range(len(tokens)), n_ranks)
    assert sorted(row for part in parts for row in part) == list(range(len(tokens)))
    load = [sum(tokens[row] for row in part) for part in parts]
    # The last row that the fullest rank got went there because it had the least: without it nobody has less.
    assert max(load) - min(load) <= max(tokens, default=0)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=20), st.integers(1, 6), st.integers(1, 200))
def test_ranks_in_step_make_as_many_passes_and_count_every_row_once(tokens: list[int], n_ranks: int, budget: int):
    batch, rows = Rows(tokens), range(len(tokens))
    passes = []
    for rank in range(n_ranks):
        place = Place(rank, n_ranks, [], threading.Barrier(1))
        passes.append(own_microbatches(batch, rows, budget, place, lockstep=True))
    assert len({len(own) for own in passes}) == 1
    counted = [row for own in passes for micro in own if not micro.is_dummy for row in micro.rows]
    assert sorted(counted) == list(rows)
    assert all(micro.rows for own in passes for micro in own)  # a pass without rows would skip its collectives


def test_the_longest_rows_are_placed_first_each_to_the_rank_with_the_fewest_tokens():
    """9 and 9 go to one rank each, 5 to the first, 4 and 2 to the second, which then has 15 tokens to 14."""
    batch, rows = Rows([5, 9, 4, 9, 2, 7]), [0, 1, 2, 3, 4]  # the last row is not asked for
    assert split_over_ranks(batch, rows, 2) == [[0, 1], [2, 3, 4]]
    assert split_over_ranks(batch, rows, 1) == [rows]
    second = Place(1, 2, [], threading.Barrier(1))
    assert own_rows(batch, rows, second) == [2, 3, 4]


def test_a_rank_with_fewer_passes_repeats_the_shortest_row_without_a_say():
    batch, rows = Rows([12, 2, 3, 2, 4]), range(5)  # the first rank has row 0 alone, and of rows 1 and 3 row 1 is first
    own = own_microbatches(batch, rows, 5, Place(0, 2, [], threading.Barrier(1)), lockstep=True)
    assert split_over_ranks(batch, rows, 2) == [[0], [1, 2, 3, 4]]
    assert own == [Micro([0]), Micro([1], is_dummy=True), Micro([1], is_dummy=True)]
    alone = own_microbatches(batch, rows, 5, Place(0, 2, [], threading.Barrier(1)), lockstep=False)
    assert alone == [Micro([0])]
    assert own_microbatches(batch, [], 5, Place(0, 2, [], threading.Barrier(1)), lockstep=True) == []


def test_buckets_keep_order_and_do_not_mix_types():
    tensors = [torch.zeros(3), torch.zeros(2), torch.zeros(2, dtype=torch.float64), torch.zeros(1)]
    assert [[t.numel() for t in bucket] for bucket in buckets(tensors)] == [[3, 2], [2], [1]]


def requests(n: int) -> list[Request]:
    return [
        Request(i, (5, 6 + i // 3 % 20), NoiseKey(0, "train", f"p{i // 3}", 0, i % 3), 2 + 5 * (i % 4), group=i // 3)
        for i in range(n)
    ]


def written_by(engine: Any, n: int = 21) -> list[tuple[int, int, list[int]]]:
    """(tick, id, tokens) of what ended, in order."""
    engine.submit(requests(n))
    ended = []
    while engine.n_in_flight or engine.n_waiting:
        ended += [(engine.tick, request.id, completion.tokens.tolist()) for request, completion in engine.advance()]
    return ended


def make(world: World | None, policy: Any) -> Any:
    slots = 8
    size = 1 if world is None else world.size
    own = LocalEngine(policy, sampling=SamplingParams(), max_concurrent=-(-slots // size), max_tokens=32)
    return own if world is None else SharedEngine(own, world, max_concurrent=slots)


@pytest.mark.parametrize("size", [2, 3])
def test_engines_of_several_ranks_write_what_one_engine_writes_tick_by_tick(size: int):
    policies = [tiny_policy("llama") for _ in range(size + 1)]
    expected = written_by(make(None, policies[-1]))
    for ended in on_ranks(size, lambda world: written_by(make(world, policies[world.rank]))):
        assert ended == expected


def test_no_seat_stays_free_while_a_request_waits_whoever_ends_first():
    policies = [tiny_policy("llama") for _ in range(3)]

    def watch(world: World) -> list[int]:
        engine = make(world, policies[world.rank])
        engine.submit(requests(21))
        taken = []
        while engine.n_in_flight or engine.n_waiting:
            was_waiting = engine.n_waiting
            ended = engine.advance()
            if was_waiting and engine.n_waiting:  # what began this tick filled every slot that was free
                taken.append(engine.n_in_flight + len(ended))
        return taken

    for taken in on_ranks(3, watch):
        assert taken
        assert set(taken) == {8}


def test_a_snapshot_of_many_ranks_goes_on_in_one_engine():
    policies = [tiny_policy("llama") for _ in range(3)]
    expected = written_by(make(None, policies[0]))

    def half(world: World) -> Any:
        engine = make(world, policies[world.rank])
        engine.submit(requests(21))
        ended = [(engine.tick, r.id, c.tokens.tolist()) for _ in range(6) for r, c in engine.advance()]
        return ended, engine.snapshot()

    for ended, state in on_ranks(2, half):
        one = make(None, policies[2])
        one.restore(state)
        while one.n_in_flight or one.n_waiting:
            ended += [(one.tick, request.id, completion.tokens.tolist()) for request, completion in one.advance()]
        assert ended == expected


class Own:
    """A judge that says which responses it was asked about."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def submit(self, task: Task) -> int:
        assert task.verifier == f"of {task.response}"
        self.asked.append(task.response)
        return len(self.asked) - 1

    def wait(self, tickets: Any) -> dict[int, Judgement]:
        return {ticket: self.verdict(self.asked[ticket]) for ticket in tickets}

    @staticmethod
    def verdict(response: str) -> Judgement:
        return Judgement(Verdict.WRONG, 0.5, extracted=response, graded=True, parts={response: 2.0})


def test_judging_is_shared_and_everybody_learns_every_verdict():
    def judge(world: World) -> Any:
        own = Own()
        shared = SharedJudge(own, world)
        tickets = [shared.submit(Task(f"r{i}", "", verifier=f"of r{i}")) for i in range(7)]
        judged = shared.wait(tickets)
        return own.asked, [judged[ticket] for ticket in tickets]

    results = on_ranks(3, judge)
    assert sorted(response for asked, _ in results for response in asked) == [f"r{i}" for i in range(7)]
    assert all(len(asked) in (2, 3) for asked, _ in results)
    assert all(verdicts == [Own.verdict(f"r{i}") for i in range(7)] for _, verdicts in results)


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("cluster", "environment", "why"),
    [
        ({"backend": "torchrun"}, {}, "not started as a rank"),
        ({"backend": "none"}, TORCHRUN, "each would do the whole run"),
        ({"backend": "torchrun", "gpus": 4}, TORCHRUN, "torchrun started 2 processes"),
        ({"backend": "ray"}, {}, "not started as a rank"),
    ],
)
def test_config_and_launcher_must_agree(cluster: dict[str, Any], environment: dict[str, str], why: str):
    with pytest.raises(ConfigError, match=why):
        check_launch(ClusterConfig(**cluster), environment)


def test_engines_that_cannot_share_the_work_are_refused(tmp_path: Path):
    plain = recipe(tmp_path, "rollout.engine=plain").config
    two = Place(0, 2, [], threading.Barrier(1))
    with pytest.raises(ConfigError, match=r"rollout.engine = plain: is not built for 2 ranks"):
        refuse_layout(plain, two)
    refuse_layout(plain, World())
    together = recipe(tmp_path, "rollout.engine=vllm", "rollout.tensor_parallel=2").config
    refuse_layout(together, two)
    with pytest.raises(ConfigError, match=r"rollout.tensor_parallel = 2: 1 ranks cannot be divided"):
        refuse_layout(together, World())


def test_two_ranks_that_hold_one_model_together_write_what_one_engine_writes():
    """Each of the two has all of the model here; what matters is who is given what and who speaks."""
    policies = [tiny_policy("llama") for _ in range(5)]
    expected = written_by(make(None, policies[-1]))

    def write(world: World) -> Any:
        own = LocalEngine(policies[world.rank], sampling=SamplingParams(), max_concurrent=4, max_tokens=32)
        return written_by(SharedEngine(own, world, max_concurrent=8, ranks_per_engine=2))

    for ended in on_ranks(4, write):
        assert ended == expected


def test_ranks_that_hold_one_model_and_drift_apart_stop_the_run():
    policies = [tiny_policy("llama", seed=rank) for rank in range(2)]
    said = []

    def write(world: World) -> None:
        own = LocalEngine(policies[world.rank], sampling=SamplingParams(), max_concurrent=8, max_tokens=32)
        try:
            written_by(SharedEngine(own, world, max_concurrent=8, ranks_per_engine=2))
        except EngineError as error:
            said.append(error.message)
            world.gate.abort()  # type: ignore[attr-defined]
        except threading.BrokenBarrierError:
            pass

    on_ranks(2, write)
    assert said == [
        "rollout.tensor_parallel = 2: rank 1 and rank 0 hold one model together and generated different responses."
    ]


def test_what_agrees_is_let_through():
    check_launch(ClusterConfig(backend="torchrun"), TORCHRUN)
    check_launch(ClusterConfig(backend="torchrun", gpus=2), TORCHRUN)
    check_launch(ClusterConfig(), {})
    check_launch(ClusterConfig(), {**TORCHRUN, "WORLD_SIZE": "1"})


class FirstToFail:
    """As much of the ranks' common store as a failing rank asks for."""

    def compare_set(self, _key: str, _expected: str, value: str) -> bytes:
        return value.encode()


def test_a_rank_that_runs_out_of_memory_is_named_and_ends_as_a_failure(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(OutOfMemoryError, match="CUDA out of memory") as raised:
        end_with(FirstToFail(), Ranks(1, 2), "", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."))
    assert capsys.readouterr().err == "rank 1 of 2:\n"
    assert raised.value.exit_code == 1  # below the 2 of the ranks that are silent: Ray names the lowest
    with pytest.raises(RuntimeError, match="a bug"):
        end_with(FirstToFail(), Ranks(1, 2), "", RuntimeError("a bug"))


# ------------------------------------------------------------------ borders


@pytest.mark.parametrize("sizes", [[], [1], [4], [5], [6], [11], [2, 3], [2, 2, 2], [5, 1], [3, 3, 5, 6, 1, 0, 4]])
def test_border_every_tensor_is_in_one_bucket_within_its_size(sizes: list[int], monkeypatch: pytest.MonkeyPatch):
    """Buckets of five numbers; a larger tensor stands alone."""
    monkeypatch.setattr("dapo.distributed.world.BUCKET_BYTES", 5 * 4)
    tensors = [torch.full((n,), float(i)) for i, n in enumerate(sizes)]
    split = list(buckets(tensors))
    assert [id(tensor) for bucket in split for tensor in bucket] == [id(tensor) for tensor in tensors]
    assert all(len(bucket) == 1 or sum(t.numel() for t in bucket) <= 5 for bucket in split)
    assert all(sum(t.numel() for t in a) + b[0].numel() > 5 for a, b in pairwise(split))


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 17])
def test_border_two_ranks_write_every_request_once_whatever_their_seats(n: int):
    """Eight slots in all, four on each rank."""
    policies = [tiny_policy("llama") for _ in range(2)]
    for ended in on_ranks(2, lambda world: written_by(make(world, policies[world.rank]), n)):
        assert sorted(number for _, number, _ in ended) == list(range(n))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 7])
def test_border_every_response_is_judged_by_one_of_three_ranks(n: int):
    def judge(world: World) -> Any:
        own = Own()
        shared = SharedJudge(own, world)
        tickets = [shared.submit(Task(f"r{i}", "", verifier=f"of r{i}")) for i in range(n)]
        judged = shared.wait(tickets)
        return own.asked, [judged[ticket].extracted for ticket in tickets]

    results = on_ranks(3, judge)
    assert sorted(response for asked, _ in results for response in asked) == [f"r{i}" for i in range(n)]
    assert all(extracted == [f"r{i}" for i in range(n)] for _, extracted in results)


def test_neighbours_share_a_card_and_a_rank_without_one_is_told():
    assert [card_of(rank, 1, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert [card_of(rank, 2, 2) for rank in range(4)] == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match=r"cluster.ranks_per_gpu = 1: rank 1 of this machine has no GPU, .*has 1\."):
        card_of(1, 1, 1)


def test_a_gathered_or_reduced_tensor_is_where_it_is_wanted():
    """One rank: its own part is the whole, and the sum."""
    with one_rank("cpu"):
        gathered, reduced = torch.zeros(3), torch.zeros(3)
        part = torch.arange(6.0)[::2]  # not contiguous
        StagedAllGather()(gathered, part, group=None)
        StagedReduceScatter()(reduced, part, group=None, op=torch.distributed.ReduceOp.SUM)
        summed = part.clone()
        sum_on_host(summed, None)
    assert [tensor.tolist() for tensor in (gathered, reduced, summed)] == [[0, 2, 4]] * 3


def test_gradients_are_reduced_as_was_asked(monkeypatch: pytest.MonkeyPatch):
    asked: list[object] = []
    monkeypatch.setattr(
        torch.distributed, "reduce_scatter_single", lambda *_, op, group: asked.append((op, group)), raising=False
    )
    StagedReduceScatter()(torch.zeros(1), torch.zeros(2), group="both", op=torch.distributed.ReduceOp.MAX)
    assert asked == [(torch.distributed.ReduceOp.MAX, "both")]


@pytest.mark.parametrize(
    ("lengths", "n_collectives"),
    [((0, 0, 0), 1), ((1, 0, ENVELOPE_BYTES), 1), ((2, ENVELOPE_BYTES + 1, 0), 2), ((5000, ENVELOPE_BYTES, 7000), 2)],
)
def test_messages_of_any_length_arrive_whole_short_ones_in_one_collective(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], n_collectives: int
):
    messages = [bytes((7 * rank + place) % 256 for place in range(n)) for rank, n in enumerate(lengths)]
    table: dict[int, torch.Tensor] = {}
    gathers: list[int] = []
    all_are_here = threading.Barrier(len(messages))

    def gathered(own: torch.Tensor, size: int, rank: int) -> list[torch.Tensor]:
        table[rank] = own.clone()
        gathers.append(rank)
        all_are_here.wait(30)
        parts = [table[other].clone() for other in range(size)]
        all_are_here.wait(30)
        return parts

    monkeypatch.setattr("dapo.distributed.world.gathered", gathered)
    ranks = [Ranks(rank, len(messages), group=rank) for rank in range(len(messages))]
    with ThreadPoolExecutor(len(messages)) as threads:
        for told in threads.map(lambda rank: rank.exchange(messages[rank.rank]), ranks):
            assert told == messages
    assert len(gathers) == n_collectives * len(messages)
