"""A layer as one operation against the same layer under autograd: log-probs and every gradient."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from cuda_attention import stand_in
from dapo.learner.activations import checkpoint_layers
from dapo.models import attention_gradients, fused_layers, whole_layer
from dapo.models.attention_gradients import attention_with_state, of_tokens
from dapo.models.fused_layers import fuse_layers
from dapo.models.kernels.build import library
from dapo.models.packed_attention import attend
from dapo.models.packing import Packed, pack
from dapo.models.policy import Policy, add_lora
from dapo.models.quantized import quantize_linears
from tiny_models import VOCABULARY, tiny_policy


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def batch(*rows: tuple[int, int], is_shared: bool) -> Packed:
    """Rows of (prompt, response) tokens; the last two have one prompt."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, VOCABULARY, p).tolist() for p, _ in rows]
    prompts[-1] = prompts[-2]
    answers = [rng.integers(3, VOCABULARY, r) for _, r in rows]
    return pack(prompts, answers, "cpu", sharing_saves=0.0 if is_shared else None)


SHORT, MIXED = ((2, 5), (1, 8), (4, 3), (4, 6)), ((2, 19), (2, 5), (6, 20), (6, 3))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("rows", [SHORT, MIXED])
def test_attention_and_its_gradients_are_autograds(rows, is_shared: bool, window: int | None):
    packed = batch(*rows, is_shared=is_shared)
    parts = [torch.randn(packed.n_tokens, heads, 8, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
    grad = torch.randn_like(parts[0])
    wanted = attend(*parts, packed, scaling=0.3, window=window)
    wanted.backward(grad)
    q, k, v = (part.detach() for part in parts)
    cells, *state = attention_with_state(q, k, v, packed, 0.3, window)
    assert_close(of_tokens(cells, packed), wanted.detach(), atol=1e-12, rtol=0)
    found = attention_gradients.attention_gradients(grad, q, k, v, cells, state, packed, 0.3, window)
    for got, part in zip(found, parts, strict=True):
        assert_close(got, part.grad, atol=1e-12, rtol=0)


def learned(policy: Policy, packed: Packed) -> dict[str, Tensor]:
    policy.zero_grad()
    logp, entropy = policy(packed, temperature=0.8)
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
    return {"logp": logp.detach(), "entropy": entropy} | {
        name: p.grad for name, p in policy.named_parameters() if p.grad is not None
    }


def count(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[int]:
    calls: list[int] = []
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    return calls


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize(("n_recomputed", "keeps"), [(0, False), (1, True), (2, True), (2, False)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-window"])
def test_a_model_of_whole_layers_says_and_learns_the_same(
    family: str, n_recomputed: int, keeps: bool, monkeypatch: pytest.MonkeyPatch
):
    plain = tiny_policy(family, torch.float32)
    for parameter in plain.parameters():  # biases and norms too
        torch.nn.init.normal_(parameter, mean=0.3 * (parameter.ndim == 1), std=0.3)
    whole = copy.deepcopy(plain)
    assert fuse_layers(whole.backbone) == 2
    checkpoint_layers(whole, n_recomputed, keeps_attention=keeps)
    attended = [count(monkeypatch, attention_gradients, name) for name in ("flash_forward", "cudnn_forward")]
    layers = count(monkeypatch, fused_layers, "whole_layer")
    again = count(monkeypatch, whole_layer, "recomputed")
    for packed in (batch(*SHORT, is_shared=True), batch(*MIXED, is_shared=False)):
        expected, got = learned(plain, packed), learned(whole, packed)
        assert expected.keys() == got.keys()
        for name in expected:
            error = (got[name] - expected[name]).norm() / expected[name].norm()
            assert error < 2e-5, f"{name}: {error}"
    assert (len(layers), len(again)) == (4, 2 * n_recomputed)
    # Once per span of sequences, layer and pass, and once more where nothing of it was kept; a window has one span.
    times = 1 if keeps or not n_recomputed else 2
    assert [len(calls) for calls in attended] == [times * n for n in ([4, 0] if "window" in family else [6, 4])]


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_gradients_of_matrices_are_added_to_their_masters(family: str):
    policy = tiny_policy(family, torch.float32)
    fuse_layers(policy.backbone)
    packed = [batch(*rows, is_shared=False) for rows in (SHORT, MIXED)]
    wanted = [learned(policy, one) for one in packed]
    masters = {name: p for name, p in policy.backbone.layers.named_parameters() if p.ndim == 2}
    assert len(masters) == 2 * 7
    for weights in masters.values():
        weights.master = torch.nn.Parameter(weights.detach().clone())  # as the optimizer of 16-bit weights
    got = [learned(policy, one) for one in packed]
    for name, weights in masters.items():
        full = f"model.model.layers.{name}"
        assert full not in got[1]  # its own gradient would be added a second time
        assert_close(weights.master.grad, wanted[0][full] + wanted[1][full])
    for name in got[1]:
        assert_close(got[1][name], wanted[1][name])


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
def test_frozen_weights_have_no_gradient():
    policy = tiny_policy("qwen2", torch.float32)
    fuse_layers(policy.backbone)
    packed = batch(*SHORT, is_shared=False)
    wanted = learned(policy, packed)
    with torch.no_grad():
        assert torch.equal(policy(packed, temperature=0.8)[0], wanted["logp"])
    for parameter in policy.backbone.layers.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    got = learned(policy, packed)
    assert not any(".layers." in name for name in got)
    assert_close(got["model.model.embed_tokens.weight"], wanted["model.model.embed_tokens.weight"])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("what", ["adapter", "quantized", "hook", "hook of v", "bias", "dropout"])
def test_a_layer_that_is_more_than_its_matrices_is_left_to_autograd(what: str, monkeypatch: pytest.MonkeyPatch):
    policy = tiny_policy("qwen2", torch.float32)
    if what == "adapter":
        add_lora(policy, 4, 8.0)
    if what == "quantized":
        quantize_linears(policy.base, policy.head, "int8", "cpu")
    fuse_layers(policy.backbone)
    layer = policy.backbone.layers[1]
    if what == "hook":
        layer.mlp.up_proj.register_forward_hook(lambda *_: None)
    if what == "hook of v":
        layer.self_attn.v_proj.register_forward_hook(lambda *_: None)
    if what == "bias":
        layer.self_attn.o_proj.bias = torch.nn.Parameter(torch.zeros(len(layer.self_attn.o_proj.weight)))
    if what == "dropout":
        layer.self_attn.train()
        layer.self_attn.attention_dropout = 0.1
    whole = count(monkeypatch, fused_layers, "whole_layer")
    policy(batch(*SHORT, is_shared=False), temperature=1.0)
    assert len(whole) == (0 if what in ("adapter", "quantized") else 1)  # the other layer is as it was


def test_a_cpu_float32_and_a_large_head_are_left_to_autograd(monkeypatch: pytest.MonkeyPatch):
    x = torch.zeros(2, 8)
    assert not attention_gradients.has_state(x, 64)
    assert not attention_gradients.has_state(x.bfloat16(), 64)
    monkeypatch.setattr(attention_gradients, "runs_flash", lambda *_: True)
    assert [attention_gradients.has_state(x, size) for size in (64, 128, 256)] == [True, True, False]


@pytest.mark.usefixtures("kernels")
def test_without_cudnn_long_sequences_go_with_the_others(monkeypatch: pytest.MonkeyPatch):
    packed = batch(*MIXED, is_shared=True)
    q, k, v = (torch.randn(packed.n_tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    wanted = attention_with_state(q, k, v, packed, 0.3, None)[0]
    monkeypatch.setattr(attention_gradients, "cudnn_can", lambda *_: False)
    monkeypatch.setattr(attention_gradients, "cudnn_forward", lambda *_, **__: pytest.fail("there is none"))
    assert_close(attention_with_state(q, k, v, packed, 0.3, None)[0], wanted, atol=1e-12, rtol=0)


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("rows", [SHORT, MIXED])
def test_what_is_kept_of_attention_is_its_result_once(rows):
    """Numbers per token of a layer, beyond the weights: the input, what attention gave in cells, and its sums."""
    policy = tiny_policy("llama", torch.float32)
    fuse_layers(policy.backbone)
    packed = batch(*rows, is_shared=True)
    weights = {p.data_ptr() for p in policy.parameters()}
    n = {}
    for keeps in (True, False):
        checkpoint_layers(policy, keeps_attention=keeps)
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.update({x.data_ptr(): x.untyped_storage().nbytes() // 4}) or x, lambda x: x
        ):
            policy(packed, temperature=1.0)
        n[keeps] = sum(size for place, size in kept.items() if place not in weights)
    config, cells = policy.config, sum(packed.sequence_lengths)
    result, sums = config.num_attention_heads * config.head_dim, config.num_attention_heads
    padding = 2 * 8 * (result + sums)  # of two long sequences to the next multiple of 8
    assert 2 * cells * result <= n[True] - n[False] <= 2 * (cells * (result + sums) + padding)
