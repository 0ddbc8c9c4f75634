"""Requests for tiny models, and what engines make of them: what tests of every engine have in common."""

from collections.abc import Sequence

import numpy as np
import torch

from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.rollout.engine import Engine, Finished, NoiseKey, Request
from dapo.types import Completion
from tiny_models import VOCABULARY, tiny_policy

SHAPE = {"hidden_size": 128, "initializer_range": 0.1}  # heads of 32: the least that vLLM's CPU attention takes


def small_policy(family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> Policy:
    return tiny_policy(family, dtype, seed, **{**SHAPE, **({"head_dim": 32} if "qwen3" in family else {}), **changes})


def prompt(i: int, n_tokens: int | None = None) -> tuple[int, ...]:
    rng = np.random.default_rng(i)
    return tuple(rng.integers(3, VOCABULARY, n_tokens or 1 + i % 9).tolist())


def request(i: int, max_new_tokens: int = 24, n_prompt: int | None = None, **key: object) -> Request:
    noise = NoiseKey(**{"seed": 0, "stream": "train", "problem": str(i), "visit": 0, "response_index": i, **key})
    return Request(i, prompt(i, n_prompt), noise, max_new_tokens, group=i)


def drain(engine: Engine, ticks: int = 1_000) -> list[Finished]:
    finished: list[Finished] = []
    for _ in range(ticks):
        if not engine.n_in_flight and not engine.n_waiting:
            return finished
        finished += engine.advance()
    raise AssertionError("the engine never drained")


def by_id(finished: Sequence[Finished]) -> dict[int, Completion]:
    assert len({request.id for request, _ in finished}) == len(finished), "a response came back twice"
    return {request.id: completion for request, completion in finished}


def logp_by_training_forward(policy: Policy, item: Finished, temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        packed = pack([item[0].prompt], [item[1].tokens], policy.device)
        return policy(packed, temperature=temperature)[0].float().cpu().numpy()


def gap(policy: Policy, finished: Sequence[Finished], temperature: float = 1.0) -> float:
    """Mean |difference| between the engine's log-probs and those of the training forward on the same tokens."""
    gaps = [np.abs(item[1].logp - logp_by_training_forward(policy, item, temperature)) for item in finished]
    return float(np.concatenate(gaps).mean())


def same(a: Completion, b: Completion) -> bool:
    return np.array_equal(a.tokens, b.tokens) and a.stop_reason is b.stop_reason and a.text == b.text


def shaken(policy: Policy, seed: int = 1, size: float = 0.3) -> Policy:
    """Every weight moved in place, by a good part of itself: as an optimizer does, but further."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(size * parameter.std(correction=0) * noise)
    return policy
