"""Work split over ranks so that each has about as much of it. Every rank computes the same split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Item = TypeVar("Item", int, str)


def balanced(costs: Mapping[Item, int], n_ranks: int) -> list[list[Item]]:
    """Every item to one rank: the most expensive first, each to the rank with the least cost so far."""
    parts: list[list[Item]] = [[] for _ in range(n_ranks)]
    loads = [0] * n_ranks
    for item in sorted(costs, key=lambda item: (-costs[item], item)):
        rank = min(range(n_ranks), key=lambda rank: (loads[rank], rank))
        parts[rank].append(item)
        loads[rank] += costs[item]
    return parts
