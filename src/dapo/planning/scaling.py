"""How sampling scales: the real scheduling code on a virtual clock, with more and more engines as one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dapo.config.schema import Config
from dapo.planning.cluster import LENGTH_SIGMA, Layout, Rates, StepTime, training_seconds
from dapo.planning.virtual import (
    EndlessSource,
    TickCost,
    VirtualEngine,
    VirtualJudge,
    half_mixed,
    log_normal_lengths,
)
from dapo.sampling.collect import Collector
from dapo.sampling.dynamic import SamplingState
from dapo.sampling.groups import sample_groups


@dataclass(frozen=True, slots=True)
class SimulatedSampling:
    """Means over the simulated steps."""

    seconds: float
    generated_tokens: float
    trained_tokens: float
    idle_fraction: float  # of the time: lost compared with generating the same tokens with all slots busy
    wasted_fraction: float  # of the generated tokens


def simulate_sampling(
    config: Config, *, replicas: int, slots: int, cost: TickCost, mean_tokens: float, sigma: float, steps: int
) -> SimulatedSampling:
    """Steps of the config's own sampling on `replicas` engines of `slots` each; half of the problems give mixed groups.

    Requests wait in one queue (`rollout.shared`), so all engines together are one with all slots, and a tick takes what
    one with an equal share of the responses takes.
    """
    mu = math.log(mean_tokens) - sigma**2 / 2
    spread = TickCost(cost.base, cost.per_response / replicas)
    engine = VirtualEngine(max_concurrent=replicas * slots, length_of=log_normal_lengths(mu, sigma), cost=spread)
    collector = Collector(
        engine,
        VirtualJudge(),
        responses_per_prompt=config.sampling.responses_per_prompt,
        max_new_tokens=config.limits.max_response_tokens,
        seed=0,
    )
    source, state = EndlessSource(half_mixed), SamplingState()
    generated = trained = 0
    for step in range(steps):
        version = step * config.updates_per_step
        engine.load_weights(None, version)
        accounting = sample_groups(
            collector,
            source,
            config.sampling,
            state,
            version=version,
            filter_truncated=False,
            max_prompts_tried=config.max_prompts_tried_per_step,
        ).accounting
        generated += accounting.generated_tokens
        trained += accounting.trained_tokens
    busy = generated / (replicas * slots) * cost.of(slots)
    return SimulatedSampling(
        seconds=engine.seconds / steps,
        generated_tokens=generated / steps,
        trained_tokens=trained / steps,
        idle_fraction=max(0.0, 1 - busy / engine.seconds),
        wasted_fraction=1 - trained / generated,
    )


def step_time(
    config: Config, layout: Layout, rates: Rates, *, gpus: int, mean_tokens: float, scale: int = 1
) -> StepTime:
    """A first step's phases. With `scale` > 1 sampling is simulated with so many times fewer prompts and engines."""
    replicas = gpus // layout.tensor_parallel
    sampling = config.sampling
    smaller = sampling.model_copy(
        update={
            "prompts_per_step": sampling.prompts_per_step // scale,
            "max_prompts_tried_per_step": config.max_prompts_tried_per_step // scale,
        }
    )
    sampled = simulate_sampling(
        config.model_copy(update={"sampling": smaller}),
        replicas=replicas // scale,
        slots=layout.slots,
        cost=TickCost(rates.tick_base_s, rates.tick_per_response_s),
        mean_tokens=mean_tokens,
        sigma=LENGTH_SIGMA,
        steps=1,
    )
    training = training_seconds(config, rates, gpus=gpus, trained_tokens=scale * sampled.trained_tokens)
    return StepTime(sampled.seconds, training, sampled.idle_fraction, sampled.wasted_fraction)


def largest_scale(config: Config, replicas: int) -> int:
    """The largest power of two by which prompts and engines can be divided and at least 64 prompts stay."""
    scale = 1
    while (
        replicas % (2 * scale) == 0
        and config.sampling.prompts_per_step % (2 * scale) == 0
        and config.sampling.prompts_per_step // (2 * scale) >= 64
    ):
        scale *= 2
    return scale
