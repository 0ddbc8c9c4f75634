"""The tokens and minutes that a run may use, and those it has used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dapo.config.schema import TrainConfig
from dapo.distributed.world import ALONE, World


@dataclass(slots=True)
class RunBudget:
    """Counted over all steps so far, those of value pretraining included."""

    limits: TrainConfig
    world: World = ALONE
    generated_tokens: int = 0
    seconds: float = 0.0
    spent: str = ""  # why the run ends; empty while it may continue

    @property
    def is_spent(self) -> bool:
        return bool(self.spent)

    def ends_with(self, generated_tokens: int) -> bool:
        """Will a step that generates so many tokens be the last?"""
        limit = self.limits.max_generated_tokens
        return limit is not None and self.generated_tokens + generated_tokens >= limit

    def spend(self, *lines: Mapping[str, Any]) -> None:
        """Add tokens and time from the lines of steps, also of value pretraining. The first rank's clock decides."""
        for line in lines:
            self.generated_tokens += int(line.get("tokens/generated", 0))
            self.seconds += float(line.get("timing.step_s", 0.0))
        limits = self.limits
        if limits.max_minutes is not None and self.world.from_first(self.seconds) / 60 >= limits.max_minutes:
            self.spent = f"train.max_minutes = {limits.max_minutes:g} is spent"
        if limits.max_generated_tokens is not None and self.generated_tokens >= limits.max_generated_tokens:
            self.spent = f"train.max_generated_tokens = {limits.max_generated_tokens} is spent"
