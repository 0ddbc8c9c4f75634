"""The fused layers on a CPU against the library's own: log-probs and every gradient, with and without equal lengths."""

import copy
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from compilers import needs_compiler
from dapo.models import fused_layers
from dapo.models.fused_layers import fuse_layers, kernels_for
from dapo.models.kernels import compiled, host
from dapo.models.packing import Packed, pack
from tiny_models import FAMILIES, VOCABULARY, tiny_policy


@pytest.fixture(autouse=True)
def no_triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interpreter would take the CPU over."""
    monkeypatch.setattr(fused_layers, "runs_triton", lambda _device: False)


@pytest.fixture(params=["torch", pytest.param("compiled", marks=needs_compiler)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Both ways of a CPU; without a C compiler there is only one."""
    if request.param == "torch":
        monkeypatch.setattr(fused_layers, "library", lambda: None)
        return host
    return compiled


def batch(lengths: list[tuple[int, int]]) -> Packed:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCABULARY, p).tolist() for p, _ in lengths]
    return pack(prompts, [rng.integers(3, VOCABULARY, r) for _, r in lengths], "cpu")


@pytest.mark.parametrize("lengths", [[(1, 1), (2, 5), (3, 0), (1, 8)], [(2, 5), (3, 4), (1, 6)]])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_equal_the_librarys(family: str, lengths: list[tuple[int, int]], kernels: ModuleType):
    plain = tiny_policy(family, torch.float32)
    fused = copy.deepcopy(plain)
    assert fuse_layers(fused.backbone) == len(fused.backbone.layers)
    assert kernels_for(torch.zeros(1)) is kernels
    packed = batch(lengths)
    weight = torch.randn(packed.n_targets, generator=torch.Generator().manual_seed(0))
    results = []
    for policy in (plain, fused):
        logp, _ = policy(packed, temperature=0.8)
        (logp * weight).sum().backward()
        results.append((logp.detach(), {name: p.grad for name, p in policy.named_parameters()}))
    assert_close(results[1][0], results[0][0], atol=1e-5, rtol=1e-5)
    for name, gradient in results[0][1].items():
        # By norm: single entries that nearly cancel differ by more than float32's precision on either side.
        gap = (results[1][1][name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert gap < 2e-5, f"{name}: {gap:.1e}"


def test_float64_runs_the_librarys_own_code():
    plain = tiny_policy("llama")
    fused = copy.deepcopy(plain)
    fuse_layers(fused.backbone)
    packed = batch([(2, 5), (1, 3)])
    assert torch.equal(plain(packed, temperature=1.0)[0], fused(packed, temperature=1.0)[0])


@pytest.mark.parametrize("rows", [1, 3, 512])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_feed_forward_some_rows_at_a_time(rows: int, is_frozen: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_layers, "BLOCK_ROWS", rows)
    mlp = tiny_policy("llama", torch.float32).backbone.layers[0].mlp
    wide = copy.deepcopy(mlp).double()
    mlp.requires_grad_(not is_frozen)
    x, y, grad = torch.randn(3, 7, mlp.hidden_size, generator=torch.Generator().manual_seed(0))
    mine, its = ([x.to(dtype, copy=True).requires_grad_() for x in (x, y)] for dtype in (torch.float32, torch.float64))
    ours, theirs = fused_layers.feed_forward(mlp, *mine), its[0] + wide(its[1])
    ours.backward(grad)
    theirs.backward(grad.double())
    pairs = [(ours, theirs), *((a.grad, b.grad) for a, b in zip(mine, its, strict=True))]
    for mine, its in zip(mlp.parameters(), wide.parameters(), strict=True):
        assert (mine.grad is None) == is_frozen
        pairs += [] if is_frozen else [(mine.grad, its.grad)]
    for got, want in pairs:  # by norm: entries that nearly cancel have fewer digits
        assert (got.double() - want).norm() < 1e-6 * want.norm()


@pytest.mark.parametrize("rows", [255, 256, 257])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_border_products_of_one_input(rows: int, is_frozen: bool):
    """Matrices are transposed from 256 rows on; a frozen one has no gradient, and a bias or hook takes the module."""
    torch.manual_seed(0)
    linears = [torch.nn.Linear(6, n, bias=False) for n in (4, 3, 5)]
    linears[1].requires_grad_(not is_frozen)
    x = torch.randn(rows, 6, requires_grad=True)
    weights = [torch.randn(rows, linear.out_features) for linear in linears]
    results = []
    for products in (fused_layers.projected(x, *linears), [linear(x) for linear in linears]):
        loss = sum((w * p).sum() for w, p in zip(weights, products, strict=True))
        leaves = [leaf for leaf in (x, *(linear.weight for linear in linears)) if leaf.requires_grad]
        results.append([*products, *torch.autograd.grad(loss, leaves)])
    for got, want in zip(*results, strict=True):
        assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_feed_forward_with_a_bias_or_a_hook_is_not_taken_apart():
    assert fused_layers.is_bare(torch.nn.Linear(2, 2, bias=False))
    hooked = torch.nn.Linear(2, 2, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    for linear in (torch.nn.Linear(2, 2), hooked, torch.nn.Identity()):
        assert not fused_layers.is_bare(linear)
