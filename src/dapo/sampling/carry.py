"""Carry-over and partial rollouts (not the paper's algorithm): what a step does not use, a later step may.

A step takes the first N informative groups that are complete, without waiting for slower ones: those come later,
within the staleness bound, instead of being lost. Staleness is counted in updates, from the oldest token. Tokens of a
group are accounted for in the step that trains on it or gives it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dapo.sampling.accounting import n_tokens
from dapo.sampling.collect import PendingGroup
from dapo.sampling.dynamic import StepFill
from dapo.types import Completion, Group


def oldest_version(group: Group) -> int:
    """Of the weights that drew its first token; 0 for a group without tokens."""
    return _oldest(group.completions, default=0)


def _oldest(completions: Iterable[Completion | None], default: int) -> int:
    return min((int(c.version.min()) for c in completions if c is not None and len(c.version)), default=default)


class CarryOver:
    """Implements `SelectionRule` at weight version `version`, which does not change while a step fills."""

    def __init__(self, fill: StepFill, version: int) -> None:
        self.fill, self.version = fill, version
        self.ready: list[Group] = []  # informative, complete and within the staleness bound
        self.stale: list[Group] = []
        state = fill.state
        for group in (*state.held, *state.carried):
            self.admit(group)
        state.held, state.carried = [], []
        # A group with a token beyond the bound can never be used: stop generating it.
        late = [group for group in state.pending if self.is_stale(_oldest(group.completions, default=version))]
        if late:
            tokens = sum(group.n_tokens for group in late) + fill.collector.drop(late)
            fill.accounting.wasted_tokens["stale"] += tokens
        state.pending = fill.open = [group for group in state.pending if not group.is_dropped]

    def is_stale(self, oldest: int) -> bool:
        bound = self.fill.config.max_staleness_updates
        return bound is not None and self.version - oldest > bound

    def admit(self, group: Group) -> None:
        (self.stale if self.is_stale(oldest_version(group)) else self.ready).append(group)

    def n_to_submit(self) -> int:
        """Keep the engine busy: what this step does not use, the next one does.

        Without partial rollouts the step waits for everything it starts, so it starts only what it is likely to need.
        """
        config, room = self.fill.config, self.fill.collector.room()
        if config.partial_rollouts:
            return room
        n_open, rate = len(self.fill.open), self.fill.state.acceptance.rate
        enough = (n for n in range(room) if len(self.ready) + (n_open + n) * rate >= config.prompts_per_step)
        return next(enough, room)

    def is_known(self, group: PendingGroup) -> bool:
        return group.is_resolved

    def observe(self, known: Sequence[PendingGroup]) -> int:
        for pending in known:
            group = self.fill.count(pending)
            if group.is_informative:
                self.admit(group)
        return len(self.ready)

    def choose(self) -> list[Group] | None:
        """The first complete groups; with `relax` also the youngest beyond the bound, if too few are within it."""
        fill, config = self.fill, self.fill.config
        is_full = len(self.ready) >= config.prompts_per_step and (config.partial_rollouts or not fill.open)
        if not is_full and (fill.open or not fill.is_exhausted):
            return None
        chosen, surplus = self.ready[: config.prompts_per_step], self.ready[config.prompts_per_step :]
        if config.fill_policy == "relax":
            missing = config.prompts_per_step - len(chosen)
            self.stale.sort(key=oldest_version, reverse=True)
            chosen, self.stale = chosen + self.stale[:missing], self.stale[missing:]
        fill.state.pending = fill.open
        fill.accounting.prompts_tried = len(fill.groups)
        fill.accounting.wasted_tokens["stale"] += sum(map(n_tokens, self.stale))
        if config.carry_over:
            fill.state.carried = surplus
        else:
            fill.accounting.wasted_tokens["surplus"] += sum(map(n_tokens, surplus))
        return chosen
