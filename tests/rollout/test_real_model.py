"""A real model on a CPU: greedy tokens are Hugging Face's, log-probs the training forward's.

DAPO_REAL_MODEL=FOLDER pytest tests/rollout/test_real_model.py, with SmolLM2-135M-Instruct in float32 for instance.
"""

import os

import numpy as np
import pytest
import torch

from dapo.models.load import load_policy
from dapo.models.packing import pack
from dapo.rollout.engine import NoiseKey, Request, SamplingParams
from dapo.rollout.local.engine import LocalEngine

FOLDER = os.environ.get("DAPO_REAL_MODEL", "")
NEW_TOKENS = 24
THINGS = ("apples", "stones", "ships", "letters", "candles", "coins", "horses", "stars")


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="DAPO_REAL_MODEL names no model folder")
def test_sixty_four_prompts():
    policy = load_policy(FOLDER, dtype=torch.float32, device="cpu")
    texts = [f"Question {i}: {i} {THINGS[i % 8]} and {i * 7 % 13} more make" for i in range(64)]
    prompts = [tuple(policy.tokenizer(text).input_ids) for text in texts]
    engine = LocalEngine(policy, sampling=SamplingParams(temperature=0.0), max_concurrent=64, max_tokens=128)
    keys = [NoiseKey(0, "eval", str(i), 0, 0) for i in range(64)]
    engine.submit([Request(i, prompt, keys[i], NEW_TOKENS, i) for i, prompt in enumerate(prompts)])
    done = {}
    while engine.n_in_flight or engine.n_waiting:
        done |= {request.id: completion for request, completion in engine.advance()}
    with torch.no_grad():
        for i, prompt in enumerate(prompts):
            ids = torch.tensor([prompt])
            theirs = policy.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
            )[0, len(prompt) :].tolist()
            ours = done[i].tokens.tolist()
            if ours == theirs:
                continue
            at = next(k for k, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
            logits = policy.model(torch.tensor([[*prompt, *ours[:at]]])).logits[0, -1]
            assert abs(float(logits[ours[at]] - logits[theirs[at]])) < 1e-4, f"prompt {i} differs at {at}, not by a tie"
        logp = policy(pack(prompts, [done[i].tokens for i in range(64)], "cpu"), temperature=1.0)[0].numpy()
    gap = np.abs(logp - np.concatenate([done[i].logp for i in range(64)]))
    print(f"log-prob difference: mean {gap.mean():.2g}, p99 {np.quantile(gap, 0.99):.2g}, max {gap.max():.2g}")
    assert gap.mean() <= 1e-5
