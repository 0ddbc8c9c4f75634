"""Strategies of dynamic sampling side by side: time to fill a step, and waste by cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dapo.config.schema import SamplingConfig
from dapo.rollout.engine import Engine, Request
from dapo.sampling.accounting import CAUSES, Accounting
from dapo.sampling.carry import CarryState, fill_step_carrying
from dapo.sampling.collect import Collector
from dapo.sampling.dynamic import fill_step
from dapo.sampling.virtual import (
    EndlessSource,
    TickCost,
    VirtualEngine,
    VirtualJudge,
    half_informative,
    log_normal_lengths,
)

STRATEGIES: dict[str, dict[str, object]] = {
    "rounds x 1": {"schedule": "rounds", "generation_multiple": 1},
    "rounds x 3": {"schedule": "rounds", "generation_multiple": 3},
    "dapo (stream)": {},
    "dapo-fast": {"carry_over": True, "partial_rollouts": True, "max_staleness_updates": 16},
}


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the engine: sizes of a step, lengths, pass rates, and what a tick costs."""

    prompts_per_step: int = 64
    responses_per_prompt: int = 16
    max_concurrent: int = 1024
    max_new_tokens: int = 8192
    length_mu: float = 6.4
    length_sigma: float = 0.9
    steps: int = 16
    updates_per_step: int = 4
    seed: int = 0
    cost: TickCost = field(default_factory=TickCost)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the steps."""

    seconds: float  # by the engine's clock: virtual, or on the wall
    cpu_seconds: (
        float  # of this process: all of the work with a real engine, the sampling code alone with a virtual one
    )
    generated_tokens: float
    trained_tokens: float
    wasted_tokens: dict[str, float]
    prompts_tried: float
    groups: float


@dataclass(frozen=True, slots=True)
class Clocked:
    """An engine with the clock it is measured by, and the weights it is told to load between steps."""

    engine: Engine
    seconds: Callable[[], float]
    policy: Any = None


def compare(load: Load, pass_rate_of: Callable[[int], float] | None = None) -> dict[str, Outcome]:
    """All strategies on a virtual clock."""
    lengths = log_normal_lengths(load.length_mu, load.length_sigma, load.seed)
    return compare_on(lambda: virtual_engine(load, lengths), load, pass_rate_of)


def virtual_engine(load: Load, length_of: Callable[[Request], int]) -> Clocked:
    engine = VirtualEngine(max_concurrent=load.max_concurrent, length_of=length_of, cost=load.cost)
    return Clocked(engine, lambda: engine.seconds)


def compare_on(
    make_engine: Callable[[], Clocked], load: Load, pass_rate_of: Callable[[int], float] | None = None
) -> dict[str, Outcome]:
    """All strategies, each on an engine of its own and on the same problems."""
    rates = pass_rate_of or (lambda problem: half_informative(problem, load.seed))
    return {name: run_strategy(load, changes, make_engine(), rates) for name, changes in STRATEGIES.items()}


def run_strategy(
    load: Load, changes: dict[str, object], clocked: Clocked, pass_rate_of: Callable[[int], float]
) -> Outcome:
    config = SamplingConfig.model_validate(
        {"prompts_per_step": load.prompts_per_step, "responses_per_prompt": load.responses_per_prompt, "dynamic": True}
        | changes
    )
    collector = Collector(
        clocked.engine,
        VirtualJudge(load.seed),
        responses_per_prompt=load.responses_per_prompt,
        max_new_tokens=load.max_new_tokens,
        seed=load.seed,
    )
    source, state = EndlessSource(pass_rate_of), CarryState()
    budget = 100 * load.prompts_per_step
    accounts: list[Accounting] = []
    seconds = cpu_seconds = 0.0
    for step in range(load.steps):
        version = step * load.updates_per_step
        clocked.engine.load_weights(clocked.policy, version)
        before, cpu_before = clocked.seconds(), time.process_time()
        if config.carry_over or config.partial_rollouts:
            fill = fill_step_carrying(
                collector, source, config, state, version=version, filter_truncated=False, max_prompts_tried=budget
            )
        else:
            fill = fill_step(collector, source, config, state, filter_truncated=False, max_prompts_tried=budget)
        accounts.append(fill.accounting)
        seconds += clocked.seconds() - before
        cpu_seconds += time.process_time() - cpu_before
    return summarise(accounts, seconds, cpu_seconds)


def summarise(accounts: list[Accounting], seconds: float, cpu_seconds: float) -> Outcome:
    n = len(accounts)
    return Outcome(
        seconds=seconds / n,
        cpu_seconds=cpu_seconds / n,
        generated_tokens=sum(account.generated_tokens for account in accounts) / n,
        trained_tokens=sum(account.trained_tokens for account in accounts) / n,
        wasted_tokens={cause: sum(account.wasted_tokens[cause] for account in accounts) / n for cause in CAUSES},
        prompts_tried=sum(account.prompts_tried for account in accounts) / n,
        groups=sum(account.groups_trained for account in accounts) / n,
    )
