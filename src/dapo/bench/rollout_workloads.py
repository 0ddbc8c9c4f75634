"""What a rollout benchmark asks of an engine: how many responses, how long; and the least time the card needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dapo.config.model_shapes import ModelShape
from dapo.rollout.engine import Engine, NoiseKey, Request

Kind = Literal["fixed", "closed", "open", "few", "mixed"]
LOG_NORMAL_MU, LOG_NORMAL_SIGMA, LONGEST = 6.4, 0.9, 8192
PROMPT_TOKENS = 128
MIXED, MIXED_TOKENS = 256, (100, 1024)  # of prompts and of responses


@dataclass(frozen=True, slots=True)
class RolloutLoad:
    """Responses of given lengths: prompts of random tokens, `per_prompt` responses each, `slots` at a time.

    fixed: all equally long. closed: log-normal lengths, until the last one ends. open: log-normal, and every slot is
    refilled until nothing waits, where the clock stops. few: a handful of responses, for the time of one step. mixed:
    prompts and responses of 100 to 1,024 tokens, one response each, the load that mini-sglang publishes.
    """

    kind: Kind
    n_prompts: int
    per_prompt: int
    prompt_lengths: tuple[int, ...]  # of every prompt
    lengths: tuple[int, ...]  # of every response
    slots: int

    @property
    def n_responses(self) -> int:
        return self.n_prompts * self.per_prompt

    @property
    def prompt_of_each(self) -> NDArray[np.int64]:
        """The tokens of every response's prompt."""
        return np.repeat(np.array(self.prompt_lengths), self.per_prompt)

    @property
    def longest(self) -> int:
        """Tokens of the longest response with its prompt."""
        return int((self.prompt_of_each + np.array(self.lengths)).max())

    def requests(self, vocabulary: int, seed: int = 0, limit: int | None = None) -> list[Request]:
        generator = np.random.default_rng(seed)
        prompts = generator.integers(3, min(vocabulary, 40_000), (self.n_prompts, max(self.prompt_lengths))).tolist()
        wanted = []
        for i, length in enumerate(self.lengths):
            group, index = divmod(i, self.per_prompt)
            key = NoiseKey(seed, "train", str(group), 0, index)
            prompt = tuple(prompts[group][: self.prompt_lengths[group]])
            wanted.append(Request(i, prompt, key, min(length, limit or length), group))
        return wanted


def make_load(kind: Kind, *, slots: int, new_tokens: int) -> RolloutLoad:
    if kind == "mixed":
        generator, (low, high) = np.random.default_rng(0), MIXED_TOKENS
        prompts, responses = (tuple(generator.integers(low, high + 1, MIXED).tolist()) for _ in range(2))
        return RolloutLoad(kind, MIXED, 1, prompts, responses, min(slots, MIXED))
    per_prompt = min(16, slots)
    n_prompts = slots // per_prompt * (3 if kind == "open" else 1)
    n = n_prompts * per_prompt
    if kind in ("fixed", "few"):
        lengths = (new_tokens,) * n
    else:
        drawn = np.random.default_rng(0).lognormal(LOG_NORMAL_MU, LOG_NORMAL_SIGMA, n)
        lengths = tuple(int(length) for length in np.clip(drawn, 16, LONGEST))
    return RolloutLoad(kind, n_prompts, per_prompt, (PROMPT_TOKENS,) * n_prompts, lengths, slots)


@dataclass(frozen=True, slots=True)
class RolloutResult:
    seconds: float
    tokens: int
    ticks: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def drive(engine: Engine, load: RolloutLoad, requests: list[Request], synchronise: Callable[[], Any]) -> RolloutResult:
    """Submit everything and advance until the load's end; all bookkeeping counts."""
    synchronise()
    start, tick = time.perf_counter(), engine.tick
    engine.submit(requests)
    tokens = 0
    while engine.n_waiting or (load.kind != "open" and engine.n_in_flight):
        tokens += sum(len(completion.tokens) for _, completion in engine.advance())
    synchronise()
    seconds, ticks = time.perf_counter() - start, engine.tick - tick
    if load.kind == "open":  # what is in flight was written in this time too
        left = engine.abort([request.id for request in requests])
        tokens += sum(len(completion.tokens) for _, completion in left)
    return RolloutResult(seconds, tokens, ticks)


def least_seconds(shape: ModelShape, load: RolloutLoad, bytes_per_s: float, flops_per_s: float) -> float:
    """Every step reads all weights once and the keys and values of all responses, and multiplies: one after the other.

    Prompts are counted for every response, as in the published limits; who reads a shared one once does less.
    """
    lengths = np.array(load.lengths)
    weights = shape.linear_parameters + shape.hidden * shape.vocabulary
    tokens = float(lengths.sum())
    kv = float((lengths * (load.prompt_of_each + lengths / 2)).sum()) * 2 * shape.kv_values_per_token
    steps = tokens / load.slots if load.kind == "open" else float(lengths.max())
    return (steps * 2 * weights + kv) / bytes_per_s + 2 * weights * tokens / flops_per_s
