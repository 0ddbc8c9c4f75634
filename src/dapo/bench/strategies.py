"""Strategies of dynamic sampling side by side: time to sample a step's groups, and waste by cause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dapo.config.schema import SamplingConfig
from dapo.planning.virtual import (
    EndlessSource,
    TickCost,
    VirtualEngine,
    VirtualJudge,
    half_mixed,
    log_normal_lengths,
)
from dapo.rollout.engine import Engine, Request
from dapo.sampling.accounting import CAUSES, Accounting
from dapo.sampling.collect import Collector
from dapo.sampling.dynamic import SamplingState
from dapo.sampling.groups import sample_groups

STRATEGIES: dict[str, dict[str, object]] = {
    "rounds x 1": {"schedule": "rounds", "generation_multiple": 1},
    "rounds x 3": {"schedule": "rounds", "generation_multiple": 3},
    "dapo (stream)": {},
    "dapo-fast": {"carry_over": True, "partial_rollouts": True, "max_staleness_updates": 16},
}


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the engine: sizes of a step, lengths, pass rates, and the cost of a decode step."""

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
    """All strategies on the same problems, each on an engine of its own.

    They take turns step by step, so that whatever else slows a machine down meets all of them alike.
    """
    rates = pass_rate_of or (lambda problem: half_mixed(problem, load.seed))
    contenders = {name: Contender(load, changes, make_engine(), rates) for name, changes in STRATEGIES.items()}
    for step in range(load.steps):
        for contender in contenders.values():
            contender.sample(step)
    return {name: contender.outcome() for name, contender in contenders.items()}


class Contender:
    """One strategy with its engine, and what its steps took so far."""

    def __init__(
        self, load: Load, changes: dict[str, object], clocked: Clocked, pass_rate_of: Callable[[int], float]
    ) -> None:
        sizes = {"prompts_per_step": load.prompts_per_step, "responses_per_prompt": load.responses_per_prompt}
        self.config = SamplingConfig.model_validate({**sizes, "dynamic": True} | changes)
        self.load = load
        self.clocked = clocked
        self.collector = Collector(
            clocked.engine,
            VirtualJudge(load.seed),
            responses_per_prompt=load.responses_per_prompt,
            max_new_tokens=load.max_new_tokens,
            seed=load.seed,
        )
        self.source, self.state = EndlessSource(pass_rate_of), SamplingState()
        self.accounts: list[Accounting] = []
        self.seconds = self.cpu_seconds = 0.0

    def sample(self, step: int) -> None:
        version, budget = step * self.load.updates_per_step, 100 * self.load.prompts_per_step
        self.clocked.engine.load_weights(self.clocked.policy, version)
        before, cpu_before = self.clocked.seconds(), time.process_time()
        parts = (self.collector, self.source, self.config, self.state)
        sampled = sample_groups(*parts, version=version, filter_truncated=False, max_prompts_tried=budget)
        self.accounts.append(sampled.accounting)
        self.seconds += self.clocked.seconds() - before
        self.cpu_seconds += time.process_time() - cpu_before

    def outcome(self) -> Outcome:
        n = len(self.accounts)
        return Outcome(
            seconds=self.seconds / n,
            cpu_seconds=self.cpu_seconds / n,
            generated_tokens=sum(account.generated_tokens for account in self.accounts) / n,
            trained_tokens=sum(account.trained_tokens for account in self.accounts) / n,
            wasted_tokens={cause: sum(a.wasted_tokens[cause] for a in self.accounts) / n for cause in CAUSES},
            prompts_tried=sum(account.prompts_tried for account in self.accounts) / n,
            groups=sum(account.groups_trained for account in self.accounts) / n,
        )
