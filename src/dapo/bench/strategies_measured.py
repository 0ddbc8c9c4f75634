"""The comparison of strategies on a real engine on the CPU: a random model generates, and the seconds are measured.

Lengths and verdicts are still given, so that half of the groups are not mixed, whatever the model says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dapo.bench.strategies import Clocked, Load, Outcome, compare_on
from dapo.models.packed_attention import PACKED_ATTENTION
from dapo.models.policy import Policy
from dapo.planning.virtual import log_normal_lengths, name_of
from dapo.rollout.engine import Finished, NoiseKey, Request, SamplingParams, nothing
from dapo.rollout.local.engine import LocalEngine
from dapo.types import StopReason

# A step that fills within seconds on one CPU core. Lengths are spread as on the virtual clock: the limit is 13.6 times
# the median. 32 groups, since with half as many the luck of needing two rounds or three decides the comparison.
# 128 at a time: a full tick costs 1.3 to 1.9 times a nearly empty one, as the machine is busy or idle. On a GPU a tick
# reads all weights and the KV of every response, so a full one costs (weights + KV) / weights of an empty one: 2 to 8
# where KV fills the memory that the weights leave. Were ticks free of a fixed part, time would be tokens, and no order
# of work could save much of it.
SMALL = Load(
    prompts_per_step=32,
    responses_per_prompt=8,
    max_concurrent=128,
    max_new_tokens=512,
    length_mu=3.63,
    steps=8,
)


class PacedEngine(LocalEngine):
    """The local engine with given response lengths; a response's text is its own name."""

    def __init__(self, policy: Policy, *, load: Load, length_of: Callable[[Request], int]) -> None:
        sampling = SamplingParams(temperature=1.0)
        super().__init__(
            policy, sampling=sampling, max_concurrent=load.max_concurrent, max_tokens=load.max_new_tokens + 1
        )
        self.length_of = length_of
        self.limit = load.max_new_tokens

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([replace(r, max_new_tokens=max(1, min(self.length_of(r), self.limit))) for r in requests])

    def advance(self, meanwhile: Callable[[], None] = nothing) -> list[Finished]:
        return [self._named(finished) for finished in super().advance(meanwhile)]

    def abort(self, ids: Iterable[int]) -> list[Finished]:
        return [self._named(finished) for finished in super().abort(ids)]

    def _named(self, finished: Finished) -> Finished:
        request, completion = finished
        is_short = completion.stop_reason is StopReason.LENGTH and request.max_new_tokens < self.limit
        reason = StopReason.EOS if is_short else completion.stop_reason
        return request, replace(completion, text=name_of(request), stop_reason=reason)


def random_policy(seed: int = 0) -> Policy:
    """A small random Llama without an end token, on the CPU; as in large ones, most work is in the layers."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    auto: Any = LlamaForCausalLM
    return Policy(auto._from_config(config, attn_implementation=PACKED_ATTENTION), None).eval()


def compare_measured(load: Load) -> dict[str, Outcome]:
    """All strategies on the local engine, in wall-clock time."""
    lengths = log_normal_lengths(load.length_mu, load.length_sigma, load.seed)
    policy = random_policy(load.seed)

    def paced() -> Clocked:
        return Clocked(PacedEngine(policy, load=load, length_of=lengths), time.perf_counter, policy)

    return compare_on(paced, load)


def tick_cost(load: Load, *, ticks: int = 16) -> dict[int, float]:
    """Responses in flight -> CPU seconds of a decode step: of a few, and of as many as the engine takes."""
    policy, cost = random_policy(load.seed), {}
    for n in sorted({min(16, load.max_concurrent), load.max_concurrent}):
        engine = PacedEngine(policy, load=load, length_of=lambda _request: load.max_new_tokens)
        keys = [NoiseKey(load.seed, "train", "tick", 0, i) for i in range(n)]
        engine.submit([Request(i, (1,), key, load.max_new_tokens, group=0) for i, key in enumerate(keys)])
        for _ in range(min(32, load.max_new_tokens // 2)):
            engine.advance()
        before = time.process_time()
        for _ in range(ticks):
            engine.advance()
        cost[n] = (time.process_time() - before) / ticks
    return cost
