"""Sums over the micro-batches of a step: denominators counted before, observations divided once at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dapo.distributed.world import World
from dapo.learner.batch import Batch


@dataclass(slots=True)
class Totals:
    """The denominators of one update, counted before its micro-batch loop: all micro-batches divide by the same."""

    tokens: int
    sequences: int
    prompts: int
    group_tokens: Tensor  # [P]
    positive_tokens: int

    @classmethod
    def of(cls, batch: Batch, rows: Sequence[int]) -> Totals:
        tokens = torch.zeros(len(batch.groups), dtype=torch.long)
        for row in rows:
            tokens[batch.group[row]] += batch.lengths[row]
        return cls(
            tokens=sum(batch.lengths[row] for row in rows),
            sequences=len(rows),
            prompts=int((tokens > 0).sum()),
            group_tokens=tokens,
            positive_tokens=sum(batch.lengths[row] for row in rows if batch.is_correct[row]),
        )


@dataclass(slots=True)
class Sums:
    """Sums and counts over the micro-batches of a step; divided once, at the end.

    They stay on the device, in float64: reading one would make the host wait.
    """

    sums: dict[str, Tensor | float] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            exact = value.detach().double() if isinstance(value, Tensor) else float(value)
            self.sums[name] = self.sums[name] + exact if name in self.sums else exact

    def peak(self, **values: Tensor) -> None:
        for name, value in values.items():
            exact = value.detach().double()
            self.largest[name] = torch.maximum(self.largest[name], exact) if name in self.largest else exact

    def total(self, name: str) -> float:
        return float(self.sums.get(name, 0.0))

    def ratio(self, name: str, per: str) -> float:
        return self.total(name) / self.total(per) if self.total(per) else 0.0

    def merge(self, other: Sums) -> None:
        self.add(**other.sums)
        self.peak(**other.largest)

    def across(self, world: World) -> Sums:
        """Sums over the ranks, largest of the ranks', on the host."""
        own = self.read()
        if world.size == 1:
            return own
        made = Sums()
        peaks = {name: float(value) for name, value in own.largest.items()}
        for sums, largest in world.gather([own.sums, peaks]):
            made.add(**sums)
            made.peak(**{name: torch.tensor(value, dtype=torch.float64) for name, value in largest.items()})
        return made

    def read(self) -> Sums:
        """All of them on the host, fetched together."""
        names = [name for name, value in self.sums.items() if isinstance(value, Tensor)]
        values = [torch.as_tensor(value) for value in (*(self.sums[name] for name in names), *self.largest.values())]
        fetched = torch.stack(values).cpu() if values else torch.empty(0)
        sums = dict(zip(names, fetched[: len(names)].tolist(), strict=True))
        return Sums(self.sums | sums, dict(zip(self.largest, fetched[len(names) :].unbind(), strict=True)))
