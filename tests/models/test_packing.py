"""The packed forward is the library's own forward on each sequence alone: values and gradients, every family."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from dapo.models.critic import Critic
from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.models.recompute import recompute_activations
from tiny_models import FAMILIES, VOCABULARY, tiny_policy


def ragged(seed: int = 1) -> tuple[list[list[int]], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    lengths = [(1, 1), (4, 9), (7, 2), (3, 10), (2, 30), (5, 0)]
    prompts = [rng.integers(3, VOCABULARY, p).tolist() for p, _ in lengths]
    return prompts, [rng.integers(3, VOCABULARY, r).astype(np.int32) for _, r in lengths]


def alone(policy: Policy, prompt: list[int], response: np.ndarray, temperature: float) -> tuple[torch.Tensor, ...]:
    """log-probs and entropies of a response by the library's own forward, one sequence, no packing."""
    ids = torch.tensor([[*prompt, *response.tolist()]])
    logits = policy.model(input_ids=ids, use_cache=False).logits[0] / temperature
    logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logp.gather(-1, ids[0, len(prompt) :, None])[:, 0], -(logp.exp() * logp).sum(-1)


def test_targets_are_the_response_tokens_and_their_index_is_one_before():
    packed = pack([[5, 6], [7]], [[8, 9], [10, 11, 12]], "cpu")
    assert packed.input_ids.tolist() == [5, 6, 8, 9, 7, 10, 11, 12]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert packed.cu_seqlens.tolist() == [0, 4, 8]
    assert packed.targets.tolist() == [8, 9, 10, 11, 12]
    assert packed.input_ids[packed.target_index + 1].tolist() == packed.targets.tolist()
    assert packed.lengths == (2, 3)
    assert [part.tolist() for part in packed.split(packed.targets)] == [[8, 9], [10, 11, 12]]


def test_buckets_hold_every_token_once_and_bring_it_home():
    prompts, responses = ragged()
    packed = pack(prompts, responses, "cpu")
    buckets, home = packed.buckets
    cells = torch.cat([bucket.source for bucket in buckets])
    assert cells[home].tolist() == list(range(packed.n_tokens))
    assert len(cells) < 1.4 * packed.n_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone_in_values_and_gradients(family: str):
    policy = tiny_policy(family)
    prompts, responses = ragged()
    packed = pack(prompts, responses, "cpu")
    weight = torch.randn(packed.n_targets, dtype=torch.float64)

    logp, entropy = policy(packed, temperature=0.7)
    (logp * weight).sum().backward()
    got = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()

    one_by_one = [alone(policy, p, r, 0.7) for p, r in zip(prompts, responses, strict=True)]
    (torch.cat([row[0] for row in one_by_one]) * weight).sum().backward()

    assert_close(logp, torch.cat([row[0] for row in one_by_one]), atol=1e-10, rtol=0)
    assert_close(entropy, torch.cat([row[1] for row in one_by_one]), atol=1e-10, rtol=0)
    for name, parameter in policy.named_parameters():
        assert_close(got[name], parameter.grad, atol=1e-10, rtol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def test_a_token_of_one_sequence_never_reaches_another():
    policy = tiny_policy("mistral-window")
    prompts, responses = ragged()
    before = pack(prompts, responses, "cpu")
    first = before.split(policy(before, temperature=1.0)[0])
    responses[1] = responses[1][::-1].copy()
    after = pack(prompts, responses, "cpu")
    second = after.split(policy(after, temperature=1.0)[0])
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a, b) == (i != 1)


def test_gradient_checkpointing_changes_nothing():
    policy = tiny_policy("qwen3")
    packed = pack(*ragged(), "cpu")
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            policy.model.gradient_checkpointing_enable()
            policy.train()
        policy.zero_grad()
        policy(packed, temperature=1.0)[0].sum().backward()
        gradients.append([parameter.grad.clone() for parameter in policy.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert_close(plain, checkpointed, atol=1e-12, rtol=1e-12)


def test_gradient_checkpointing_of_the_critic_recomputes_and_changes_nothing():
    critic = Critic(tiny_policy("qwen3").model.model)
    nn.init.normal_(critic.value_head.weight)
    packed = pack(*ragged(), "cpu")
    calls, found = [], []
    critic.backbone.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for checkpointing, passes in ((False, 1), (True, 2)):  # the second pass through a layer is the backward one's own
        if checkpointing:
            recompute_activations(critic, critic.backbone)
        critic.zero_grad()
        calls.clear()
        value = critic(packed)
        value.square().sum().backward()
        assert len(calls) == passes
        found.append([value.detach(), *(parameter.grad.clone() for parameter in critic.parameters())])
    for plain, checkpointed in zip(*found, strict=True):
        assert_close(plain, checkpointed, atol=1e-12, rtol=1e-12)


def test_plain_calls_of_the_model_keep_the_librarys_masks():
    policy = tiny_policy("llama")
    ids = torch.tensor([[0, 0, 5, 6, 7]])
    padded = policy.model(input_ids=ids, attention_mask=ids != 0, position_ids=torch.tensor([[0, 0, 0, 1, 2]]))
    plain = policy.model(input_ids=ids[:, 2:])
    assert_close(padded.logits[:, 2:], plain.logits, atol=1e-10, rtol=0)


def test_critic_starts_at_zero_and_reads_the_state_before_each_token():
    critic = Critic(tiny_policy("llama").model.model)
    prompts, responses = ragged()
    packed = pack(prompts, responses, "cpu")
    assert not critic(packed).any()

    torch.nn.init.normal_(critic.value_head.weight)
    value = packed.split(critic(packed))
    for prompt, response, got in zip(prompts, responses, value, strict=True):
        ids = torch.tensor([[*prompt, *response.tolist()]])
        hidden = critic.backbone(input_ids=ids).last_hidden_state[0]
        expected = hidden @ critic.value_head.weight[0]
        assert_close(got, expected[len(prompt) - 1 : -1], atol=1e-10, rtol=0)
    # The value of the first state does not know the response.
    changed = pack(prompts, [np.roll(response, 1) for response in responses], "cpu")
    for a, b in zip(value, changed.split(critic(changed)), strict=True):
        assert_close(a[:1], b[:1], atol=1e-12, rtol=0)
