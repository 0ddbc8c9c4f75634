"""The training step's kernels on CUDA: against float64, as exact as the plain 16-bit versions."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dapo.models.fused_layers import fuse_layers
from dapo.models.logprobs import linear_logprobs, plain_logprobs
from dapo.models.packing import pack
from dapo.models.policy import Policy
from tiny_models import FAMILIES, VOCABULARY, tiny_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def distance(got: Tensor, exact: Tensor) -> float:
    """‖got − exact‖ / ‖exact‖."""
    return float((got.double().cpu() - exact.cpu()).norm() / exact.norm().cpu())


@pytest.mark.parametrize("keeps_logits", [False, True])
@pytest.mark.parametrize(("N", "H", "V", "chunk"), [(300, 64, 5000, 128), (515, 256, 151_936, 256), (64, 128, 33, 64)])
def test_fused_logprobs_against_float64(N: int, H: int, V: int, chunk: int, keeps_logits: bool):
    hidden = torch.randn(N, H, device="cuda").bfloat16()
    weight = (torch.randn(V, H, device="cuda") / H**0.5).bfloat16()
    target = torch.randint(0, V, (N,), device="cuda")
    scale = torch.randn(N, device="cuda")
    results = {}
    for name, dtype, extra in (
        ("exact", torch.float64, None),
        ("plain", torch.bfloat16, {"is_fused": False}),
        ("fused", torch.bfloat16, {"is_fused": True, "keeps_logits": keeps_logits}),
    ):
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        if extra is None:
            logp, entropy = plain_logprobs(h, w, target, temperature=0.9)
        else:
            logp, entropy = linear_logprobs(h, w, target, temperature=0.9, chunk_tokens=chunk, **extra)
        results[name] = [logp.detach(), entropy, *torch.autograd.grad((logp * scale).sum(), [h, w])]
    for exact, plain, fused in zip(results["exact"], results["plain"], results["fused"], strict=True):
        assert distance(fused, exact) <= 1.2 * distance(plain, exact) + 1e-6
        assert distance(fused, exact) < 1e-2


def test_chunks_add_up_in_float32_as_one():
    """The product added onto a float32 sum in place, over many chunks, is the gradient of one chunk."""
    hidden = torch.randn(1024, 64, device="cuda").bfloat16()
    weight = torch.randn(300, 64, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(0, 300, (1024,), device="cuda")
    grads = []
    for chunk in (1024, 128):
        logp, _ = linear_logprobs(hidden, weight, target, temperature=1.0, chunk_tokens=chunk)
        grads.append(torch.autograd.grad(logp.sum(), weight)[0].float())
    assert_close(grads[1], grads[0], atol=0.05, rtol=1e-2)


def batch(device: str):
    rng = np.random.default_rng(1)
    lengths = [(1, 1), (4, 9), (7, 2), (3, 10), (2, 60), (5, 0)]
    prompts = [rng.integers(3, VOCABULARY, p).tolist() for p, _ in lengths]
    return pack(prompts, [rng.integers(3, VOCABULARY, r) for _, r in lengths], device)


def results_of(policy: Policy, device: str) -> dict[str, Tensor]:
    policy.zero_grad()
    logp, entropy = policy(batch(device), temperature=0.9)
    (logp * torch.linspace(-1, 1, len(logp), device=device)).sum().backward()
    return {"logp": logp.detach(), "entropy": entropy} | {n: p.grad for n, p in policy.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_are_as_exact_as_the_librarys(family: str):
    plain = tiny_policy(family, torch.bfloat16)
    exact = results_of(copy.deepcopy(plain).double(), "cpu")
    plain = plain.cuda()
    fused = copy.deepcopy(plain)
    assert fuse_layers(fused.backbone) == 2
    errors = []
    for policy in (plain, fused):
        got = results_of(policy, "cuda")
        errors.append(np.sqrt(np.mean([distance(got[name], exact[name]) ** 2 for name in exact])))
    assert errors[1] <= 1.3 * errors[0] + 1e-3


@pytest.mark.parametrize("family", ["llama-tied", "qwen3"])
def test_fused_layers_in_float32(family: str):
    plain = tiny_policy(family, torch.float32)
    fused = copy.deepcopy(plain).cuda()
    fuse_layers(fused.backbone)
    expected, got = results_of(plain, "cpu"), results_of(fused, "cuda")
    for name in expected:
        assert distance(got[name], expected[name].double()) < 1e-4, name
