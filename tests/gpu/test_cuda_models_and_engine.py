"""On CUDA the same things hold: packed attention by the varlen kernel, the same noise bits, the engine's log-probs."""

import copy

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from dapo.models import packed_attention
from dapo.models.logprobs import linear_logprobs, plain_logprobs
from dapo.models.packed_attention import attend
from dapo.models.packing import Gather, pack, sum_in_torch
from dapo.models.policy import Policy
from dapo.rollout.engine import NoiseKey, Request, SamplingParams
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.noise import uniform
from tiny_models import VOCABULARY, tiny_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ["llama-tied", "qwen2-window", "qwen3", "mistral-window"]


def batch(device: str):
    rng = np.random.default_rng(1)
    lengths = [(1, 1), (4, 9), (7, 2), (3, 10), (2, 60), (5, 0)]
    prompts = [rng.integers(3, VOCABULARY, p).tolist() for p, _ in lengths]
    return pack(prompts, [rng.integers(3, VOCABULARY, r) for _, r in lengths], device)


def gradient(policy: Policy, packed) -> tuple[torch.Tensor, torch.Tensor]:
    policy.zero_grad()
    logp, _ = policy(packed, temperature=0.9)
    logp.sum().backward()
    return logp.detach().double().cpu(), torch.cat([p.grad.flatten().double().cpu() for p in policy.parameters()])


@pytest.mark.parametrize("family", FAMILIES)
def test_varlen_attention_agrees_with_float64_on_the_cpu(family: str):
    exact = tiny_policy(family, torch.bfloat16)
    fast = copy.deepcopy(exact).cuda()
    expected, expected_grad = gradient(exact.double(), batch("cpu"))
    logp, grad = gradient(fast, batch("cuda"))
    assert (logp - expected).abs().mean() < 5e-2
    assert torch.cosine_similarity(grad, expected_grad, dim=0) > 0.99


def test_a_long_sequence_by_cudnn_agrees_with_the_packed_kernel(monkeypatch: pytest.MonkeyPatch):
    """Values and gradients of q, k and v in bf16, beside the same in float64; and it is cuDNN that runs."""
    packed = pack([[1] * 200, [2] * 30, [2] * 30], [[3] * 4000, [3] * 50, [3] * 4700], "cuda")
    assert [span.cu_seqlens is None for span in packed.spans] == [True, False, True]
    shapes = ((12, 0), (2, 1), (2, 2), (12, 3))
    q, k, v, grad = (
        torch.randn(packed.n_tokens, n, 128, generator=torch.Generator().manual_seed(seed)).cuda() for n, seed in shapes
    )

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        parts = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        mixed = attend(*parts, packed)
        mixed.backward(grad.to(dtype))
        return [mixed.detach().double(), *(part.grad.double() for part in parts)]

    exact, cudnn = run(torch.float64), run(torch.bfloat16)
    monkeypatch.setattr(packed_attention, "PLANNED_HEAD", 0)
    for wanted, ours, packed_kernel in zip(exact, cudnn, run(torch.bfloat16), strict=True):
        error, usual = ((x - wanted).norm() / wanted.norm() for x in (ours, packed_kernel))
        assert error < 1.5 * usual + 1e-3
    heads = [x[None, :, :4096].bfloat16() for x in (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))]
    how = torch.backends.cuda.SDPAParams(*heads, None, 0.0, True, True)
    assert torch.backends.cuda.can_use_cudnn_attention(how)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_on_cuda_agrees_with_the_cpu(family: str):
    policy = tiny_policy(family, torch.float32)
    expected, expected_grad = gradient(policy, batch("cpu"))
    logp, grad = gradient(policy.cuda(), batch("cuda"))
    assert_close(logp, expected, atol=1e-4, rtol=0)
    assert torch.cosine_similarity(grad, expected_grad, dim=0) > 0.99999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(12, 128), (2, 128), (1537,)])
def test_gradients_of_shared_rows_are_summed_as_in_torch(dtype: torch.dtype, shape: tuple[int, ...]):
    from dapo.models.kernels.gather import sum_taken

    rng = np.random.default_rng(0)
    gather = Gather.of(np.concatenate([np.arange(400), rng.integers(0, 500, 600)]), 520, "cuda")
    grad = torch.randn(1000, *shape, device="cuda").to(dtype)
    got = sum_taken(grad, gather.order, gather.starts)
    assert_close(got, sum_in_torch(grad, gather), atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)
    assert torch.equal(got, sum_taken(grad, gather.order, gather.starts))


def test_half_precision_log_probs_have_float32_logits():
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(500, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 500, (300,), device="cuda")
    logp, entropy = linear_logprobs(hidden, weight, target, temperature=0.7, chunk_tokens=128)
    grads = torch.autograd.grad(logp.sum(), [hidden, weight])
    h, w = (x.detach().float().requires_grad_() for x in (hidden, weight))
    expected, expected_entropy = plain_logprobs(h, w, target, temperature=0.7)
    assert_close(logp, expected, atol=1e-3, rtol=1e-4)
    assert_close(entropy, expected_entropy, atol=1e-3, rtol=1e-3)
    for got, want in zip(grads, torch.autograd.grad(expected.sum(), [h, w]), strict=True):
        assert torch.cosine_similarity(got.float().flatten(), want.flatten(), dim=0) > 0.9999


def test_noise_is_the_same_bits_on_both_devices():
    words = torch.tensor([NoiseKey(0, "train", str(i), 0, 0).words() for i in range(500)])
    position = torch.arange(500)
    assert torch.equal(uniform(words, position), uniform(words.cuda(), position.cuda()).cpu())


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_on_cuda(family: str):
    requests = [
        Request(i, (3 + i, 5, 7), NoiseKey(0, "train", str(i), 0, 0), max_new_tokens=40, group=i) for i in range(24)
    ]
    tokens, gaps = {}, {}
    for name, device, dtype in (
        ("cpu", "cpu", torch.float32),
        ("cuda", "cuda", torch.float32),
        ("half", "cuda", torch.bfloat16),
    ):
        policy = tiny_policy(family, dtype).to(device)
        engine = LocalEngine(policy, sampling=SamplingParams(), max_concurrent=10, max_tokens=64)
        engine.submit(requests)
        finished = []
        while engine.n_in_flight or engine.n_waiting:
            finished += engine.advance()
        assert not engine.faults
        packed = pack([r.prompt for r, _ in finished], [c.tokens for _, c in finished], device)
        with torch.no_grad():
            logp = policy(packed, temperature=1.0)[0].float().cpu().numpy()
        gaps[name] = np.abs(logp - np.concatenate([c.logp for _, c in finished])).mean()
        tokens[name] = {r.id: c.tokens.tolist() for r, c in finished}
    assert sum(tokens["cpu"][i] == tokens["cuda"][i] for i in range(24)) >= 23
    assert gaps["cuda"] < 1e-5
    assert gaps["half"] < 5e-2
