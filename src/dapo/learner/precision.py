"""The gap between engine and trainer in each half precision, measured on the user's own model and prompts."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dapo.algorithms.diagnostics import trainer_engine_gap
from dapo.config.model_shapes import model_location
from dapo.config.schema import Config
from dapo.data.encoded import load_train
from dapo.models.load import load_policy
from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.rollout.engine import Engine, Finished, NoiseKey, Request, SamplingParams
from dapo.rollout.make import make_engine

PROMPTS, RESPONSES, TOKENS = 16, 4, 512  # of a measurement: prompts, responses to each, and their longest
CLEAR = 0.5  # of bfloat16's mean gap: below it float16 is worth its loss scale


@dataclass(frozen=True, slots=True)
class PrecisionGap:
    """Of one type: |log π_trainer − log π_engine| in nats over the tokens that its engine sampled."""

    dtype: str
    tokens: int
    mean: float
    largest: float
    kl: float
    faults: int  # responses whose logits were not finite

    @property
    def is_sound(self) -> bool:
        return self.tokens > 0 and not self.faults and math.isfinite(self.largest)


def measure_precisions(config: Config, dtypes: Sequence[torch.dtype], device: str) -> list[PrecisionGap]:
    """Sample and score the same prompts in each type, one model on the device at a time."""
    made = []
    for dtype in dtypes:
        made.append(measure_precision(config, dtype, device))
        gc.collect()  # an engine and its policy refer to each other
        if device == "cuda":
            torch.cuda.empty_cache()
    return made


def measure_precision(config: Config, dtype: torch.dtype, device: str) -> PrecisionGap:
    policy = load_policy(
        model_location(config.model.path),
        dtype=dtype,
        device=device,
        revision=config.model.revision,
        is_fused=config.model.kernels == "fused",
    )
    prompts = load_train(config, policy.tokenizer).prompts[:PROMPTS]
    # In FP8 the gap would be that of FP8, whatever the type.
    rollout = config.rollout.model_copy(update={"quantization": "none"})
    unrounded = config.model_copy(update={"rollout": rollout})
    engine = make_engine(unrounded, policy, SamplingParams(temperature=config.sampling.temperature))
    try:
        finished = sampled(engine, prompts, min(TOKENS, config.limits.max_response_tokens), config.train.seed)
        faults = len(engine.faults)
    finally:
        engine.close()
    name = str(dtype).removeprefix("torch.")
    if not finished:
        return PrecisionGap(name, 0, math.nan, math.nan, math.nan, faults)
    trainer = torch.cat([scored(policy, rows, config.sampling.temperature) for rows in in_batches(finished, config)])
    gap = trainer_engine_gap(trainer, torch.cat([torch.from_numpy(c.logp) for _, c in finished]).double())
    return PrecisionGap(name, len(trainer), float(gap.mean), float(gap.max), float(gap.kl), faults)


def sampled(engine: Engine, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, seed: int) -> list[Finished]:
    """Responses with at least one token, the same noise in every type."""
    engine.submit(
        [
            Request(p * RESPONSES + i, prompt, NoiseKey(seed, "eval", str(p), 0, i), max_new_tokens, group=p)
            for p, prompt in enumerate(prompts)
            for i in range(RESPONSES)
        ]
    )
    finished: list[Finished] = []
    while engine.n_in_flight or engine.n_waiting:
        finished += engine.advance()
    return sorted((one for one in finished if len(one[1].tokens)), key=lambda one: one[0].id)


def in_batches(finished: Sequence[Finished], config: Config) -> Iterator[list[Finished]]:
    """As many rows at a time as a micro-batch of training holds."""
    rows: list[Finished] = []
    n_tokens = 0
    for request, completion in finished:
        cost = len(request.prompt) + len(completion.tokens)
        if rows and n_tokens + cost > config.train.tokens_per_microbatch:
            yield rows
            rows, n_tokens = [], 0
        rows.append((request, completion))
        n_tokens += cost
    if rows:
        yield rows


@torch.no_grad()
def scored(policy: Policy, rows: Sequence[Finished], temperature: float) -> torch.Tensor:
    """The trainer's log-probs of the rows' tokens, end to end."""
    packed = pack([request.prompt for request, _ in rows], [c.tokens for _, c in rows], policy.device)
    logp: torch.Tensor = policy(packed, temperature=temperature, with_entropy=False)[0]
    return logp.double().cpu()


def recommended(bfloat16: PrecisionGap, float16: PrecisionGap) -> str:
    """Which of the two to train in, and why."""
    take, keep = 'Set model.dtype = "float16"; its loss scale may skip the first updates.', 'Keep model.dtype = "auto".'
    if not float16.is_sound:
        return f"bfloat16: in float16 this model has log-probs that are not finite. {keep}"
    if not bfloat16.is_sound:
        return f"float16: in bfloat16 this model has log-probs that are not finite. {take}"
    if float16.mean <= CLEAR * bfloat16.mean:
        times = f"{bfloat16.mean / float16.mean:.1f} times smaller" if float16.mean else "0"
        return f"float16: its gap is {times}. {take}"
    return f"bfloat16: the gap in float16 is {float16.mean / bfloat16.mean:.2f} of its own. {keep}"
