"""What learns: policy, optimizer, critic, and how far they have come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dapo.distributed.shards import refresh
from dapo.distributed.world import ALONE, World
from dapo.models.policy import Policy
from dapo.trainer.batch import Batch
from dapo.trainer.dealing import Micro, own_microbatches
from dapo.trainer.optimizer import Optimizer
from dapo.trainer.value import ValueLearner


@dataclass(slots=True)
class Learner:
    """What learns, and how far it has come."""

    policy: Policy
    optimizer: Optimizer
    reference: Policy | None = None  # frozen; only with a KL term
    value: ValueLearner | None = None  # the critic; only with GAE
    tokens_per_microbatch: int | None = None  # smaller than the config's after the device ran out of memory
    recomputes_all: bool = False  # gradient_checkpointing = "auto" left too little memory: every layer from then on
    updates: int = 0  # optimizer updates since the start; the version of the weights
    bad_updates: int = 0  # skipped in a row
    world: World = ALONE
    gathered: Policy | None = None  # with a sharded policy: a whole copy, for the engine and for saving

    @property
    def whole(self) -> Policy:
        """The policy with all its weights on this rank, as of the last `publish`."""
        return self.policy if self.gathered is None else self.gathered

    @property
    def is_sharded(self) -> bool:
        return self.gathered is not None

    def publish(self) -> Policy:
        """The whole policy with the newest weights. All ranks take part."""
        if self.gathered is not None:
            refresh(self.gathered, self.policy)
        return self.whole

    def sum_gradients(self, *, now: bool) -> None:
        """A sharded policy's gradients are summed over the ranks after each micro-batch: no rank holds all of them.

        One rank holds all of them anyway: its own wait for the update's last micro-batch.
        """
        if self.is_sharded and self.world.size == 1:
            sharded: Any = self.policy
            sharded.set_requires_gradient_sync(now)

    def microbatches(self, batch: Batch, rows: Sequence[int], budget: int) -> list[Micro]:
        """This rank's part of the work on `rows`."""
        return own_microbatches(batch, rows, budget, self.world, in_step=self.is_sharded)
