"""Dynamic sampling's constraint (DAPO eq. 11): which groups have advantages other than 0. No torch here."""

from __future__ import annotations

from collections.abc import Iterable


def is_mixed(outcomes: Iterable[float]) -> bool:
    """0 < correct < G: not all outcomes of a group are the same, 1 for correct and 0 for wrong.

    Differs from the paper for graded rewards: their outcomes are the raw values. Of a group without
    all its verdicts it can be said as soon as two outcomes differ.
    """
    return len(set(outcomes)) > 1
