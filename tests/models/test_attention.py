"""attention.c against torch's attention over each sequence alone, in float64: values and gradients."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.testing import assert_close

from compilers import needs_compiler
from dapo.models import packed_attention
from dapo.models.packed_attention import attend
from dapo.models.packing import Packed, pack

pytestmark = needs_compiler


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(groups: list[tuple[int, list[int]]]) -> Packed:
    """Groups of (prompt tokens, response tokens of each row); prompts are shared wherever they can be."""
    prompts = [[g] * n_prompt for g, (n_prompt, rows) in enumerate(groups) for _ in rows]
    responses = [np.ones(n, np.int32) for _, rows in groups for n in rows]
    return pack(prompts, responses, "cpu", sharing_saves=0)


def qkv(packed: Packed, queries: int, heads: int, size: int, scale: float = 1.0) -> list[Tensor]:
    shapes = ((queries, 0), (heads, 1), (heads, 2))
    return [(numbers(packed.n_tokens, n, size, seed=seed) * scale).requires_grad_() for n, seed in shapes]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scaling: float | None) -> Tensor:
    """[T, H, D] by SDPA in float64, a sequence at a time; of a shared token the last sequence's result is taken."""
    sequences, out = packed.sequences, torch.zeros_like(q, dtype=torch.float64)
    for first, end in zip(sequences.start[:-1].tolist(), sequences.start[1:].tolist(), strict=True):
        place = sequences.place[first:end]
        x = (part[place].double().transpose(0, 1)[None] for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(*x, is_causal=True, scale=scaling, enable_gqa=True)[0]
        out = out.index_put((place,), mixed.transpose(0, 1))
    return out


def is_ours(result: Tensor) -> bool:
    return type(result.grad_fn).__name__ == "_AttentionBackward"


def compare(packed: Packed, heads: tuple[int, int, int], scaling: float | None = None, scale: float = 1.0) -> None:
    parts = qkv(packed, *heads, scale=scale)
    grad = numbers(packed.n_tokens, heads[0], heads[2], seed=3)
    mixed = attend(*parts, packed, scaling=scaling, is_fused=True)
    assert is_ours(mixed)
    mixed.backward(grad)
    got = [mixed.detach(), *(part.grad for part in parts)]
    for part in parts:
        part.grad = None
    wanted = one_by_one(*parts, packed, scaling)
    wanted.backward(grad.double())
    scores = torch.einsum("qhd,kgd->hgqk", parts[0].detach(), parts[1].detach()) * (scaling or heads[2] ** -0.5)
    exact = max(1e-5, float(scores.abs().max()) * 2**-24)  # half a unit in the last place of a score is exp's error
    for ours, reference in zip(got, [wanted.detach(), *(part.grad for part in parts)], strict=True):
        size = float(reference.abs().max()) + 1
        assert_close(ours.double(), reference.double(), rtol=exact, atol=exact * size)


GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 50), min_size=1, max_size=4)), min_size=1, max_size=4
)


@settings(max_examples=60)
@given(
    GROUPS,
    st.sampled_from([(4, 2, 32), (2, 2, 16), (3, 1, 64), (2, 1, 128), (6, 2, 48)]),
    st.sampled_from([None, 0.3]),
)
def test_values_and_gradients(groups: list[tuple[int, list[int]]], heads: tuple[int, int, int], scaling: float | None):
    compare(batch(groups), heads, scaling)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100, 512])
def test_every_edge_of_a_block(length: int):
    compare(batch([(length, [1]), (1, [length])]), (2, 1, 16))


def test_large_scores_do_not_overflow():
    compare(batch([(9, [20, 30])]), (2, 1, 32), scaling=1.0, scale=6.0)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_sequence_does_not_depend_on_its_neighbours_or_the_threads(n_threads: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dapo.models.kernels.compiled.PARALLEL_NUMBERS", 1)
    packed, alone = batch([(5, [40, 3]), (9, [17]), (2, [30, 30])]), batch([(9, [17])])
    first = int(packed.sequences.start[2])
    own = packed.sequences.place[first : first + 25]
    parts = qkv(packed, 4, 2, 32)
    only = [part.detach()[own].requires_grad_() for part in parts]
    grad = numbers(packed.n_tokens, 4, 32, seed=3)
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        mixed = attend(*parts, packed, is_fused=True)
        mixed.backward(grad)
    finally:
        torch.set_num_threads(before)
    mixed_alone = attend(*only, alone, is_fused=True)
    mixed_alone.backward(grad[own])
    assert torch.equal(mixed[own], mixed_alone)
    for whole, one in zip(parts, only, strict=True):
        assert torch.equal(whole.grad[own], one.grad)


def test_what_is_not_a_number_stays_in_its_sequence():
    packed = batch([(3, [5]), (3, [5])])
    q, k, v = qkv(packed, 2, 1, 16)
    with torch.no_grad():
        k[packed.sequences.place[8]] = float("nan")  # of the second sequence
    mixed = attend(q, k, v, packed, is_fused=True)
    assert mixed[:7].isfinite().all()
    assert not mixed[8:].isfinite().any()


def test_others_are_left_to_torch(monkeypatch: pytest.MonkeyPatch):
    packed = batch([(3, [5, 9]), (4, [6])])
    q, k, v = qkv(packed, 2, 1, 16)

    def runs(*parts: Tensor, **how: object) -> bool:
        return is_ours(attend(*parts, packed, **{"is_fused": True, **how}))

    assert runs(q, k, v)
    assert not runs(q, k, v, is_fused=False)
    assert not runs(q, k, v, window=4)
    assert not runs(q, k, v, dropout=0.1)
    assert not runs(q.double(), k.double(), v.double())
    assert not runs(*qkv(packed, 2, 1, 24))
    monkeypatch.setattr(packed_attention, "COMPILED_LENGTH", 10)
    assert not runs(q, k, v)


def test_heads_that_differ_in_size_are_refused_not_read_beyond_their_end():
    packed = batch([(3, [5])])
    q, k, _ = qkv(packed, 2, 1, 48)
    wrong = numbers(packed.n_tokens, 1, 32)
    assert not packed_attention.runs_compiled(q, k, wrong, packed.max_length)
    assert not packed_attention.runs_compiled(wrong, k, k, packed.max_length)
    assert not packed_attention.runs_compiled(q, k, k.bfloat16(), packed.max_length)


@pytest.mark.parametrize("window", [None, 4])
def test_torchs_attention_over_shared_prompts(window: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed_attention, "library", lambda: None)
    packed = batch([(7, [5, 9, 1]), (4, [6])])
    apart = pack([[1] * 7] * 3 + [[2] * 4], [[1] * n for n in (5, 9, 1, 6)], "cpu", sharing_saves=None)
    assert apart.shared is None
    parts = [part.detach().double().requires_grad_() for part in qkv(packed, 2, 1, 16)]
    place = packed.sequences.place
    full = [part.detach()[place].requires_grad_() for part in parts]
    grad = numbers(packed.n_tokens, 2, 16, seed=3).double()
    mixed = attend(*parts, packed, window=window)
    mixed.backward(grad)
    wanted = attend(*full, apart, window=window)
    home = packed.shared.home
    assert_close(mixed, wanted[home], atol=1e-12, rtol=0)
    wanted[home].backward(grad)
    for part, spread in zip(parts, full, strict=True):
        assert_close(part.grad, torch.zeros_like(part).index_add_(0, place, spread.grad), atol=1e-12, rtol=0)


def flash(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scaling: float | None, window: int | None):
    """What CUDA's kernel does, for a machine without it."""
    assert window is None
    assert int(cu_seqlens.diff().max()) == longest
    parts = [x.tensor_split(cu_seqlens[1:-1].long()) for x in (q, k, v)]
    mixed = [packed_attention._long(*part, scaling) for part in zip(*parts, strict=True)]
    return torch.cat(mixed)


@pytest.mark.parametrize(
    ("groups", "spans"),
    [
        ([(7, [5, 9, 1]), (4, [6])], [(4, 42)]),  # none is long
        ([(3, [40]), (5, [9, 2]), (30, [11, 4, 3])], [(None, 42), (2, 19), (None, 40), (None, 33), (None, 32)]),
        ([(2, [3]), (20, [13, 20]), (2, [2])], [(1, 4), (None, 32), (None, 39), (1, 3)]),
        ([(1, [33])], [(None, 33)]),
    ],
)  # fmt: skip
def test_long_sequences_go_to_another_kernel(groups, spans, monkeypatch: pytest.MonkeyPatch):
    """By themselves, padded to a multiple, and in their places again; with shared prompts, values and gradients."""
    monkeypatch.setattr("dapo.models.packing.LONG_TOKENS", 32)
    monkeypatch.setattr(packed_attention, "PLANNED_LENGTH", 16)
    monkeypatch.setattr(packed_attention, "LONG_BACKENDS", [SDPBackend.MATH])
    monkeypatch.setattr(packed_attention, "_varlen", flash)
    monkeypatch.setattr(packed_attention, "runs_flash", lambda *_: True)
    packed = batch(groups)
    found = [(None if s.cu_seqlens is None else len(s.cu_seqlens) - 1, s.cells) for s in packed.spans]
    assert found == spans
    parts = [part.detach().double().requires_grad_() for part in qkv(packed, 4, 2, 16)]
    grad = numbers(packed.n_tokens, 4, 16, seed=3).double()
    results = []
    for mixed in (attend(*parts, packed, scaling=0.3), one_by_one(*parts, packed, 0.3)):
        mixed.backward(grad)
        results.append([mixed.detach(), *(part.grad for part in parts)])
        for part in parts:
            part.grad = None
    for ours, wanted in zip(*results, strict=True):
        assert_close(ours, wanted, atol=1e-12, rtol=0)


def test_a_window_and_large_heads_stay_with_flash_attention(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dapo.models.packing.LONG_TOKENS", 8)
    monkeypatch.setattr(packed_attention, "runs_flash", lambda *_: True)
    seen = []
    monkeypatch.setattr(packed_attention, "_varlen", lambda *how: seen.append(how[4:]) or how[0])
    packed = batch([(3, [20]), (2, [3])])
    attend(*qkv(packed, 2, 1, 16), packed, window=5)
    attend(*qkv(packed, 2, 1, 192), packed)
    assert seen == [(22, None, 5), (22, None, None)]
