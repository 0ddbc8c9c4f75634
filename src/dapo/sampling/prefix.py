"""The prefix rule: a step takes the first N informative groups in order of submission.

A group is taken once every earlier one is resolved. How many groups run at the same time changes only what is wasted,
never what is chosen. So short responses are not preferred, and neither scheduling nor rank layout nor a restart can
change what is trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dapo.sampling.collect import PendingGroup
from dapo.sampling.dynamic import StepFill
from dapo.types import Group


class PrefixRule:
    """Implements `SelectionRule`. Without dynamic sampling every group counts, and the prefix is the whole step."""

    def __init__(self, fill: StepFill) -> None:
        self.fill = fill

    def n_to_submit(self) -> int:
        fill, config = self.fill, self.fill.config
        if not config.dynamic:
            return fill.wanted - len(fill.groups)
        if config.schedule == "rounds":
            is_round_over = all(group.is_resolved for group in fill.groups)
            return config.generation_multiple * fill.wanted if is_round_over else 0
        return self.n_to_stream()

    def n_to_stream(self) -> int:
        """Groups still missing if the open ones turn out as groups did lately; at most what the engine has room for."""
        room = self.fill.collector.room()
        if room == 0:
            return 0
        missing = self.fill.wanted - sum(self.chance(group) for group in self.fill.groups if not group.is_dropped)
        return max(0, min(room, math.ceil(missing / self.fill.state.acceptance.rate)))

    def chance(self, group: PendingGroup) -> float:
        """That this group ends informative: certain, or as often as lately, less with each further equal verdict."""
        if group.is_informative:
            return 1.0
        return self.fill.state.acceptance.rate * (1 - group.n_judged / len(group.judgements))

    def is_known(self, group: PendingGroup) -> bool:
        return group.is_resolved or group.is_informative

    def observe(self, known: Sequence[PendingGroup]) -> int:  # noqa: ARG002
        """Groups behind the N-th known informative one cannot be chosen any more, whatever the earlier ones become."""
        places = [place for place, group in enumerate(self.fill.groups, 1) if group.is_informative]
        if self.fill.config.schedule == "stream" and len(places) >= self.fill.wanted:
            self.drop_after(places[self.fill.wanted - 1])
        return len(places)

    def choose(self) -> list[Group] | None:
        """The informative groups of the prefix. What ran beyond it is surplus, and its problems come again."""
        fill = self.fill
        n_used = self.n_used()
        if n_used is None:
            return None
        counted = [fill.count(group) for group in fill.groups[:n_used]]
        self.drop_after(n_used)
        fill.accounting.wasted_tokens["surplus"] += sum(group.n_tokens for group in fill.groups[n_used:])
        fill.accounting.prompts_tried = n_used
        fill.source.rewind(n_used)
        held, fill.state.held = fill.state.held, []
        return held + [group for group in counted if group.is_informative or not fill.config.dynamic]

    def n_used(self) -> int | None:
        """Length of the prefix that ends with the last group needed, or with the last one there is; None: not known."""
        fill, config = self.fill, self.fill.config
        if config.schedule == "rounds" and not all(group.is_resolved for group in fill.groups):
            return None
        n_found = 0
        for place, group in enumerate(fill.groups, 1):
            if not group.is_resolved:
                return None
            n_found += group.is_informative or not config.dynamic
            if n_found == fill.wanted:
                return place
        return len(fill.groups) if fill.is_exhausted else None

    def drop_after(self, n_used: int) -> None:
        late = [group for group in self.fill.groups[n_used:] if not group.is_dropped]
        if late:
            self.fill.accounting.wasted_tokens["aborted"] += self.fill.collector.drop(late)
