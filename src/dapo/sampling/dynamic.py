"""Dynamic sampling (DAPO eq. 11, Algorithm 1): fill a step with informative groups.

The choice is the prefix rule: groups are numbered at submission, and the step takes the first N informative ones in
that order, once every earlier group is resolved. How many groups run beside them changes only what is wasted, never
what is chosen; so short responses are not preferred, and scheduling, rank layout or a restart cannot change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from dapo.config.schema import SamplingConfig
from dapo.errors import DataError
from dapo.sampling.accounting import Accounting
from dapo.sampling.collect import Collector, PendingGroup
from dapo.types import Group, Problem


class Source(Protocol):
    """Where problems come from, one submission at a time."""

    def start_step(self) -> None: ...

    def next(self) -> tuple[Problem, int, tuple[int, ...]] | None:
        """(problem, visit, prompt tokens); None when this step has had every problem."""
        ...

    def rewind(self, n_used: int) -> None:
        """Take back this step's submissions after the first `n_used`."""
        ...


@dataclass(slots=True)
class AcceptanceRate:
    """Share of groups that turn out informative, as observed lately; steers over-provisioning only."""

    accepted: float = 1.0
    tried: float = 2.0
    decay: float = 0.98

    @property
    def rate(self) -> float:
        return max(0.02, self.accepted / self.tried)

    def observe(self, is_informative: bool) -> None:
        self.accepted = self.decay * self.accepted + is_informative
        self.tried = self.decay * self.tried + 1


@dataclass(slots=True)
class FillState:
    """What one step's fill leaves to the next; part of a checkpoint."""

    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    held: list[Group] = field(default_factory=list)  # accepted in a skipped step; no update came between: on policy


@dataclass(slots=True)
class Fill:
    """What a step trains on, and what it cost."""

    groups: list[Group]
    accounting: Accounting
    events: list[str] = field(default_factory=list)
    resolved: list[Group] = field(default_factory=list)  # every complete group of the step, informative or not
    seconds: float = 0.0


Progress = Callable[[int, int], None]  # (informative groups known, groups wanted)


def fill_step(
    collector: Collector,
    source: Source,
    config: SamplingConfig,
    state: FillState,
    *,
    filter_truncated: bool,
    max_prompts_tried: int,
    progress: Progress = lambda _known, _wanted: None,
) -> Fill:
    """The groups of one step. Ends within its budget of prompts, by `config.fill_policy` when that is spent."""
    source.start_step()
    wanted = config.prompts_per_step - len(state.held)
    filling = _Filling(collector, source, config, state.acceptance, wanted, max_prompts_tried, progress)
    chosen = filling.run()
    source.rewind(filling.n_used(chosen))
    accounting = filling.account(chosen)
    groups = [*state.held, *(group.finished() for group in chosen)]
    state.held = []
    events: list[str] = []
    if config.dynamic and len(groups) < config.prompts_per_step:
        groups = apply_fill_policy(config, state, groups, accounting, events)
    elif len(groups) < config.prompts_per_step:
        events.append(
            f"step not full: sampling.prompts_per_step = {config.prompts_per_step}, but the set has only {len(groups)} "
            "problems, and none comes twice in a step. Lower the key, or use a larger set."
        )
    accounting.trained(groups, filter_truncated=filter_truncated)
    return Fill(groups, accounting, events, filling.resolved)


def apply_fill_policy(
    config: SamplingConfig, state: FillState, groups: list[Group], accounting: Accounting, events: list[str]
) -> list[Group]:
    """The budget is spent and the step is not full. Accepted groups are trained on or held, never lost."""
    easy, hard, equal = accounting.groups_all_correct, accounting.groups_all_wrong, accounting.groups_all_equal
    graded = f", {equal} all equal" if equal else ""
    what = (
        f"only {len(groups)} of {config.prompts_per_step} informative groups in {accounting.prompts_tried} prompts "
        f"({easy} all right, {hard} all wrong{graded})"
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


class _Filling:
    """One step's fill in progress."""

    def __init__(
        self,
        collector: Collector,
        source: Source,
        config: SamplingConfig,
        acceptance: AcceptanceRate,
        wanted: int,
        max_prompts_tried: int,
        progress: Progress,
    ) -> None:
        self.collector = collector
        self.source = source
        self.config = config
        self.wanted = wanted
        self.acceptance = acceptance
        self.budget = max_prompts_tried
        self.progress = progress
        self.groups: list[PendingGroup] = []  # in submission order
        self.is_exhausted = False  # budget spent, or every problem tried
        self.resolved: list[Group] = []
        self.open: list[PendingGroup] = []  # not yet known to be informative or not
        self.start_tick = collector.engine.tick
        self.start_aborted = collector.aborted_tokens

    def run(self) -> list[PendingGroup]:
        """Submit, advance and judge until the prefix holds enough informative groups, or nothing more can come."""
        while (chosen := self.chosen()) is None:
            self.submit_more()
            self.collector.advance()
            self.observe()
            self.drop_surplus()
        self.collector.drop([group for group in self.groups if not group.is_dropped and not group.is_resolved])
        return chosen

    # -------------------------------------------------------------- submitting

    def submit_more(self) -> None:
        for _ in range(self.n_to_submit()):
            came = self.source.next() if len(self.groups) < self.budget else None
            if came is None:
                self.is_exhausted = True
                return
            group = self.collector.submit(*came)
            self.groups.append(group)
            self.open.append(group)

    def n_to_submit(self) -> int:
        if self.is_exhausted:
            return 0
        if not self.config.dynamic:
            return self.wanted - len(self.groups)
        if self.config.schedule == "rounds":
            everything_resolved = all(group.is_resolved for group in self.groups)
            return self.config.generation_multiple * self.wanted if everything_resolved else 0
        return self.n_to_stream() if self.collector.has_room() or self.collector.is_idle else 0

    def n_to_stream(self) -> int:
        """Groups still missing if the open ones come out as groups did lately; at most what the engine has room for."""
        missing = self.wanted - sum(self.chance(group) for group in self.groups if not group.is_dropped)
        if missing <= 0:
            return 0
        room = max(1, self.collector.engine.capacity() // self.collector.responses_per_prompt)
        return min(room, math.ceil(missing / self.acceptance.rate))

    def chance(self, group: PendingGroup) -> float:
        """That this group ends informative: certain, or as often as lately, less with each further equal verdict."""
        if group.is_informative:
            return 1.0
        return self.acceptance.rate * (1 - group.n_judged / len(group.judgements))

    # -------------------------------------------------------------- choosing

    def observe(self) -> None:
        for group in self.open:
            if group.is_resolved or group.is_informative:
                self.acceptance.observe(group.is_informative)
        self.open = [
            group for group in self.open if not (group.is_resolved or group.is_informative or group.is_dropped)
        ]
        self.progress(min(self.wanted, sum(group.is_informative for group in self.groups)), self.wanted)

    def drop_surplus(self) -> None:
        """Groups behind the N-th known informative one cannot be chosen any more, whatever the earlier ones become."""
        if not self.config.dynamic or self.config.schedule == "rounds":
            return
        known = 0
        for place, group in enumerate(self.groups):
            known += group.is_informative
            if known == self.wanted:
                late = [g for g in self.groups[place + 1 :] if not g.is_dropped and not g.is_resolved]
                if late:
                    self.collector.drop(late)
                return

    def chosen(self) -> list[PendingGroup] | None:
        """The step's groups once they are certain, else None."""
        if not self.config.dynamic:
            done = all(group.is_resolved for group in self.groups)
            return list(self.groups) if done and (self.is_exhausted or len(self.groups) == self.wanted) else None
        if self.config.schedule == "rounds" and not all(group.is_resolved for group in self.groups):
            return None
        chosen: list[PendingGroup] = []
        for group in self.groups:
            if not group.is_resolved:
                return None
            if group.is_informative:
                chosen.append(group)
            if len(chosen) == self.wanted:
                return chosen
        return chosen if self.is_exhausted else None

    def n_used(self, chosen: list[PendingGroup]) -> int:
        """Submissions up to and including the last group used; all of them when the step did not fill."""
        if len(chosen) < self.wanted or not chosen:
            return len(self.groups)
        return next(place for place, group in enumerate(self.groups) if group is chosen[-1]) + 1

    # -------------------------------------------------------------- accounting

    def account(self, chosen: list[PendingGroup]) -> Accounting:
        """Count the prefix up to the last group used; what ran beyond it is surplus or was aborted."""
        accounting = Accounting(ticks=self.collector.engine.tick - self.start_tick)
        used = {group.number for group in chosen}
        n_used = self.n_used(chosen)
        for place, pending in enumerate(self.groups):
            if place >= n_used:
                accounting.wasted_tokens["surplus"] += pending.n_tokens
            else:
                group = pending.finished()
                self.resolved.append(group)
                accounting.resolved(group)
                if pending.number not in used:
                    accounting.wasted(group)
            if not pending.is_dropped:
                self.collector.forget(pending)
        accounting.prompts_tried = n_used
        accounting.wasted_tokens["aborted"] += self.collector.aborted_tokens - self.start_aborted
        return accounting
