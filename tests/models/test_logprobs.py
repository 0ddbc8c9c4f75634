"""Chunked log-probs against the plain formula: values, gradients, and that the logits never exist as a whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from compilers import needs_compiler
from dapo.models import logprobs
from dapo.models.kernels import compiled
from dapo.models.logprobs import _fits, chunk_size, head_logits, linear_logprobs, plain_logprobs
from dapo.models.triton_support import has_triton, is_interpreted

needs_interpreter = pytest.mark.skipif(not (has_triton() and is_interpreted()), reason="needs Triton's interpreter")


def inputs(N: int, H: int, V: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    hidden = torch.randn(N, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, dtype=dtype, requires_grad=True)
    return hidden, weight, bias, torch.randint(0, V, (N,))


@given(
    N=st.integers(1, 9),
    V=st.integers(2, 12),
    chunk=st.integers(1, 12),
    temperature=st.floats(0.2, 3.0),
    with_bias=st.booleans(),
)
@settings(max_examples=40)
def test_chunked_equals_plain(N: int, V: int, chunk: int, temperature: float, with_bias: bool):
    hidden, weight, bias, target = inputs(N, 5, V)
    leaves = [hidden, weight, *([bias] if with_bias else [])]
    scale = torch.randn(N, dtype=torch.float64)
    results = []
    for compute in (plain_logprobs, linear_logprobs):
        extra = {"chunk_tokens": chunk} if compute is linear_logprobs else {}
        logp, entropy = compute(
            hidden, weight, target, temperature=temperature, bias=bias if with_bias else None, **extra
        )
        assert not entropy.requires_grad
        results.append([logp, entropy, *torch.autograd.grad((logp * scale).sum(), leaves)])
    for plain, chunked in zip(*results, strict=True):
        assert_close(chunked, plain, atol=1e-10, rtol=1e-10)


def test_gradcheck():
    hidden, weight, bias, target = inputs(4, 3, 5)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_logprobs(h, w, target, temperature=0.8, bias=b, chunk_tokens=3)[0],
        (hidden, weight, bias),
    )


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_gradient_of_an_entropy_bonus(chunk: int):
    """Of log-prob and entropy together; without being asked for it there is none."""
    hidden, weight, bias, target = inputs(4, 3, 5)

    def both(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return linear_logprobs(h, w, target, temperature=0.8, bias=b, chunk_tokens=chunk, entropy_gradient=True)

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))
    logits = (hidden @ weight.t() + bias) / 0.8
    assert_close(both(hidden, weight, bias)[1], -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1))


def test_an_impossible_token_has_no_part_in_the_gradient_of_the_entropy():
    hidden, weight, _, target = inputs(2, 3, 4)
    bias = torch.tensor([0.0, 0.0, 0.0, -1e4], dtype=torch.float64)
    _, entropy = linear_logprobs(hidden, weight, target, temperature=1.0, bias=bias, entropy_gradient=True)
    (gradient,) = torch.autograd.grad(entropy.sum(), hidden)
    three = (hidden @ weight[:3].t()).log_softmax(-1)
    (expected,) = torch.autograd.grad(-(three.exp() * three).sum(), hidden)
    assert_close(gradient, expected)


def test_the_head_of_a_16_bit_model_works_in_float32():
    """Products, softmax and log-probs: what bfloat16 rounds off a logit is above what a clip of 3e-4 could bear."""
    hidden, weight, _, target = inputs(6, 64, 50, torch.bfloat16)
    for entropy_gradient in (False, True):
        logp, entropy = linear_logprobs(hidden, weight, target, temperature=0.7, entropy_gradient=entropy_gradient)
        logits = hidden.double() @ weight.double().t() / 0.7
        exact = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
        assert (logp.dtype, entropy.dtype) == (torch.float32, torch.float32)
        assert_close(logp.double(), exact, rtol=1e-5, atol=1e-5)


def test_uniform_logits_give_minus_log_V_and_the_largest_entropy():
    V = 8
    logp, entropy = linear_logprobs(torch.zeros(3, 2), torch.randn(V, 2), torch.tensor([0, 3, 7]), temperature=1.0)
    assert_close(logp, torch.full((3,), -torch.tensor(float(V)).log()))
    assert_close(entropy, torch.full((3,), torch.tensor(float(V)).log()))


def test_a_hotter_distribution_has_more_entropy():
    hidden, weight, _, target = inputs(6, 5, 7)
    cold, hot = (linear_logprobs(hidden, weight, target, temperature=t)[1] for t in (0.5, 2.0))
    assert (hot > cold).all()


def test_entropy_only_when_asked_for():
    hidden, weight, _, target = inputs(3, 2, 4)
    assert not linear_logprobs(hidden, weight, target, temperature=1.0, with_entropy=False)[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gets_float32_logits(dtype: torch.dtype):
    hidden, weight, _, target = inputs(5, 16, 9, dtype)
    logp, entropy = linear_logprobs(hidden, weight, target, temperature=1.0, chunk_tokens=2)
    assert logp.dtype == entropy.dtype == torch.float32
    assert_close(logp, plain_logprobs(hidden.float(), weight.float(), target, temperature=1.0)[0])
    grads = torch.autograd.grad(logp.sum(), [hidden, weight])
    assert [grad.dtype for grad in grads] == [dtype, dtype]
    assert head_logits(hidden, weight).dtype == torch.float32


class Largest(TorchDispatchMode):
    """Watches every tensor that is made and remembers the size of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_the_logits_of_all_tokens_never_exist():
    N, H, V, chunk = 64, 4, 200, 8
    hidden, weight, _, target = inputs(N, H, V)
    with Largest() as chunked:
        linear_logprobs(hidden, weight, target, temperature=1.0, chunk_tokens=chunk)[0].sum().backward()
    with Largest() as plain:
        plain_logprobs(hidden, weight, target, temperature=1.0)[0].sum().backward()
    assert chunked.elements == chunk * V
    assert plain.elements == N * V


@pytest.fixture(
    params=[
        "plain",
        pytest.param("triton", marks=needs_interpreter),
        pytest.param("compiled", marks=needs_compiler),
    ]
)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which passes over the logits are taken."""
    kind: str = request.param
    monkeypatch.setattr(logprobs, "runs_triton", lambda _device: kind == "triton")
    return kind


@pytest.mark.parametrize("keeps_logits", [False, True])
@pytest.mark.parametrize(("N", "V", "chunk"), [(7, 37, 3), (5, 4100, 5), (1, 2, 4)])
def test_kept_logits_and_kernels_equal_plain(keeps_logits: bool, kind: str, N: int, V: int, chunk: int):
    hidden, weight, bias, target = (x.detach() for x in inputs(N, 8, V, torch.float32))
    scale = torch.randn(N)
    results = []
    for dtype in (torch.float64, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
        h, w, b = leaves
        if dtype == torch.float64:
            logp, entropy = plain_logprobs(h, w, target, temperature=0.7, bias=b)
        else:
            how = {"chunk_tokens": chunk, "keeps_logits": keeps_logits, "is_fused": kind != "plain"}
            logp, entropy = linear_logprobs(h, w, target, temperature=0.7, bias=b, **how)
        results.append([logp, entropy, *torch.autograd.grad((logp * scale).sum(), leaves)])
    for exact, got in zip(*results, strict=True):
        assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)


def test_the_kernels_take_logits_of_minus_infinity(kind: str):
    if kind == "plain":
        pytest.skip("no kernel")
    kernels = logprobs.logit_kernels(torch.zeros(1))
    assert (kernels is compiled) is (kind == "compiled")
    logit_gradient, logit_scores = kernels.logit_gradient, kernels.logit_scores
    logits = torch.randn(3, 10)
    logits[0, :5] = float("-inf")
    logits[1, 4:] = float("-inf")
    target = torch.tensor([6, 0, 9])
    logp, normaliser, entropy = logit_scores(logits, target, temperature=0.5, with_entropy=True)
    p = (logits / 0.5).softmax(-1)
    assert_close(logp, p.log()[torch.arange(3), target])
    assert_close(entropy, -torch.xlogy(p, p).sum(-1))
    grad = logit_gradient(
        logits.clone(), target, normaliser, torch.tensor([1.0, -2.0, 0.0]), temperature=0.5, dtype=torch.bfloat16
    )
    one = torch.nn.functional.one_hot(target, 10)
    expected = (one - p) / 0.5 * torch.tensor([1.0, -2.0, 0.0])[:, None]
    assert_close(grad, expected.bfloat16())


@needs_compiler
def test_compiled_sums_over_a_long_vocabulary_keep_their_digits(monkeypatch: pytest.MonkeyPatch):
    """And rows shared among threads are the same to the last bit."""
    logits = 3 * torch.randn(20, 30_000, generator=torch.Generator().manual_seed(0))
    target = torch.arange(20) * 1000
    alone = compiled.logit_scores(logits, target, temperature=0.9, with_entropy=True)
    exact = (logits.double() / 0.9).log_softmax(-1)
    assert (alone[0].double() - exact[torch.arange(20), target]).abs().max() < 2e-6
    assert (alone[2].double() + (exact.exp() * exact).sum(-1)).abs().max() < 2e-6
    grads = [compiled.logit_gradient(logits.clone(), target, alone[1], alone[2], temperature=0.9, dtype=torch.float32)]
    monkeypatch.setattr(compiled, "PARALLEL_NUMBERS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shared = compiled.logit_scores(logits, target, temperature=0.9, with_entropy=True)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
    grads.append(
        compiled.logit_gradient(logits.clone(), target, alone[1], alone[2], temperature=0.9, dtype=torch.float32)
    )
    assert torch.equal(*grads)


@needs_compiler
def test_a_log_prob_of_logits_that_are_not_finite_is_not():
    logits = torch.zeros(3, 40)
    logits[0, 7], logits[1, 3] = float("nan"), float("inf")
    logp, _, entropy = compiled.logit_scores(logits, torch.tensor([1, 3, 3]), temperature=1.0, with_entropy=True)
    assert logp.isfinite().tolist() == entropy.isfinite().tolist() == [False, False, True]


@needs_compiler
@pytest.mark.parametrize(("limit", "times"), [(35, 1), (34, 2)])
def test_border_on_a_cpu_logits_of_one_block_are_made_once(limit: int, times: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", limit)
    made = []
    real = logprobs.head_logits
    monkeypatch.setattr(logprobs, "head_logits", lambda *args: made.append(len(args[0])) or real(*args))
    hidden, weight, _, target = inputs(5, 3, 7, torch.float32)
    linear_logprobs(hidden, weight, target, temperature=1.0)[0].sum().backward()
    assert sum(n for n in made if n != 7) == 5 * times  # a product of seven rows is the weight's gradient


@pytest.mark.parametrize(
    ("N", "V"), [(1, 152_000), (1766, 152_000), (8192, 151_936), (16_384, 151_936), (5000, 49_152)]
)
def test_chunks_on_cuda_hold_a_gibibyte_and_are_of_equal_size(N: int, V: int):
    chunk = chunk_size(N, V, "cuda")
    assert chunk * V <= (1 << 28) + 128 * V
    n_chunks = -(-N // chunk)
    assert n_chunks * chunk - N < 128 * n_chunks


@pytest.mark.parametrize("N", [0, 1, 4, 5, 6, 11])
@pytest.mark.parametrize("keeps_logits", [False, True])
def test_border_every_token_is_in_one_chunk_of_the_heads(N: int, keeps_logits: bool, monkeypatch: pytest.MonkeyPatch):
    """Five tokens at a time: 20 logits of a vocabulary of 4."""
    monkeypatch.setattr("dapo.models.logprobs.CHUNK_ELEMENTS", 20)
    hidden, weight, bias, target = inputs(N, 3, 4)
    results = []
    for compute, how in ((plain_logprobs, {}), (linear_logprobs, {"keeps_logits": keeps_logits})):
        logp, entropy = compute(hidden, weight, target, temperature=0.7, bias=bias, **how)
        grads = torch.autograd.grad((logp * torch.arange(1, N + 1)).sum(), [hidden, weight, bias], allow_unused=True)
        zeros = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, (hidden, weight, bias), strict=True)]
        results.append([logp, entropy, *zeros])
    for plain, chunked in zip(*results, strict=True):
        assert_close(chunked, plain, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("gib", "free", "is_short", "stays"),
    [
        (14, 100, False, True),
        (16, 100, False, False),
        (14, 50, False, False),
        (14, 100, True, False),
        (4, 100, True, True),
    ],
)
def test_logits_stay_where_memory_is_plenty(
    gib: int, free: int, is_short: bool, stays: bool, monkeypatch: pytest.MonkeyPatch
):
    """Of 100 GiB 15, or 5 where layers recompute, and a quarter of what is free."""
    monkeypatch.setattr("dapo.models.logprobs.device_memory", lambda _device: (free << 30, 100 << 30))
    assert _fits((gib << 30) // 4, torch.device("cuda"), is_short=is_short) is stays


@pytest.mark.parametrize("N", [0, 1, 127, 128, 129, 1663, 1664, 1665, 3329])
def test_border_chunks_on_cuda_cover_every_token_once(N: int):
    """At a vocabulary of 160,000 a block holds 1,664 tokens."""
    chunk = chunk_size(N, 160_000, "cuda")
    parts = [range(N)[start : start + chunk] for start in range(0, N, chunk)]
    assert [token for part in parts for token in part] == list(range(N))
    assert len(parts) == -(-N // 1664)
