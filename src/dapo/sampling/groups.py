"""Sample a step's groups: in order, or with carry-over and partial rollouts if the config asks for them."""

from __future__ import annotations

import time

from dapo.config.schema import Config, SamplingConfig
from dapo.errors import DataError
from dapo.sampling.accounting import Accounting
from dapo.sampling.carry import CarryOver
from dapo.sampling.collect import Collector, PendingGroup
from dapo.sampling.dynamic import GroupProgress, GroupSampler, ProblemSource, SampledGroups, SamplingState
from dapo.sampling.in_order import InOrder
from dapo.sampling.ledger import entries_of
from dapo.types import Group


def sample_step(
    collector: Collector,
    source: ProblemSource,
    config: Config,
    state: SamplingState,
    *,
    version: int,
    progress: GroupProgress,
) -> SampledGroups:
    """A training step's groups, with the budget and the overlong filter of its config."""
    return sample_groups(
        collector,
        source,
        config.sampling,
        state,
        version=version,
        filter_truncated=config.shaping.overlong_filter,
        max_prompts_tried=config.max_prompts_tried_per_step,
        updates_per_step=config.train.updates_per_step * config.train.epochs_per_step,
        progress=progress,
    )


def sample_groups(
    collector: Collector,
    source: ProblemSource,
    config: SamplingConfig,
    state: SamplingState,
    *,
    version: int,
    filter_truncated: bool,
    max_prompts_tried: int,
    updates_per_step: int = 1,
    progress: GroupProgress = lambda _known, _wanted: None,
) -> SampledGroups:
    """One step's groups at weight version `version`. Tries at most `max_prompts_tried` prompts."""
    start = time.perf_counter()
    source.start_step()
    step = GroupSampler(collector, source, config, state, max_prompts_tried=max_prompts_tried, progress=progress)
    earlier: list[Group | PendingGroup] = [*state.held, *state.carried, *state.pending]
    carries = config.carry_over or config.partial_rollouts
    rule = CarryOver(step, version, updates_per_step) if carries else InOrder(step)
    groups = step.run(rule)
    events: list[str] = []
    if len(groups) < config.prompts_per_step and (config.refill or not config.dynamic):
        groups = apply_fill_policy(config, state, groups, step.accounting, events)
    step.accounting.trained(groups, filter_truncated=filter_truncated)
    n_used = step.accounting.prompts_tried
    submitted = [group.problem for group in step.groups[:n_used]]
    stale = rule.stale if isinstance(rule, CarryOver) else []
    entries = entries_of(step.groups, n_used, earlier, step.resolved, groups, stale, state)
    return SampledGroups(
        groups, step.accounting, events, step.resolved, submitted, entries, time.perf_counter() - start
    )


def apply_fill_policy(
    config: SamplingConfig, state: SamplingState, groups: list[Group], accounting: Accounting, events: list[str]
) -> list[Group]:
    """The budget is spent and the step is not full. Accepted groups are trained on or held, never lost."""
    if not config.dynamic:
        events.append(
            f"step not full: sampling.prompts_per_step = {config.prompts_per_step}, but the set has only {len(groups)} "
            "problems, and none comes twice in a step. Lower the key, or use a larger set."
        )
        return groups
    easy, hard, equal = accounting.groups_all_correct, accounting.groups_all_wrong, accounting.groups_all_equal
    graded = f", {equal} all equal" if equal else ""
    what = (
        f"only {len(groups)} of {config.prompts_per_step} mixed groups in {accounting.prompts_tried} prompts "
        f"({easy} all correct, {hard} all wrong{graded})"
    )
    if equal > easy + hard:
        remedy = "Use a reward that grades more finely, other problems, or more responses per prompt."
    elif easy >= hard:
        remedy = "Use harder problems, or drop those that are always solved."
    else:
        remedy = (
            "Use easier problems, a stronger model or more responses per prompt; `dapo data probe` shows pass rates."
        )
    match config.fill_policy:
        case "error":
            raise DataError(f"sampling.fill_policy = error: {what}.", remedy=remedy)
        case "skip":
            events.append(f"step skipped, its groups held for the next: {what}. {remedy}")
            state.held = groups
            return []
        case _:
            events.append(f"step not full: {what}. {remedy}")
            return groups
