"""Carry-over and partial rollouts (not the paper's algorithm): what a step does not use, a later step may.

With partial rollouts a step takes the first N mixed groups that are complete, without waiting for stragglers: those
are overtaken (left unfinished by a step), and a later step trains on them if they end within the staleness bound. So
short groups come first, and long ones late or never. `sampling.finish_overtaken` limits that: a step waits for groups
that would be too old in the next.

Staleness is counted in updates, from the oldest token. Tokens of a group are accounted for in the step that trains on
it or gives it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dapo.sampling.accounting import n_tokens
from dapo.sampling.collect import PendingGroup
from dapo.sampling.dynamic import GroupSampler
from dapo.types import Completion, Group


def oldest_version(group: Group) -> int:
    """Of the weights that sampled its first token; 0 for a group without tokens."""
    return _oldest(group.completions, default=0)


def _oldest(completions: Iterable[Completion | None], default: int) -> int:
    return min((int(c.version.min()) for c in completions if c is not None and len(c.version)), default=default)


class CarryOver:
    """Implements `SelectionRule` at weight version `version`, which does not change while a step samples.

    The version grows by `updates_per_step` from step to step, or by less.
    """

    def __init__(self, sampler: GroupSampler, version: int, updates_per_step: int = 1) -> None:
        self.sampler, self.version = sampler, version
        bound = sampler.config.max_staleness_updates or 0
        self.usable_steps = max(1, bound // updates_per_step)  # later steps in which a group may still be trained on
        self.ready: list[Group] = []  # mixed, complete and within the staleness bound
        self.stale: list[Group] = []
        state = sampler.state
        for group in (*state.held, *state.carried):
            self.admit(group)
        state.held, state.carried = [], []
        # A group with a token beyond the bound can never be used: stop generating it.
        late = [group for group in state.pending if self.is_stale(_oldest(group.completions, default=version))]
        if late:
            tokens = sum(group.n_tokens for group in late) + sampler.collector.drop(late)
            sampler.accounting.wasted_tokens["stale"] += tokens
            sampler.accounting.groups_stale += len(late)
            sampler.accounting.overtaken(tokens, sum(len(group.completions) for group in late))
        state.pending = sampler.open = [group for group in state.pending if not group.is_dropped]

    def is_stale(self, oldest: int) -> bool:
        bound = self.sampler.config.max_staleness_updates
        return bound is not None and self.version - oldest > bound

    def admit(self, group: Group) -> None:
        (self.stale if self.is_stale(oldest_version(group)) else self.ready).append(group)

    def n_to_submit(self) -> int:
        """Keep the engine busy: what this step does not use, the next one does.

        Without partial rollouts the step waits for everything it starts, so it starts only what it is likely to need.
        """
        config, room = self.sampler.config, self.sampler.collector.room()
        if config.partial_rollouts and not config.finish_overtaken:
            return room
        carrying = self.usable_steps if config.partial_rollouts and config.carry_over else 0
        wanted = config.prompts_per_step * (1 + carrying)  # more would be too old before its turn
        n_open, rate = len(self.sampler.open), self.sampler.state.acceptance.rate
        enough = (n for n in range(room) if len(self.ready) + (n_open + n) * rate >= wanted)
        return next(enough, room)

    def is_known(self, group: PendingGroup) -> bool:
        return group.is_resolved

    def observe(self, known: Sequence[PendingGroup]) -> int:
        for pending in known:
            group = self.sampler.count(pending)
            if group.is_mixed:
                if pending.overtaken:
                    self.sampler.accounting.overtaken(n_tokens(group), len(group.completions))
                self.admit(group)
        return len(self.ready)

    def waits(self) -> bool:
        """Whether the step waits though it has enough groups: for all it began, or for what earlier ones overtook."""
        config = self.sampler.config
        if not config.partial_rollouts:
            return bool(self.sampler.open)
        return config.finish_overtaken and any(group.overtaken >= self.usable_steps for group in self.sampler.open)

    def choose(self) -> list[Group] | None:
        """The first complete groups; with `relax` also the youngest beyond the bound, if too few are within it."""
        sampler, config = self.sampler, self.sampler.config
        is_full = len(self.ready) >= config.prompts_per_step and not self.waits()
        if not is_full and (sampler.open or not sampler.is_exhausted):
            return None
        if config.finish_overtaken:
            self.ready.sort(key=oldest_version)  # those that were waited for, before those that have just come
        chosen, surplus = self.ready[: config.prompts_per_step], self.ready[config.prompts_per_step :]
        if config.fill_policy == "relax":
            missing = config.prompts_per_step - len(chosen)
            self.stale.sort(key=oldest_version, reverse=True)
            chosen, self.stale = chosen + self.stale[:missing], self.stale[missing:]
        sampler.state.pending = sampler.open
        for group in sampler.open:
            group.overtaken += 1
        sampler.accounting.groups_overtaken = len(sampler.open)
        sampler.accounting.groups_stale += len(self.stale)
        sampler.accounting.prompts_tried = len(sampler.groups)
        sampler.accounting.wasted_tokens["stale"] += sum(map(n_tokens, self.stale))
        if config.carry_over:
            sampler.state.carried = surplus
        else:
            sampler.accounting.wasted_tokens["surplus"] += sum(map(n_tokens, surplus))
        return chosen
