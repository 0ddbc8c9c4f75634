"""The comparison of strategies on the real local engine: a random model really writes, and the seconds are real.

Lengths and verdicts are still given, so that half of the groups are uninformative whatever the model says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dapo.models.packing import PACKED_ATTENTION
from dapo.models.policy import Policy
from dapo.rollout.engine import Finished, Request, SamplingParams
from dapo.rollout.plain.engine import PlainEngine
from dapo.sampling.compare import Clocked, Load, Outcome, compare_on
from dapo.sampling.virtual import log_normal_lengths, name_of
from dapo.types import StopReason

# A step that fills within seconds on one CPU core, in the proportions of the virtual one: the engine holds a step's
# responses, and the longest of them is many times as long as the median.
SMALL = Load(
    prompts_per_step=16,
    responses_per_prompt=8,
    max_concurrent=64,
    max_new_tokens=384,
    length_mu=3.6,
    steps=8,
)


class PacedEngine(PlainEngine):
    """The local engine, with the length of each response given: it ends there, and says its name as its text."""

    def __init__(self, policy: Policy, *, load: Load, length_of: Callable[[Request], int]) -> None:
        sampling = SamplingParams(temperature=1.0)
        super().__init__(
            policy, sampling=sampling, max_concurrent=load.max_concurrent, max_tokens=load.max_new_tokens + 1
        )
        self.length_of = length_of
        self.limit = load.max_new_tokens

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([replace(r, max_new_tokens=max(1, min(self.length_of(r), self.limit))) for r in requests])

    def advance(self) -> list[Finished]:
        return [self._named(finished) for finished in super().advance()]

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
    """All strategies on the local engine, by the clock on the wall."""
    lengths = log_normal_lengths(load.length_mu, load.length_sigma, load.seed)
    policy = random_policy(load.seed)

    def paced() -> Clocked:
        return Clocked(PacedEngine(policy, load=load, length_of=lengths), time.perf_counter, policy)

    return compare_on(paced, load)
