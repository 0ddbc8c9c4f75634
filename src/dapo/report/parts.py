"""The parts of a reward: of a run, by its metrics and config; in recorded rollouts, columns, means and histograms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dapo.report.load import RunRecord, is_number
from dapo.tracking.metrics import part_names
from dapo.types import CORRECT, PART_NAME

PART_COLUMN = "reward_part_"  # then the name of a further part: its value before its weight
BINS = 12
MOST_PARTS = 32  # that are shown, the verifier's own not counted
SHOWN_PARTS = MOST_PARTS + 1  # with the verifier's own


def parts_of(run: RunRecord) -> list[tuple[str, float | None]]:
    """(name, weight) of each part that has metrics, in their order; a part that is only recorded has no weight."""
    seen = part_names(name for line in run.metrics for name in line)
    names = [name for name in seen if PART_NAME.fullmatch(name)][:SHOWN_PARTS]
    return [(name, weight_of(run, name)) for name in names]


def weight_of(run: RunRecord, name: str) -> float | None:
    weight = run.key("rewards", "parts", name, "weight", default=1.0 if name == CORRECT else None)
    return float(weight) if is_number(weight) else None


def recorded_parts(columns: Iterable[str]) -> list[str]:
    """The further parts of the reward that a step has recorded."""
    names = [name.removeprefix(PART_COLUMN) for name in columns if name.startswith(PART_COLUMN)]
    return [name for name in names if PART_NAME.fullmatch(name)][:MOST_PARTS]


def mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 6) if known else None


def histogram(values: Sequence[float | None]) -> tuple[int, list[list[float]]]:
    """(In how many responses a part is unknown, [from, to, how many] of each value, of bins where there are many)."""
    known = [value for value in values if value is not None]
    counts = Counter(known)
    if len(counts) <= BINS:
        return len(values) - len(known), [[value, value, n] for value, n in sorted(counts.items())]
    if not np.isfinite(max(known) - min(known)):  # a record may hold anything
        return len(values) - len(known), [[min(known), max(known), len(known)]]
    n_each, edges = np.histogram(known, bins=BINS)
    return len(values) - len(known), [
        [float(f"{a:.6g}"), float(f"{b:.6g}"), int(n)] for a, b, n in zip(edges, edges[1:], n_each, strict=False)
    ]


def is_row_of_parts(row: Any) -> bool:
    """The mean of each part over a group; none where no response has the part."""
    return isinstance(row, list) and all(value is None or is_plain_number(value) for value in row)


def is_histogram(part: Any) -> bool:
    """A part's name, in how many responses it is unknown, and how many have a value from … to …"""
    return (
        isinstance(part, list)
        and len(part) == 3
        and isinstance(part[0], str)
        and is_plain_number(part[1])
        and isinstance(part[2], list)
        and all(isinstance(b, list) and len(b) == 3 and all(map(is_plain_number, b)) for b in part[2])
    )


def is_plain_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
