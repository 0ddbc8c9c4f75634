"""A layer as one operation on a GPU: flash attention's and cuDNN's own gradients, called by hand, in bf16."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dapo.learner.activations import checkpoint_layers
from dapo.learner.optimizer import Optimizer
from dapo.models import fused_layers, whole_layer
from dapo.models.fused_layers import fuse_layers
from dapo.models.packed_attention import PACKED_ATTENTION
from dapo.models.packing import Packed, pack
from dapo.models.policy import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
VOCABULARY = 1000


def policy(family: str) -> Policy:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, hidden_size=384, intermediate_size=512, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, vocab_size=VOCABULARY, max_position_embeddings=8192, eos_token_id=2,
        initializer_range=0.06, **({"sliding_window": 100} if family == "mistral" else {}),
    )  # fmt: skip
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION)
    return Policy(model, None).eval()


def batch(kind: str) -> Packed:
    rng = np.random.default_rng(1)
    rows = {"short": [(40, 200), (40, 77), (9, 300)], "long": [(30, 3000), (30, 100), (5, 2200)]}[kind]
    prompts = [rng.integers(3, VOCABULARY, n).tolist() for n, _ in rows]
    prompts[1] = prompts[0]
    return pack(prompts, [rng.integers(3, VOCABULARY, n) for _, n in rows], "cuda", sharing_saves=0.0)


def learned(model: Policy, packed: Packed) -> dict[str, Tensor]:
    model.zero_grad()
    logp, _ = model(packed, temperature=1.0)
    (logp * torch.linspace(-1, 1, len(logp), device="cuda")).sum().backward()
    return {"logp": logp.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def remember(monkeypatch: pytest.MonkeyPatch, name: str) -> list[list[Tensor]]:
    """The tensors that a part of the layer gives from now on, call by call."""
    calls: list[list[Tensor]] = []
    real = getattr(whole_layer, name)

    def remembering(*args: object) -> object:
        made = real(*args)
        calls.append([tensor for tensor in tree_leaves(made) if tensor is not None])
        return made

    monkeypatch.setattr(whole_layer, name, remembering)
    return calls


def error(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Root mean square over log-probs and all gradients of each one's relative distance."""
    each = [float((ours[name].double() - exact[name].double()).norm() / exact[name].double().norm()) for name in exact]
    return float(np.sqrt(np.mean(np.square(each))))


@pytest.mark.parametrize("kind", ["short", "long"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_it_is_as_exact_as_autograd_and_recomputing_changes_no_bit(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
):
    model, packed = policy(family), batch(kind)
    exact = learned(copy.deepcopy(model).float(), packed)
    fuse_layers(model.backbone)
    whole = learned(model, packed)
    by_chance = max(error(learned(model, packed), whole) for _ in range(4))  # attention's are summed by atomics
    for keeps_attention in (True, False):
        again = copy.deepcopy(model)
        checkpoint_layers(again, keeps_attention=keeps_attention)
        with monkeypatch.context() as patched:
            made = [remember(patched, name) for name in ("attention_inputs", "feed_forward_inputs")]
            recomputed = learned(again, packed)
        assert torch.equal(whole["logp"], recomputed["logp"])
        for calls in made:  # three layers forward, then the same three from the last to the first
            assert len(calls) == 6
            for forward, repeated in zip(calls[:3], reversed(calls[3:]), strict=True):
                assert all(torch.equal(*pair) for pair in zip(forward, repeated, strict=True))
        assert error(recomputed, whole) <= max(2 * by_chance, 2**-8)
    monkeypatch.setattr(fused_layers, "can_be_whole", lambda *_: False)
    by_autograd = learned(model, packed)
    assert error(whole, exact) <= 1.1 * error(by_autograd, exact)


def test_gradients_of_two_micro_batches_add_up_in_float32():
    model, packed = policy("qwen2"), [batch("short"), batch("long")]
    fuse_layers(model.backbone)
    each = [learned(model, one) for one in packed]
    rounded = {name: each[0][name].float() + each[1][name].float() for name in each[0] if name != "logp"}
    exact = [learned(copy.deepcopy(model).float(), one) for one in packed]
    exact = {name: exact[0][name] + exact[1][name] for name in rounded}
    model.zero_grad()
    optimizer = Optimizer(model.named_parameters(), betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0)
    for one in packed:
        logp, _ = model(one, temperature=1.0)
        (logp * torch.linspace(-1, 1, len(logp), device="cuda")).sum().backward()
    summed = {name: master.grad for name, master in optimizer.masters.items()}
    assert all(p.grad is None for p in model.parameters())
    assert {grad.dtype for grad in summed.values()} == {torch.float32}
    assert error(summed, rounded) < 5e-3  # of bfloat16's rounding
    assert error(summed, exact) <= 1.01 * error(rounded, exact)
