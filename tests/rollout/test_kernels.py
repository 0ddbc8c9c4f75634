"""Each Triton kernel of the decode step computes what its plain counterpart does; under the interpreter on a CPU."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_local_engine import assert_same, drain, expected, request
from torch import Tensor

from dapo.models.triton_support import has_triton
from dapo.rollout.draft import Drafting
from dapo.rollout.engine import SamplingParams
from dapo.rollout.local.cache import PagedCache
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.local.ops import PlainOps, TritonOps
from dapo.rollout.local.rows import DeviceRows
from dapo.rollout.noise import NoiseKey
from tiny_models import tiny_policy

pytestmark = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NQ, NK, D, PAGE, N, V = 6, 2, 16, 4, 5, 300
LENGTHS = [1, 4, 9, 23, 30]


def slow(*values: object) -> object:
    """The interpreter takes a second for each."""
    return pytest.param(*values, marks=pytest.mark.slow)


def setting(seed: int = 0, page_tokens: int = PAGE) -> tuple[PlainOps, TritonOps, DeviceRows]:
    """Five rows at various lengths, the third of them dead, their pages scattered over the cache."""
    torch.manual_seed(seed)
    kinds = {"n_layers": 2, "n_pages": 60, "page_tokens": page_tokens, "n_heads": NK, "head_dim": D}
    cache = PagedCache(**kinds, dtype=torch.float32, device=torch.device(DEVICE))
    cache.data.normal_()
    angle = torch.arange(40)[:, None] * torch.rand(D // 2)[None]
    cos = torch.cat([angle.cos(), angle.cos()], 1).to(DEVICE)
    sin = torch.cat([-angle.sin(), angle.sin()], 1).to(DEVICE)
    rows = DeviceRows(16, 10, 3, torch.float32, torch.device(DEVICE))
    pages = torch.randperm(59)[: N * 10].view(N, 10) + 1
    rows.table[:N] = pages.int().to(DEVICE)
    rows.length[:N] = torch.tensor(LENGTHS, dtype=torch.int32)
    rows.start[:N] = 1
    rows.limit[:N] = torch.tensor([40, 5, 40, 40, 40], dtype=torch.int32)
    rows.stop[:N] = torch.tensor([0, 0, 1, 0, 0], dtype=torch.int32)
    words = [NoiseKey(seed, "train", "p", 0, i).words() for i in range(N)]
    rows.words[:, :N] = torch.tensor(np.array(words, np.uint32).view(np.int32).T.copy())
    shared = (cache, cos, sin, D**-0.5, NQ)
    return PlainOps(*shared), TritonOps(*shared, n_rows=16, n_tokens=V), rows


def close(a: Tensor, b: Tensor, rows: DeviceRows) -> None:
    alive = rows.is_alive(N)
    torch.testing.assert_close(a[alive], b[alive], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [32, 48, 100])
@pytest.mark.parametrize("has_y", [True, False])
def test_add_norm(width: int, has_y: bool):
    plain, fast, _ = setting()
    x, y, weight = torch.randn(N, width), torch.randn(N, width), torch.randn(width)
    x, y, weight = x.to(DEVICE), y.to(DEVICE) if has_y else None, weight.to(DEVICE)
    ours, theirs = x.clone(), x.clone()
    out = fast.add_norm(ours, y, weight, 1e-6)
    torch.testing.assert_close(out, plain.add_norm(theirs, y, weight, 1e-6))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("width", [32, 1500])
def test_gate(width: int):
    plain, fast, _ = setting()
    gate_up = torch.randn(N, 2 * width, device=DEVICE)
    torch.testing.assert_close(fast.gate(gate_up), plain.gate(gate_up))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "splits", "has_norms", "page_tokens"),
    [
        (None, 1, True, 4),
        (6, 8, False, 4),
        slow(None, 2, False, 32),
        slow(None, 8, False, 4),
        slow(1, 1, False, 4),
        slow(6, 2, True, 32),
    ],
)
def test_mix(window: int | None, splits: int, has_norms: bool, page_tokens: int):
    plain, fast, rows = setting(page_tokens=page_tokens)
    fast.splits = lambda _n: splits  # type: ignore[method-assign]
    check_mix(plain, fast, rows, has_norms, window)


def check_mix(
    plain: PlainOps, fast: TritonOps, rows: DeviceRows, has_norms: bool, window: int | None, longest: int = 30
) -> None:
    """The same result, and the same keys and values in the cache."""
    qkv = torch.randn(N, (NQ + 2 * NK) * D, device=DEVICE)
    norms = (torch.randn(D, device=DEVICE), torch.randn(D, device=DEVICE)) if has_norms else None
    before = plain.cache.data.clone()
    expected_out = plain.mix(qkv, 1, norms, 1e-6, window, rows, longest)
    expected_cache = plain.cache.data.clone()
    plain.cache.data.copy_(before)
    close(fast.mix(qkv, 1, norms, 1e-6, window, rows, longest), expected_out, rows)
    torch.testing.assert_close(plain.cache.data[:, :, 1:], expected_cache[:, :, 1:], atol=1e-5, rtol=1e-5)
    assert not torch.equal(before, expected_cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.6), SamplingParams(temperature=0.0), SamplingParams(top_k=20, top_p=0.5),
        slow(SamplingParams()), slow(SamplingParams(top_p=0.7)), slow(SamplingParams(top_k=7)),
        slow(SamplingParams(min_p=0.1)),
    ],
)  # fmt: skip
def test_draw(sampling: SamplingParams):
    for seed in range(1 if sampling.top_k or sampling.top_p < 1 else 3):  # cuts cost the interpreter seconds
        plain, fast, rows = setting(seed)
        is_end = torch.zeros(V, dtype=torch.bool, device=DEVICE)
        is_end[: V // 2] = True
        logits = 3 * torch.randn(N, V, device=DEVICE)
        logits[:, 40:60] = float("-inf")
        logits[3, 0] = float("nan")
        before = rows.state.clone()
        plain.draw(logits, sampling, is_end, rows)
        after, token, logp = rows.state.clone(), rows.out_token[0].clone(), rows.out_logp[0].clone()
        rows.state.copy_(before)
        fast.draw(logits, sampling, is_end, rows)
        assert rows.stop[3] == after[4, 3] == 3, "a row that is not finite stops as bad"
        healthy = [0, 1, 4]
        assert rows.out_token[0][healthy].tolist() == token[healthy].tolist()
        torch.testing.assert_close(rows.out_logp[0][healthy], logp[healthy])
        columns = [0, 1, 2, 4]
        assert torch.equal(rows.state[:, columns], after[:, columns])
        assert rows.length[3] == before[2, 3]


def test_a_vocabulary_of_several_blocks():
    size = 9_000
    plain, _, rows = setting()
    fast = TritonOps(plain.cache, plain.cos, plain.sin, plain.scaling, NQ, n_rows=16, n_tokens=size)
    is_end = torch.zeros(size, dtype=torch.bool, device=DEVICE)
    for seed in range(3):
        torch.manual_seed(seed)
        logits = torch.randn(N, size, device=DEVICE)
        rows.words[:, :N] = torch.randint(-(2**31), 2**31, (4, N), dtype=torch.int32)
        before = rows.state.clone()
        plain.draw(logits, SamplingParams(), is_end, rows)
        token = rows.out_token[0, :N].clone()
        rows.state.copy_(before)
        fast.draw(logits, SamplingParams(), is_end, rows)
        assert rows.out_token[0, :N].tolist() == token.tolist()


@pytest.mark.parametrize("size", [15, 16, 17, 33])
def test_border_the_last_token_of_a_vocabulary_can_be_drawn(size: int, monkeypatch: pytest.MonkeyPatch):
    """Blocks of sixteen: once by chance among all tokens, once with nearly all weight on the last one."""
    monkeypatch.setattr("dapo.rollout.local.ops.DRAW_BLOCK", 16)
    plain, _, rows = setting()
    fast = TritonOps(plain.cache, plain.cos, plain.sin, plain.scaling, NQ, n_rows=16, n_tokens=size)
    is_end = torch.zeros(size, dtype=torch.bool, device=DEVICE)
    for weight in (0.0, 50.0):
        logits = torch.randn(N, size, device=DEVICE)
        logits[:, -1] += weight
        before = rows.state.clone()
        plain.draw(logits, SamplingParams(), is_end, rows)
        token, logp = rows.out_token[0, :N].clone(), rows.out_logp[0, :N].clone()
        rows.state.copy_(before)
        fast.draw(logits, SamplingParams(), is_end, rows)
        assert rows.out_token[0, :N].tolist() == token.tolist()
        torch.testing.assert_close(rows.out_logp[0, :N], logp)
        rows.state.copy_(before)
    assert token.tolist() == [size - 1] * N


def test_border_attention_where_blocks_of_keys_and_pages_end(monkeypatch: pytest.MonkeyPatch):
    """Blocks of sixteen keys, pages of four; the third row is dead."""
    monkeypatch.setattr("dapo.rollout.local.ops.ATTEND_BLOCK", 16)
    plain, fast, rows = setting()
    rows.length[:N] = torch.tensor([15, 16, 5, 17, 33], dtype=torch.int32)
    fast.splits = lambda _n: 1  # type: ignore[method-assign]
    check_mix(plain, fast, rows, False, None, longest=33)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="on CUDA the kernels run in half precision: tests/gpu")
@pytest.mark.parametrize("family", ["qwen3", "qwen2-window"])
@pytest.mark.parametrize("is_read", [False, True])
def test_an_engine_on_kernels_writes_what_the_plain_engine_writes(
    family: str, is_read: bool, monkeypatch: pytest.MonkeyPatch
):
    """Prompts prefilled by Hugging Face's modules, and by the kernels too."""
    monkeypatch.setattr("dapo.rollout.local.ops.MOST_SPLITS", 2)  # the interpreter runs programs one by one
    monkeypatch.setattr("dapo.rollout.local.prefixes.reads", lambda *_: is_read)
    policy = tiny_policy(family, torch.float32)
    wanted = [request(i, i % 2, n_prompt=5 + 4 * (i % 2), max_new_tokens=4) for i in range(3)]
    engine = LocalEngine(
        policy,
        sampling=SamplingParams(),
        max_concurrent=4,
        max_tokens=64,
        page_tokens=4,
        tokens_per_tick=3,
        ops="triton",
    )
    if is_read:
        engine._decoder.prefill = None  # type: ignore[method-assign, assignment]
    engine.submit(wanted)
    assert_same(drain(engine), expected(policy, wanted), atol=1e-4)


def test_border_there_is_room_for_the_parts_of_every_number_of_rows():
    """A pass over new tokens may have more rows than the engine, which has one here."""
    kinds = {"n_layers": 1, "n_pages": 2, "page_tokens": 4, "n_heads": 2, "head_dim": 16}
    cache = PagedCache(**kinds, dtype=torch.float32, device=torch.device(DEVICE))
    table = torch.zeros(8, 16, device=DEVICE)
    ops = TritonOps(cache, table, table, 1.0, 4, n_rows=1, n_tokens=9)
    split = [n for n in range(1, 2000) if ops.splits(n) > 1]
    assert len(split) > 10
    assert all(n * ops.splits(n) <= len(ops.part) for n in split)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="on CUDA the kernels run in half precision: tests/gpu")
def test_drafts_on_kernels_are_drawn_as_without_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dapo.rollout.local.ops.MOST_SPLITS", 2)
    policy = tiny_policy("qwen3", torch.float32)
    same = tuple([5, 6, 7] * 3)
    wanted = [dataclasses.replace(request(i, 0, n_prompt=1, max_new_tokens=3), prompt=same) for i in range(2)]
    engine = LocalEngine(
        policy,
        sampling=SamplingParams(),
        max_concurrent=4,
        max_tokens=64,
        page_tokens=4,
        ops="triton",
        drafting=Drafting(tokens=3, below_rows=4),
    )
    engine.submit(wanted)
    assert_same(drain(engine), expected(policy, wanted), atol=1e-4)
    assert engine.take_drafted()[0] > 1


@pytest.mark.parametrize("has_norms", [True, False])
def test_the_tokens_of_a_draft_attend_to_each_other(has_norms: bool):
    """Rows 0, 1 and 3 are tokens of one response, the last of them first: all keys are stored before any is read."""
    plain, fast, rows = setting()
    rows.length[:N] = torch.tensor([11, 10, 5, 9, 30], dtype=torch.int32)
    rows.table[[1, 3]] = rows.table[0].clone()
    fast.splits, fast.has_drafts = lambda _n: 1, True  # type: ignore[method-assign]
    check_mix(plain, fast, rows, has_norms, None)

    qkv, weight = torch.randn(N, (NQ + 2 * NK) * D, device=DEVICE), torch.randn(D, device=DEVICE)
    norms = (weight, weight) if has_norms else None
    before = plain.cache.data.clone()
    fast.store(qkv, 1, norms, 1e-6, rows)
    stored = plain.cache.data.clone()
    plain.cache.data.copy_(before)
    plain.rotate_and_store(qkv, 1, norms, 1e-6, rows)
    torch.testing.assert_close(stored[:, :, 1:], plain.cache.data[:, :, 1:], atol=1e-5, rtol=1e-5)
    assert not torch.equal(before, stored)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_for_a_card_that_is_not_here(capability: int, tmp_path: Path):
    """A100 and H100: the interpreter accepts more than the compiler does."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability)], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "attend_kernel" in done.stdout
