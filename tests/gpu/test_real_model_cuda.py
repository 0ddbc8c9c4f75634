"""Real weights in bf16: the engine's log-probs are as near to the trainer's as two attentions of Hugging Face are.

DAPO_REAL_MODEL=FOLDER pytest -s tests/gpu/test_real_model_cuda.py, with Qwen2.5-Coder-1.5B-Instruct for instance.
"""

import os

import numpy as np
import pytest
import torch

from dapo.models.load import load_policy
from dapo.models.packing import pack
from dapo.rollout.engine import Finished, NoiseKey, Request, SamplingParams
from dapo.rollout.local.engine import LocalEngine

FOLDER = os.environ.get("DAPO_REAL_MODEL", "")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(not FOLDER, reason="DAPO_REAL_MODEL names no model folder"),
]
THINGS = ("apples", "stones", "ships", "letters", "candles", "coins", "horses", "stars")
NEW_TOKENS = 400


def questions(tokenizer: object, n: int) -> list[tuple[int, ...]]:
    texts = [
        f"A box holds {3 + i} {THINGS[i % 8]}. {2 + i % 5} such boxes arrive and {i % 7} {THINGS[i % 8]} are lost. "
        "How many are left? Explain step by step."
        for i in range(n)
    ]
    said = [[{"role": "user", "content": text}] for text in texts]
    return [
        tuple(tokenizer.apply_chat_template(s, add_generation_prompt=True, tokenize=True, return_dict=False))
        for s in said
    ]


def write(policy: object, prompts: list[tuple[int, ...]]) -> list[Finished]:
    engine = LocalEngine(policy, sampling=SamplingParams(), max_concurrent=64, max_tokens=NEW_TOKENS + 200)
    engine.submit(
        [Request(i, prompt, NoiseKey(0, "train", str(i), 0, 0), NEW_TOKENS, i) for i, prompt in enumerate(prompts)]
    )
    finished: list[Finished] = []
    while engine.n_in_flight or engine.n_waiting:
        finished += engine.advance()
    return finished


@torch.no_grad()
def of_hugging_face(attention: str, finished: list[Finished]) -> np.ndarray:
    """Log-probs of the same tokens, one response at a time, logits in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16, attn_implementation=attention).cuda()
    weight = model.get_output_embeddings().weight.float()
    found = []
    for request, completion in finished:
        ids = torch.tensor([[*request.prompt, *completion.tokens.tolist()]], device="cuda")
        hidden = model.model(ids).last_hidden_state[0, len(request.prompt) - 1 : -1]
        logp = torch.log_softmax(hidden.float() @ weight.T, -1)
        found.append(logp.gather(1, ids[0, len(request.prompt) :, None])[:, 0].cpu().numpy())
    return np.concatenate(found)


def describe(name: str, gap: np.ndarray) -> None:
    p99, most = np.quantile(gap, 0.99), gap.max()
    print(f"{name}: mean {gap.mean():.3g}, p99 {p99:.3g}, max {most:.3g} over {len(gap):,} tokens")


def test_the_engine_is_as_near_to_training_as_eager_attention_is_to_sdpa():
    torch.backends.cuda.matmul.allow_tf32 = False
    policy = load_policy(FOLDER, dtype=torch.bfloat16, device="cuda")
    finished = write(policy, questions(policy.tokenizer, 64))
    with torch.no_grad():
        packed = pack([r.prompt for r, _ in finished], [c.tokens for _, c in finished], policy.device)
        trained = policy(packed, temperature=1.0)[0].float().cpu().numpy()
    engine = np.concatenate([c.logp for _, c in finished])
    sdpa, eager = (of_hugging_face(attention, finished) for attention in ("sdpa", "eager"))
    ours, theirs = np.abs(engine - trained), np.abs(eager - sdpa)
    describe("engine and training forward", ours)
    describe("Hugging Face eager and sdpa", theirs)
    describe("engine and Hugging Face sdpa", np.abs(engine - sdpa))
    describe("training forward and Hugging Face sdpa", np.abs(trained - sdpa))
    print(f"ratio of the means {ours.mean() / theirs.mean():.2f}")
    assert ours.mean() <= 1.5 * theirs.mean()
    assert ours.mean() <= 2e-2
