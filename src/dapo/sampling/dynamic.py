"""Dynamic sampling (DAPO eq. 11, Algorithm 1): sample until a step has enough mixed groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dapo.config.schema import SamplingConfig
from dapo.report.ledger import Entry
from dapo.sampling.accounting import Accounting
from dapo.sampling.collect import Collector, PendingGroup
from dapo.types import Group, Problem

Submission = tuple[Problem, int, tuple[int, ...]]  # (problem, visit, prompt tokens)


class ProblemSource(Protocol):
    """Where problems come from, one submission at a time."""

    def start_step(self) -> None: ...

    def next(self) -> Submission | None:
        """None when every problem was submitted in this step."""
        ...

    def rewind(self, n_used: int) -> None:
        """Return this step's submissions after the first `n_used` to the queue: a later step submits them again."""
        ...


@dataclass(slots=True)
class AcceptanceRate:
    """Recent share of groups that end mixed; decides how many are submitted ahead, never which are chosen."""

    accepted: float = 1.0
    tried: float = 2.0
    decay: float = 0.98

    @property
    def rate(self) -> float:
        return max(0.02, self.accepted / self.tried)

    def observe(self, is_mixed: bool) -> None:
        self.accepted = self.decay * self.accepted + is_mixed
        self.tried = self.decay * self.tried + 1


@dataclass(slots=True)
class SamplingState:
    """What one step's sampling leaves to the next; part of a checkpoint.

    held: the mixed groups of a skipped step (`fill_policy = "skip"`); still on-policy: no update since.
    carried: complete mixed groups beyond what the step needed (`carry_over`).
    pending: groups left unfinished, which the engine continues (`partial_rollouts`).
    """

    acceptance: AcceptanceRate = field(default_factory=AcceptanceRate)
    held: list[Group] = field(default_factory=list)
    carried: list[Group] = field(default_factory=list)
    pending: list[PendingGroup] = field(default_factory=list)


@dataclass(slots=True)
class SampledGroups:
    """What a step trains on, and what it cost."""

    groups: list[Group]
    accounting: Accounting
    events: list[str] = field(default_factory=list)
    resolved: list[Group] = field(default_factory=list)  # every complete group of the step, mixed or not
    submitted: list[Problem] = field(default_factory=list)  # of the prompts tried, in order
    entries: list[Entry] = field(default_factory=list)  # what became of every group, for the ledger
    seconds: float = 0.0


GroupProgress = Callable[[int, int], None]  # (mixed groups known, groups wanted)


class SelectionRule(Protocol):
    """What may be chosen and when, and what happens to the surplus."""

    def n_to_submit(self) -> int:
        """Groups to start before the engine's next tick."""
        ...

    def is_known(self, group: PendingGroup) -> bool:
        """Is the outcome of this group certain enough to count towards the acceptance rate?"""
        ...

    def observe(self, known: Sequence[PendingGroup]) -> int:
        """Take note of groups whose outcome has just become known. Returns the mixed groups so far."""
        ...

    def choose(self) -> list[Group] | None:
        """The step's groups once they are certain, else None. Ends the sampling: every other group is accounted for."""
        ...


class GroupSampler:
    """One step's sampling in progress: submits groups, advances the engine, observes verdicts, accounts for tokens."""

    def __init__(
        self,
        collector: Collector,
        source: ProblemSource,
        config: SamplingConfig,
        state: SamplingState,
        *,
        max_prompts_tried: int,
        progress: GroupProgress,
    ) -> None:
        self.collector = collector
        self.source = source
        self.config = config
        self.state = state
        self.budget = max_prompts_tried
        self.progress = progress
        self.accounting = Accounting()
        self.groups: list[PendingGroup] = []  # of this step, in submission order
        self.open: list[PendingGroup] = []  # outcome not known yet
        self.resolved: list[Group] = []
        self.is_exhausted = False  # budget spent, or every problem tried

    @property
    def wanted(self) -> int:
        """Groups this step has to find: all but those held from a skipped step."""
        return self.config.prompts_per_step - len(self.state.held)

    def run(self, rule: SelectionRule) -> list[Group]:
        """Submit, advance and observe until the rule has made its choice."""
        start_tick = self.collector.engine.tick
        while (chosen := rule.choose()) is None:
            if not self.is_exhausted:
                self.submit(rule.n_to_submit())
            self.collector.advance()
            self.observe(rule)
        self.accounting.ticks = self.collector.engine.tick - start_tick
        return chosen

    def submit(self, n: int) -> None:
        for _ in range(n):
            submission = self.source.next() if len(self.groups) < self.budget else None
            if submission is None:
                self.is_exhausted = True
                return
            group = self.collector.submit(*submission)
            self.groups.append(group)
            self.open.append(group)

    def observe(self, rule: SelectionRule) -> None:
        known: list[PendingGroup] = []
        still_open: list[PendingGroup] = []
        for group in self.open:  # one pass: it is made after every tick
            if rule.is_known(group):
                known.append(group)
            elif not group.is_dropped:
                still_open.append(group)
        self.open = still_open
        for group in known:
            self.state.acceptance.observe(group.is_mixed)
        wanted = self.wanted
        self.progress(min(wanted, rule.observe(known)), wanted)

    def count(self, pending: PendingGroup) -> Group:
        """Account for a complete group. Dynamic sampling trains on mixed groups only: other tokens are waste."""
        self.collector.forget(pending)
        group = pending.finished()
        self.resolved.append(group)
        self.accounting.resolved(group)
        if self.config.dynamic and not group.is_mixed:
            self.accounting.wasted(group)
        return group
