"""One step's batch on its way through the updates: what every function of the learner needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dapo.config.schema import Config
from dapo.learner.batch import Batch
from dapo.learner.critic import Values
from dapo.learner.learner import Learner
from dapo.learner.ragged import Ragged
from dapo.learner.sums import Sums

Event = Callable[[str, str], None]  # (kind, message)


@dataclass(slots=True)
class StepRecord:
    """Ratio and clip of each token in the first update that trains on it: for the rollout browser."""

    ratio: Ragged
    clip: Ragged  # −1, 0, +1


@dataclass(slots=True)
class Step:
    """Who learns from which batch, in which updates, at which rates; and the sums that become metrics."""

    learner: Learner
    batch: Batch
    config: Config
    update_rows: Sequence[Sequence[int]] = ()  # the rows of each update
    lr: float = 0.0
    critic_lr: float = 0.0
    event: Event = lambda _kind, _message: None
    record: StepRecord | None = None
    values: Values | None = None  # with a critic, once it has given its values
    sums: Sums = field(default_factory=Sums)

    @property
    def rows(self) -> list[int]:
        """All rows of the batch, also those that no update trains on."""
        return list(range(len(self.batch.lengths)))
