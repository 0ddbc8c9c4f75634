"""Strategies of dynamic sampling side by side on a virtual clock: time to fill a step, and waste by cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dapo.config.schema import SamplingConfig
from dapo.rollout.engine import Request
from dapo.sampling.accounting import CAUSES, Accounting
from dapo.sampling.carry import CarryState, fill_step_carrying
from dapo.sampling.collect import Collector
from dapo.sampling.dynamic import Fill, FillState, fill_step
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
    steps: int = 8
    updates_per_step: int = 4
    seed: int = 0
    cost: TickCost = field(default_factory=TickCost)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the steps."""

    seconds: float
    generated_tokens: float
    trained_tokens: float
    wasted_tokens: dict[str, float]
    prompts_tried: float
    groups: float


def compare(
    load: Load,
    length_of: Callable[[Request], int] | None = None,
    pass_rate_of: Callable[[int], float] | None = None,
) -> dict[str, Outcome]:
    lengths = length_of or log_normal_lengths(load.length_mu, load.length_sigma, load.seed)
    rates = pass_rate_of or (lambda problem: half_informative(problem, load.seed))
    return {name: run_strategy(load, changes, lengths, rates) for name, changes in STRATEGIES.items()}


def run_strategy(
    load: Load,
    changes: dict[str, object],
    length_of: Callable[[Request], int],
    pass_rate_of: Callable[[int], float],
) -> Outcome:
    config = SamplingConfig.model_validate(
        {"prompts_per_step": load.prompts_per_step, "responses_per_prompt": load.responses_per_prompt, "dynamic": True}
        | changes
    )
    engine = VirtualEngine(max_concurrent=load.max_concurrent, length_of=length_of, cost=load.cost)
    collector = Collector(
        engine,
        VirtualJudge(load.seed),
        responses_per_prompt=load.responses_per_prompt,
        max_new_tokens=load.max_new_tokens,
        seed=load.seed,
    )
    source = EndlessSource(pass_rate_of)
    state, carrying = FillState(), CarryState()
    budget = 100 * load.prompts_per_step
    fills: list[Fill] = []
    seconds: list[float] = []
    for step in range(load.steps):
        before = engine.seconds
        if config.carry_over or config.partial_rollouts:
            version = step * load.updates_per_step
            engine.load_weights(None, version)
            fill = fill_step_carrying(
                collector,
                source,
                config,
                carrying,
                version=version,
                filter_truncated=False,
                max_prompts_tried=budget,
            )
        else:
            fill = fill_step(collector, source, config, state, filter_truncated=False, max_prompts_tried=budget)
        fills.append(fill)
        seconds.append(engine.seconds - before)
    return summarise([fill.accounting for fill in fills], seconds)


def summarise(accounts: list[Accounting], seconds: list[float]) -> Outcome:
    n = len(accounts)
    return Outcome(
        seconds=sum(seconds) / n,
        generated_tokens=sum(account.generated_tokens for account in accounts) / n,
        trained_tokens=sum(account.trained_tokens for account in accounts) / n,
        wasted_tokens={cause: sum(account.wasted_tokens[cause] for account in accounts) / n for cause in CAUSES},
        prompts_tried=sum(account.prompts_tried for account in accounts) / n,
        groups=sum(account.groups_trained for account in accounts) / n,
    )
