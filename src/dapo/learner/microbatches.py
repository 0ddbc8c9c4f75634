"""Which rank trains on which rows of an update, in which micro-batches; every rank computes the same split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dapo.distributed.balance import balanced
from dapo.distributed.world import World
from dapo.learner.batch import Batch, split_into_microbatches
from dapo.learner.ragged import Ragged


@dataclass(frozen=True, slots=True)
class Micro:
    """Rows of one forward and backward pass. A rank runs a dummy only because the pass is collective."""

    rows: list[int]
    is_dummy: bool = False


def split_over_ranks(batch: Batch, rows: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Every row to one rank, so that tokens balance."""
    if n_ranks == 1:
        return [list(rows)]
    return [sorted(part) for part in balanced({row: batch.tokens(row) for row in rows}, n_ranks)]


def own_microbatches(batch: Batch, rows: Sequence[int], budget: int, world: World, *, lockstep: bool) -> list[Micro]:
    """This rank's micro-batches of an update. In `lockstep` every rank has as many, because passes are collective.

    A rank that has fewer runs the shortest row once more as a dummy, whose gradient is 0.
    """
    ranks = [split_into_microbatches(batch, part, budget) for part in split_over_ranks(batch, rows, world.size)]
    own = [Micro(part) for part in ranks[world.rank]]
    if lockstep and rows:
        shortest = min(rows, key=lambda row: (batch.tokens(row), row))
        own += [Micro([shortest], is_dummy=True)] * (max(map(len, ranks)) - len(own))
    return own


def own_rows(batch: Batch, rows: Sequence[int], world: World) -> list[int]:
    return split_over_ranks(batch, rows, world.size)[world.rank]


def all_reduce_rows(world: World, values: Iterable[Ragged], rows: Sequence[int], own: Sequence[int]) -> None:
    """All-reduce the values of `rows`, each of which one rank has computed: the one that has it among its `own`."""
    if world.size == 1 or not rows:
        return
    mine = set(own)
    kept = list(values)
    joined = [ragged.joined(rows, "cpu") for ragged in kept]
    for ragged, flat in zip(kept, joined, strict=True):
        at = 0
        for row in rows:
            length = ragged.lengths[row]
            if row not in mine:
                flat[at : at + length] = 0  # and a sum with zeros is exact
            at += length
    world.sum_(joined)
    for ragged, flat in zip(kept, joined, strict=True):
        ragged.put(rows, flat)
