"""Recomputed layers: the same gradients whatever their number, and as few of them as the memory asks for."""

import copy

import numpy as np
import pytest
import torch

from dapo.config.model_shapes import BENCH_SHAPES, shape_from_config
from dapo.learner import activations
from dapo.learner.activations import checkpoint_layers, fit_layers
from dapo.models.critic import Critic
from dapo.models.packing import pack
from dapo.planning.plan import layer_bytes, layers_to_checkpoint
from tiny_models import tiny_policy


def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    packed = pack([[5, 6], [7]], [rng.integers(3, 40, 6), rng.integers(3, 40, 3)], "cpu")
    module.zero_grad()
    result = module(packed) if isinstance(module, Critic) else module(packed, temperature=1.0)[0]
    result.sum().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("n", [0, 1, 2, None])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_recomputed_layers_give_the_same_gradients(family: str, n: int | None):
    policy = tiny_policy(family, torch.float64, attention_dropout=0.5)
    expected = gradients(policy)
    calls = []
    for layer in policy.backbone.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    assert checkpoint_layers(policy, n) == (2 if n is None else n)
    assert all(torch.equal(a, b) for a, b in zip(gradients(policy), expected, strict=True))
    assert len(calls) == 2 + (2 if n is None else n)  # recomputed layers ran twice


def test_the_critic_recomputes_too():
    critic = Critic(copy.deepcopy(tiny_policy("llama", torch.float64).backbone))
    torch.nn.init.normal_(critic.value_head.weight)
    expected = gradients(critic)
    assert checkpoint_layers(critic) == 2
    assert all(torch.equal(a, b) for a, b in zip(gradients(critic), expected, strict=True))


@pytest.mark.parametrize("keeps_attention", [False, True])
def test_no_more_layers_recompute_than_memory_asks_for(keeps_attention: bool):
    shape, tokens = BENCH_SHAPES["1.5b"], 16_384
    layer = tokens * layer_bytes(shape, 2, is_fused=True)
    kept = tokens * (2 * 1536 + keeps_attention * (2 * 1536 + 4 * 12))  # the input; what attention gave, and its sums

    def n(room: int) -> int | None:
        return layers_to_checkpoint(shape, tokens, room, weight=2, is_fused=True, keeps_attention=keeps_attention)

    assert n(28 * layer) == 0
    # One recomputed layer saves nothing yet: it needs the room of a whole layer while it is recomputed.
    assert n(28 * layer - 1) == 2
    assert n(20 * layer + 9 * kept) == 9
    assert n(layer + 28 * kept) == 28
    assert n(layer + 28 * kept - 1) is None


@pytest.mark.parametrize(
    ("room", "recomputed", "keeps"),
    [(10**15, 0, True), ("some", 2, True), ("attention", 2, True), ("input", 2, False), (0, 2, False)],
)
def test_attention_is_kept_where_it_fits(room, recomputed: int, keeps: bool, monkeypatch: pytest.MonkeyPatch):
    policy = tiny_policy("llama", torch.float32)
    shape = shape_from_config(policy.backbone.config.to_dict())
    layer, of_input = layer_bytes(shape, 4, is_fused=True), 4 * shape.hidden
    of_attention = of_input + shape.heads * (4 * shape.head_size + 4)
    rooms = {"some": 2 * layer - 1, "attention": layer + 2 * of_attention, "input": layer + 2 * of_input}
    free = (100 * rooms.get(room, room) + 7 + activations.HEAD_BYTES) / (1 - activations.KEPT_FREE)
    monkeypatch.setattr(activations, "device_memory", lambda _: (int(free) + 2, 0))
    monkeypatch.setattr(activations.torch, "empty", lambda *_, **__: torch.zeros(0))
    monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
    for can_keep in (True, False):
        monkeypatch.setattr(activations, "recomputes_itself", lambda *_, can=can_keep: can)
        assert fit_layers(policy, 100, bytes_to_come=7, is_fused=True) == recomputed
        assert [layer.keeps_attention for layer in policy.backbone.layers] == [keeps and can_keep] * 2


def test_on_a_cpu_auto_recomputes_nothing():
    policy = tiny_policy("llama", torch.float32)
    checkpoint_layers(policy)
    assert fit_layers(policy, 100, bytes_to_come=0, is_fused=False) == 0
    assert not any(layer.gradient_checkpointing for layer in policy.backbone.layers)


@pytest.mark.parametrize("n_layers", [0, 1])
def test_a_policy_that_recomputes_says_so_to_its_head(n_layers: int, monkeypatch: pytest.MonkeyPatch):
    policy, said = tiny_policy("llama", torch.float32), []
    checkpoint_layers(policy, n_layers)
    monkeypatch.setattr(
        "dapo.models.policy.linear_logprobs", lambda *_, is_short_of_memory, **__: said.append(is_short_of_memory)
    )
    policy(pack([[1, 2]], [[3, 4]], "cpu"), temperature=1.0)
    assert said == [n_layers > 0]
