"""The packed forward is the library's own forward on each sequence alone: values and gradients, every family."""

from collections.abc import Callable
from itertools import pairwise
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from dapo.models.critic import Critic
from dapo.models.packing import Gather, pack, take
from dapo.models.policy import Policy
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
    assert packed.input_ids.tolist() == [5, 6, 8, 7, 10, 11]  # nobody asks what follows 9 and 12
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert packed.cu_seqlens.tolist() == [0, 3, 6]
    assert packed.targets.tolist() == [8, 9, 10, 11, 12]
    assert packed.target_index.tolist() == [1, 2, 3, 4, 5]
    assert packed.lengths == (2, 3)
    assert [part.tolist() for part in packed.split(packed.targets)] == [[8, 9], [10, 11, 12]]


def test_neighbours_share_their_prompt():
    rows = [([5, 6], [8, 9]), ([5, 6], [10, 11, 12]), ([5, 6], []), ([7], [13]), ([5, 6], [14]), ([5, 6], [15])]
    packed = pack([prompt for prompt, _ in rows], [response for _, response in rows], "cpu")
    #                                       0  1  2  3   4   5  6  7
    assert packed.input_ids.tolist() == [5, 6, 8, 10, 11, 7, 5, 6]
    assert packed.position_ids.tolist() == [0, 1, 2, 2, 3, 0, 0, 1]
    assert packed.targets.tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert packed.target_index.tolist() == [1, 2, 1, 3, 4, 5, 7, 7]
    assert packed.sequence_lengths == (3, 4, 2, 1, 2, 2)
    assert packed.cu_seqlens.tolist() == [0, 3, 7, 9, 10, 12, 14]
    shared = packed.shared
    assert shared is not None
    assert shared.cells.source.tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 1, 5, 6, 7, 6, 7]
    assert shared.home.tolist() == [0, 1, 2, 5, 6, 9, 10, 11]
    assert shared.borrowed == (0, 2, 2, 0, 0, 2)
    assert packed.sequences.edge.tolist() == [0, 3, 4, 6]


def test_what_saves_too_little_is_not_shared():
    prompts, responses = [[5, 6, 7]] * 2, [list(range(10, 40)), list(range(10, 30))]
    assert pack(prompts, responses, "cpu").shared is None  # 3 of 54
    assert pack(prompts, responses, "cpu", sharing_saves=0.05).shared is not None
    assert pack([[5], [6]], [[7], [8]], "cpu", sharing_saves=0).shared is None  # nothing to share


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.sampled_from([torch.float64, torch.bfloat16]))
def test_rows_taken_several_times_get_the_sum_of_their_gradients(source: list[int], dtype: torch.dtype):
    x = torch.randn(7, 3, dtype=dtype, requires_grad=True)
    taken = take(x, Gather.of(np.array(source), 7, "cpu"))
    assert torch.equal(taken, x[torch.tensor(source)])
    grad = torch.randn(len(source), 3, dtype=dtype)
    taken.backward(grad)
    wanted = torch.zeros(7, 3, dtype=torch.float64).index_add_(0, torch.tensor(source), grad.double())
    assert_close(
        x.grad,
        wanted.to(dtype),
        atol=1e-12 if dtype == torch.float64 else 0,
        rtol=1e-2 if dtype != torch.float64 else 0,
    )


def grouped(seed: int = 2) -> tuple[list[list[int]], list[np.ndarray]]:
    """Groups of 3, 1 and 4 rows with a prompt each; responses of 0, 1 and more tokens."""
    rng = np.random.default_rng(seed)
    groups = [(5, (9, 1, 0)), (1, (4,)), (12, (1, 17, 3, 3))]
    prompts, responses = [], []
    for n_prompt, lengths in groups:
        prompt = rng.integers(3, VOCABULARY, n_prompt).tolist()
        prompts += [list(prompt) for _ in lengths]
        responses += [rng.integers(3, VOCABULARY, n).astype(np.int32) for n in lengths]
    return prompts, responses


def test_buckets_hold_every_token_once_and_bring_it_home():
    prompts, responses = ragged()
    packed = pack(prompts, responses, "cpu")
    buckets, home = packed.buckets
    cells = torch.cat([bucket.source for bucket in buckets])
    assert cells[home].tolist() == list(range(packed.n_tokens))
    assert len(cells) < 1.4 * packed.n_tokens


def norms_in_float64(policy: Policy) -> Policy:
    """The library's norms work in float32, where the gradient of a sum is not the sum of the gradients."""

    def forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
        return norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

    for module in policy.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(forward, module)
    return policy


@pytest.mark.parametrize("rows", [ragged, grouped])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone_in_values_and_gradients(family: str, rows: Callable[[], Any]):
    policy = norms_in_float64(tiny_policy(family))
    prompts, responses = rows()
    packed = pack(prompts, responses, "cpu")
    assert (packed.shared is not None) == (rows is grouped)
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


@pytest.mark.parametrize("rows", [ragged, grouped])
def test_gradient_checkpointing_changes_nothing(rows: Callable[[], Any]):
    policy = tiny_policy("qwen3")
    packed = pack(*rows(), "cpu")
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


def test_plain_calls_of_the_model_keep_the_librarys_masks():
    policy = tiny_policy("llama")
    ids = torch.tensor([[0, 0, 5, 6, 7]])
    padded = policy.model(input_ids=ids, attention_mask=ids != 0, position_ids=torch.tensor([[0, 0, 0, 1, 2]]))
    plain = policy.model(input_ids=ids[:, 2:])
    assert_close(padded.logits[:, 2:], plain.logits, atol=1e-10, rtol=0)


@pytest.mark.parametrize("rows", [ragged, grouped])
def test_critic_starts_at_zero_and_reads_the_state_before_each_token(rows: Callable[[], Any]):
    critic = Critic(tiny_policy("llama").model.model)
    prompts, responses = rows()
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


# ------------------------------------------------------------------ borders


@settings(max_examples=40)
@given(st.lists(st.sampled_from([1, 3, 4, 5, 8, 74, 75, 76, 100]), min_size=1, max_size=12))
def test_border_every_cell_lies_in_one_bucket_of_similar_lengths(lengths: list[int]):
    """A sequence of 3/4 of the longest shares its bucket, a shorter one does not."""
    packed = pack([[5]] * len(lengths), [list(range(n)) for n in lengths], "cpu", sharing_saves=None)
    buckets, home = packed.buckets
    if home is None:
        assert len(set(lengths)) == 1
        return
    cells = torch.cat([bucket.source for bucket in buckets])
    assert cells[home].tolist() == list(range(packed.n_tokens))
    in_bucket = [
        len(set(bucket.source.view(bucket.rows, -1)[row].tolist())) for bucket in buckets for row in range(bucket.rows)
    ]
    assert sorted(in_bucket) == sorted(lengths)
    for bucket in buckets:
        rows = [len(set(row.tolist())) for row in bucket.source.view(bucket.rows, bucket.length)]
        assert max(rows) == bucket.length
        assert min(rows) >= 0.75 * bucket.length
    assert all(shorter.length < 0.75 * bucket.length for bucket, shorter in pairwise(buckets))


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=8),
    saves=st.sampled_from([None, 0.0, 1 / 16]),
)
def test_border_every_row_keeps_its_own_prompt_and_response(rows: list[tuple[int, int]], saves: float | None):
    """Prompts of 1, 2 and 3 tokens, shared by neighbours or not; responses of 0, 1 and more tokens."""
    prompts = [list(range(3, 4 + p)) for p, _ in rows]
    responses = [[100 * i + t for t in range(n)] for i, (_, n) in enumerate(rows)]
    packed = pack(prompts, responses, "cpu", sharing_saves=saves)
    assert [part.tolist() for part in packed.split(packed.targets)] == responses
    cells = packed.input_ids if packed.shared is None else packed.input_ids[packed.shared.cells.source]
    wanted = [prompt + response[:-1] for prompt, response in zip(prompts, responses, strict=True)]
    assert [part.tolist() for part in cells.split(list(packed.sequence_lengths))] == wanted
    before = packed.input_ids[packed.target_index].tolist()
    assert before == [token for p, r in zip(prompts, responses, strict=True) for token in (p[-1:] + r)[: len(r)]]
