"""A step of few rows in one launch, on a GPU: as near to float32 as the many kernels are, and the same every time."""

import copy

import pytest
import torch
from test_local_engine_cuda import drain, engine, gap, policy, requests

from dapo.models.policy import Policy
from dapo.rollout.engine import SamplingParams
from dapo.rollout.local.decoder import PagedDecoder
from dapo.rollout.local.persistent import driver, step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

LENGTHS = [1, 700, 16, 17, 1500, 64, 65, 130, 129, 300, 2, 900, 450, 33, 1999, 128]


def decoder(model: Policy, **changes: object) -> PagedDecoder:
    return PagedDecoder(model, n_rows=16, max_tokens=8192, n_pages=600, page_tokens=64, tokens_per_tick=1, **changes)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("n", [1, 7, 8, 13, 16])
def test_logits_are_as_near_to_float32_as_those_of_many_kernels(family: str, n: int):
    check(policy(family), LENGTHS[:n])


@pytest.mark.parametrize("length", [4098, 4200, 4700, 7190, 8191])
def test_parts_of_long_rows_that_have_no_keys_are_not_waited_for(length: int):
    check(policy(), [length, length - 1])


@torch.inference_mode()
def check(model: Policy, lengths: list[int]) -> None:
    n = len(lengths)
    ours, theirs, true = decoder(model), decoder(model), decoder(copy.deepcopy(model).float(), ops="plain")
    theirs.few = None
    assert ours.few is not None
    ours.cache.data.normal_()
    theirs.cache.data.copy_(ours.cache.data)
    true.cache.data.copy_(ours.cache.data)
    width = -(-max(lengths) // 64)
    pages = (torch.randperm(599)[: n * width].view(n, width) + 1).int().cuda()
    for one in (ours, theirs, true):
        one.rows.table[:n, :width] = pages
        one.rows.length[:n] = torch.tensor(lengths, device="cuda").int()
        one.rows.token[:n] = torch.arange(n, device="cuda").int() + 3
        one.rows.stop[3:4] = 1
    alive = [i for i in range(n) if i != 3]
    want, near = true._logits(n, max(lengths))[alive], theirs._logits(n, max(lengths))[alive]
    got = ours._logits(n, max(lengths))[alive].clone()
    assert (got - want).norm() <= 1.2 * (near - want).norm()
    for _ in range(20):
        assert torch.equal(ours._logits(n, max(lengths))[alive], got), "another launch, other bits"
    written = [x.cache.data[:, :, 1:].float() for x in (ours, theirs, true)]
    assert (written[0] - written[2]).norm() <= 1.2 * (written[1] - written[2]).norm()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_log_probs_of_few_are_those_of_the_training_forward(family: str):
    model = policy(family)
    local = engine(model, max_concurrent=16)
    local.submit(requests(11, new=90))
    finished = drain(local)
    assert local._decoder.few is not None
    assert {size for size, *_ in local._decoder.graphs} <= {1, 2, 4, 8, 16}
    differences = gap(model, finished)
    assert differences.mean() < 0.02
    assert differences.max() < 0.5
    local.submit(requests(11, new=90))
    again = drain(local)
    assert [c.tokens.tolist() for _, c in again] == [c.tokens.tolist() for _, c in finished]


def test_a_long_tick_ends_every_response_where_a_short_one_does():
    model = policy()
    short, long = engine(model, max_concurrent=16), engine(model, max_concurrent=16)
    short._tick_steps = lambda: short.tokens_per_tick
    done, n_advances = [], []
    for one in (short, long):
        one.submit(requests(9, new=177))
        finished, n = [], 0
        while one.n_in_flight or one.n_waiting:
            finished += one.advance()
            n += 1
        done.append({r.id: c for r, c in finished})
        n_advances.append(n)
    assert n_advances[1] < n_advances[0]
    assert done[0].keys() == done[1].keys()
    for name, one in done[0].items():
        assert one.tokens.tolist() == done[1][name].tokens.tolist()
        assert (one.logp == done[1][name].logp).all()


def test_without_a_compiler_many_kernels_do_the_same(monkeypatch: pytest.MonkeyPatch):
    def missing(*_: object) -> None:
        raise driver.DriverError("libnvrtc.so.13 cannot be loaded")

    monkeypatch.setattr(step, "compiled", missing)
    with pytest.warns(UserWarning, match="many launches"):
        local = engine(policy(), sampling=SamplingParams(temperature=0.0))
    local.submit(requests(3, new=8))
    assert len(drain(local)) == 3
    assert local._decoder.few is None
