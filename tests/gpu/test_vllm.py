"""vLLM on CUDA, its graphs captured: weights arrive in them, and log-probs are the trainer's up to bfloat16."""

import copy
import importlib.util

import numpy as np
import pytest
import torch

from dapo.models.policy import Policy
from dapo.rollout.engine import SamplingParams
from dapo.rollout.vllm.engine import VllmEngine
from engine_requests import by_id, drain, gap, logp_by_training_forward, request, same, shaken, small_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        (spec := importlib.util.find_spec("vllm")) is None or spec.origin is None, reason="vllm is not installed"
    ),
]
# Heads of 64 and logits of a few units: bfloat16 keeps 8 bits, and rounds a logit of 4 by up to 0.016.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.06}
TOLERANCE = 2e-2
TEMPERATURE = 0.8


def wide_policy(family: str) -> Policy:
    changes = WIDE | ({"head_dim": 64} if "qwen3" in family else {})
    return small_policy(family, torch.bfloat16, **changes).cuda()


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2-tied", "qwen3"])
def test_log_probs_and_weight_updates_on_cuda(family: str):
    """One engine a family: starting takes a minute, most of it for compiling and capturing."""
    policy = wide_policy(family)
    weights = {0: copy.deepcopy(policy)}
    ours = VllmEngine(
        policy,
        sampling=SamplingParams(temperature=TEMPERATURE),
        max_concurrent=16,
        max_tokens=128,
        memory_fraction=0.1,
    )
    try:
        requests = [request(i, n_prompt=70) for i in range(24)]
        ours.submit(requests)
        before = drain(ours)
        assert gap(policy, before, TEMPERATURE) < TOLERANCE
        assert gap(policy, before, 1.0) > 2 * TOLERANCE, "the temperature does not show"

        shaken(policy)
        weights[1] = copy.deepcopy(policy)
        assert gap(policy, before, TEMPERATURE) > 5 * TOLERANCE, "the update is too small to show"
        ours.load_weights(policy, version=1)
        ours.submit(requests)
        after = drain(ours)
        assert gap(policy, after, TEMPERATURE) < TOLERANCE
        first, second = by_id(before), by_id(after)
        long = [i for i in first if len(first[i].tokens) >= 8]  # one of two tokens may come out again by chance
        assert len(long) >= 8
        assert not any(same(first[i], second[i]) for i in long)

        # In flight: every token by the weights of its version.
        ours.submit([request(i, max_new_tokens=40, n_prompt=40) for i in range(20)])
        finished = [item for _ in range(8) for item in ours.advance()]
        shaken(policy, seed=2)
        weights[2] = copy.deepcopy(policy)
        ours.load_weights(policy, version=2)
        finished += drain(ours)
        assert sorted(by_id(finished)) == list(range(20))
        gaps: dict[int, list[np.ndarray]] = {1: [], 2: []}
        for item in finished:
            for version, found in gaps.items():
                expected = logp_by_training_forward(weights[version], item, TEMPERATURE)
                found.append(np.abs(item[1].logp - expected)[item[1].version == version])
        for version, found in gaps.items():
            assert np.concatenate(found).mean() < TOLERANCE, f"tokens of version {version}"

        # The same requests in the same order: the same tokens.
        twice = []
        for _ in range(2):
            ours.load_weights(policy, version=2)
            ours.submit(requests)
            twice.append(by_id(drain(ours)))
        n_same = sum(same(twice[0][i], twice[1][i]) for i in twice[0])
        print(f"{family}: {n_same} of {len(requests)} responses repeat; gap {gap(policy, after, TEMPERATURE):.2g}")
    finally:
        ours.close()
