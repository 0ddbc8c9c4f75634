"""Whose turn it is: sources interleaved by weight, the same from any position, never a whole prompt off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from dapo.errors import CheckpointError


class Turns:
    """An endless series of turns, each one source's, from the weights alone.

    Turn n (from 0) goes, among the sources that are not ahead of their share (c < w·(n + 1), for c turns had and a
    share w), to the one whose next turn is due first, at (c + 1)/w; of equals, to the first of the table. That is
    earliest deadline first on one processor, which keeps |c − w·n| < 1 for every source at every n: in any window of m
    turns a source is less than two turns off its share. Counted in integers: nothing drifts, and counts are all state.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        common = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * common) for weight in exact]
        self._total = sum(self._weights)
        self.counts = [0] * len(weights)

    def next(self) -> int:
        """The source whose turn it is; counts as had."""
        n = sum(self.counts)
        due = [
            (Fraction(had + 1, weight), at)
            for at, (had, weight) in enumerate(zip(self.counts, self._weights, strict=True))
            if had * self._total < weight * (n + 1)
        ]
        _, at = min(due)
        self.counts[at] += 1
        return at

    def place(self, counts: Sequence[int]) -> None:
        """Go on from these counts, which must be ones that the weights lead to."""
        n = sum(counts)
        if len(counts) != len(self._weights) or any(
            abs(had * self._total - weight * n) >= self._total
            for had, weight in zip(counts, self._weights, strict=True)
        ):
            raise CheckpointError(
                f"data cursor: turns {list(counts)} do not follow from the weights of data.train.",
                remedy="The checkpoint is damaged; resume from an earlier one.",
            )
        self.counts = list(counts)
