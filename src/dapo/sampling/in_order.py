"""In-order selection: a step takes the first N mixed groups in order of submission.

A group is taken once every earlier one has all its verdicts. How many groups run at the same time changes only what is
wasted, never what is chosen. So short responses are not preferred, and neither scheduling nor rank layout nor a restart
can change what is trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dapo.sampling.collect import PendingGroup
from dapo.sampling.dynamic import GroupSampler
from dapo.types import Group


class InOrder:
    """Implements `SelectionRule`. Without dynamic sampling every group counts, and the step takes all it submits."""

    def __init__(self, sampler: GroupSampler) -> None:
        self.sampler = sampler

    def n_to_submit(self) -> int:
        sampler, config = self.sampler, self.sampler.config
        if not config.dynamic:
            return sampler.wanted - len(sampler.groups)
        if config.schedule == "rounds":
            is_round_over = all(group.is_resolved for group in sampler.groups)
            return config.generation_multiple * sampler.wanted if is_round_over else 0
        return self.n_to_stream()

    def n_to_stream(self) -> int:
        """Groups still missing if open ones end mixed at the recent rate; at most what the engine has room for."""
        room = self.sampler.collector.room()
        if room == 0:
            return 0
        missing = self.sampler.wanted - sum(self.chance(group) for group in self.sampler.groups if not group.is_dropped)
        return max(0, min(room, math.ceil(missing / self.sampler.state.acceptance.rate)))

    def chance(self, group: PendingGroup) -> float:
        """Estimated probability of ending mixed: 1 if already mixed, else the recent rate, less with every verdict."""
        if group.is_mixed:
            return 1.0
        return self.sampler.state.acceptance.rate * (1 - group.n_verdicts / len(group.judgements))

    def is_known(self, group: PendingGroup) -> bool:
        return group.is_resolved or group.is_mixed

    def observe(self, known: Sequence[PendingGroup]) -> int:  # noqa: ARG002
        """Groups behind the N-th known mixed one cannot be chosen any more, whatever the earlier ones become."""
        positions = [position for position, group in enumerate(self.sampler.groups, 1) if group.is_mixed]
        if self.sampler.config.schedule == "stream" and len(positions) >= self.sampler.wanted:
            self.drop_after(positions[self.sampler.wanted - 1])
        return len(positions)

    def choose(self) -> list[Group] | None:
        """The first mixed groups. What was submitted after the last of them is surplus, to be resampled later."""
        sampler = self.sampler
        n_used = self.n_used()
        if n_used is None:
            return None
        counted = [sampler.count(group) for group in sampler.groups[:n_used]]
        self.drop_after(n_used)
        sampler.accounting.wasted_tokens["surplus"] += sum(group.n_tokens for group in sampler.groups[n_used:])
        sampler.accounting.prompts_tried = n_used
        sampler.source.rewind(n_used)
        held, sampler.state.held = sampler.state.held, []
        return held + [group for group in counted if group.is_mixed or not sampler.config.dynamic]

    def n_used(self) -> int | None:
        """Submissions up to the last group needed, or up to the last one there is; None: not known yet."""
        sampler, config = self.sampler, self.sampler.config
        if config.schedule == "rounds" and not all(group.is_resolved for group in sampler.groups):
            return None
        n_found = 0
        for position, group in enumerate(sampler.groups, 1):
            if not group.is_resolved:
                return None
            n_found += group.is_mixed or not config.dynamic
            if n_found == sampler.wanted:
                return position
        return len(sampler.groups) if sampler.is_exhausted else None

    def drop_after(self, n_used: int) -> None:
        late = [group for group in self.sampler.groups[n_used:] if not group.is_dropped]
        if late:
            self.sampler.accounting.wasted_tokens["aborted"] += self.sampler.collector.drop(late)
