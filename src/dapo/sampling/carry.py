"""Carry-over and partial rollouts (not the paper's algorithm): what a step does not use, a later step may.

A step takes the first N informative groups that are complete, without waiting for slower ones: those come later,
within the staleness bound, instead of being lost. Staleness is counted in updates, from the oldest token. Tokens of a
group are accounted for in the step that trains on it or gives it up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dapo.config.schema import SamplingConfig
from dapo.sampling.accounting import Accounting, n_tokens
from dapo.sampling.collect import Collector, PendingGroup
from dapo.sampling.dynamic import Fill, FillState, Progress, Source, apply_fill_policy
from dapo.types import Group


@dataclass(slots=True)
class CarryState(FillState):
    """What is left for later steps: finished surplus groups, and groups still being written."""

    carried: list[Group] = field(default_factory=list)
    pending: list[PendingGroup] = field(default_factory=list)


def oldest_version(group: Group) -> int:
    """Of the weights that drew its first token; a group without tokens has nothing to be stale."""
    return min((int(c.version.min()) for c in group.completions if len(c.version)), default=0)


def fill_step_carrying(
    collector: Collector,
    source: Source,
    config: SamplingConfig,
    state: CarryState,
    *,
    version: int,
    filter_truncated: bool,
    max_prompts_tried: int,
    progress: Progress = lambda _known, _wanted: None,
) -> Fill:
    """The groups of one step at weight version `version`."""
    source.start_step()
    filling = _CarryFilling(collector, source, config, state, version, max_prompts_tried, progress)
    groups = filling.run()
    events: list[str] = []
    if len(groups) < config.prompts_per_step:
        if config.fill_policy == "relax":
            groups += filling.take_stale(config.prompts_per_step - len(groups))
        if len(groups) < config.prompts_per_step:
            groups = apply_fill_policy(config, state, groups, filling.accounting, events)
    filling.leave()
    filling.accounting.trained(groups, filter_truncated=filter_truncated)
    return Fill(groups, filling.accounting, events, filling.resolved)


class _CarryFilling:
    def __init__(
        self,
        collector: Collector,
        source: Source,
        config: SamplingConfig,
        state: CarryState,
        version: int,
        max_prompts_tried: int,
        progress: Progress,
    ) -> None:
        self.collector = collector
        self.source = source
        self.config = config
        self.state = state
        self.version = version
        self.budget = max_prompts_tried
        self.progress = progress
        self.accounting = Accounting()
        self.stale: list[Group] = []
        self.resolved: list[Group] = []
        self.start_tick = collector.engine.tick
        self.is_exhausted = False
        self.ready: list[Group] = []  # informative, complete and young enough
        for group in (*state.held, *state.carried):
            self.admit(group)
        state.held, state.carried = [], []
        self.drop_stale_pending()

    def run(self) -> list[Group]:
        wanted = self.config.prompts_per_step
        while True:
            self.collect_resolved()
            self.progress(min(wanted, len(self.ready)), wanted)
            nothing_comes = self.is_exhausted and not self.state.pending
            is_full = len(self.ready) >= wanted and (self.config.partial_rollouts or not self.state.pending)
            if is_full or nothing_comes:
                chosen, self.ready = self.ready[:wanted], self.ready[wanted:]
                return chosen
            self.submit_more()
            if self.state.pending:
                self.collector.advance()

    def admit(self, group: Group) -> None:
        """An informative group: ready, or beyond the bound. The version stands still while a step fills."""
        bound = self.config.max_staleness_updates
        is_stale = bound is not None and self.version - oldest_version(group) > bound
        (self.stale if is_stale else self.ready).append(group)

    def submit_more(self) -> None:
        """Keep the engine busy: what this step does not use, the next one does.

        Without partial rollouts what is begun is waited for, so only what is likely to be needed is begun.
        """
        while not self.is_exhausted and self.wants_more() and (self.collector.has_room() or not self.state.pending):
            came = self.source.next() if self.accounting.prompts_tried < self.budget else None
            if came is None:
                self.is_exhausted = True
                return
            self.accounting.prompts_tried += 1
            self.state.pending.append(self.collector.submit(*came))

    def wants_more(self) -> bool:
        if self.config.partial_rollouts:
            return True
        likely = len(self.ready) + len(self.state.pending) * self.state.acceptance.rate
        return likely < self.config.prompts_per_step

    def collect_resolved(self) -> None:
        resolved = [pending for pending in self.state.pending if pending.is_resolved]
        if not resolved:
            return
        self.state.pending = [pending for pending in self.state.pending if not pending.is_resolved]
        for pending in resolved:
            group = pending.finished()
            self.collector.forget(pending)
            self.resolved.append(group)
            self.accounting.resolved(group)
            self.state.acceptance.observe(group.is_informative)
            if group.is_informative:
                self.admit(group)
            else:
                self.accounting.wasted(group)

    def drop_stale_pending(self) -> None:
        """A group with a token beyond the bound can never be used: stop writing it."""
        bound = self.config.max_staleness_updates
        late = [
            pending
            for pending in self.state.pending
            if bound is not None
            and any(
                c is not None and len(c.version) and self.version - int(c.version.min()) > bound
                for c in pending.completions
            )
        ]
        self.give_up(late, "stale")

    def take_stale(self, n: int) -> list[Group]:
        """Policy `relax`: the youngest groups beyond the staleness bound, and nothing else."""
        self.stale.sort(key=oldest_version, reverse=True)
        taken, self.stale = self.stale[:n], self.stale[n:]
        return taken

    def give_up(self, pending: list[PendingGroup], cause: str) -> None:
        if not pending:
            return
        gone = {group.number for group in pending}
        self.state.pending = [group for group in self.state.pending if group.number not in gone]
        before = self.collector.aborted_tokens
        self.collector.drop(pending)
        finished = sum(group.n_tokens for group in pending)
        self.accounting.wasted_tokens[cause] += finished + self.collector.aborted_tokens - before

    def leave(self) -> None:
        """Hand on what may be handed on; the rest is waste with its cause."""
        for group in self.stale:
            self.accounting.wasted_tokens["stale"] += n_tokens(group)
        if self.config.carry_over:
            self.state.carried = self.ready
        else:
            for group in self.ready:
                self.accounting.wasted_tokens["surplus"] += n_tokens(group)
        assert self.config.partial_rollouts or not self.state.pending, "without partial rollouts nothing is left open"
        self.accounting.ticks = self.collector.engine.tick - self.start_tick
