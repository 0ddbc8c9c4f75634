"""On a GPU: prompts through the kernels that generate, products in FP8, and log-probs that are on their way."""

import numpy as np
import pytest
import torch
from test_local_engine_cuda import drain, engine, gap, policy, requests
from torch import Tensor

from dapo.learner.ragged import Ragged
from dapo.rollout.local import float8, prefixes
from dapo.rollout.local.float8 import Float8, float8_product, float8_rows, from_float8, to_float8
from dapo.rollout.local.prefixes import Extension, Prefix, extend, prefill, slots_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_both_ways_of_prefilling_fill_the_same_pages(family: str, monkeypatch: pytest.MonkeyPatch):
    model = policy(family)
    found = []
    for is_read in (False, True):
        monkeypatch.setattr(prefixes, "reads", lambda *_, is_read=is_read: is_read)
        decoder = engine(model, kv_tokens=64 * 64)._decoder
        decoder.cache.data.zero_()
        rng = np.random.default_rng(0)
        parts, page = [], 1
        for n in (1, 63, 64, 65, 130, 200):
            pages = np.arange(page, page + 6, dtype=np.int32)
            parts.append(Prefix(rng.integers(3, 5000, n).astype(np.int32), slots_of(pages, n, 64), pages))
            page += 6
        turns = []
        for prefix, n_new in zip(parts, (1, 5, 64, 100, 17, 90), strict=True):
            n = len(prefix.tokens)
            slots = slots_of(prefix.pages, n + n_new, 64)[n:]
            turns.append(Extension(rng.integers(3, 5000, n_new).astype(np.int32), n, prefix.pages, slots))
        with torch.inference_mode():
            prefill(decoder, parts)
            extend(decoder, turns)
        decoder.cache.clear(np.zeros(1, np.int32))
        found.append(decoder.cache.data.clone())
    assert apart(found[1], found[0]) < 0.02
    written = [(data != 0).any(-1) for data in found]
    assert torch.equal(*written)


@pytest.mark.parametrize("is_read", [False, True])
def test_responses_have_the_trainers_log_probs_either_way(is_read: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefixes, "reads", lambda *_: is_read)
    model = policy()
    local = engine(model)
    if is_read:
        local._decoder.prefill = None  # type: ignore[method-assign, assignment]
    local.submit(requests(60))
    assert gap(model, drain(local)).mean() < 0.02


def test_the_kernel_rounds_as_plain_torch_does():
    x = torch.randn(300, 4864, device="cuda", dtype=torch.bfloat16) * torch.logspace(-3, 3, 300, device="cuda")[:, None]
    x = x.bfloat16()
    x[7] = 0
    codes, scales = to_float8(x[:, 8:4808])
    wanted, wanted_scales = float8_rows(x[:, 8:4808])
    assert torch.equal(scales, wanted_scales)
    assert (codes.float() != wanted.float()).float().mean() < 1e-3, "a tie, after a division by another unit"
    assert apart(from_float8(codes, scales), x[:, 8:4808]) < 0.04


@pytest.mark.parametrize("n", [1, 7, 24, 255, 256, 257, 1000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_the_plain_one_whatever_the_number_of_rows(
    n: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(float8, "is_faster", lambda *_: True)
    weight = torch.randn(1152, 896, device="cuda", dtype=torch.bfloat16) / 30
    bias = torch.randn(1152, device="cuda", dtype=torch.bfloat16) if has_bias else None
    x, part = torch.randn(n, 896, device="cuda", dtype=torch.bfloat16), Float8(weight, bias)
    y = part(x)
    assert apart(y, float8_product(x, part.codes, part.scales, bias)) < 0.01
    exact = x.float() @ weight.float().t() + (0 if bias is None else bias.float())
    assert 0.005 < apart(y, exact) < 0.06


def test_an_engine_in_float8_is_near_the_trainer_and_refreshes_in_its_graphs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(float8, "is_faster", lambda *_: True)
    model = policy()
    local, ordinary = engine(model, is_float8=True), engine(model)
    found = []
    for factor in (1.0, 0.5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        for one in (local, ordinary):
            one.load_weights(model, 1)
            one.submit(requests(60))
            found.append(gap(model, drain(one)).mean())
    assert found[1] < found[0] < 0.3
    assert found[3] < found[2] < 0.3


def test_what_is_on_its_way_arrives_in_order():
    ragged = Ragged([3, 0, 4, 2], torch.float32)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 64
    ragged.put([2, 0], torch.arange(7.0, device="cuda") + 0 * busy[0, 0].nan_to_num())
    ragged.put([0, 3], torch.full((5,), 9.0, device="cuda", dtype=torch.bfloat16))
    ragged.put([3], torch.tensor([1.0, 2.0]))
    assert ragged.flat.tolist() == [9, 9, 9, 0, 1, 2, 3, 1, 2]
    assert ragged.joined([3, 2], "cuda").tolist() == [1, 2, 0, 1, 2, 3]
