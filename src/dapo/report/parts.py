"""The parts of a run's reward, as its metrics and its config have them."""

from __future__ import annotations

from dapo.report.load import RunRecord, is_number
from dapo.report.part_columns import MOST_PARTS
from dapo.tracking.metrics import part_names
from dapo.types import CORRECT, PART_NAME

SHOWN_PARTS = MOST_PARTS + 1  # with the verifier's own


def parts_of(run: RunRecord) -> list[tuple[str, float | None]]:
    """(name, weight) of each part that has metrics, in their order; a part that is only recorded has no weight."""
    seen = part_names(name for line in run.metrics for name in line)
    names = [name for name in seen if PART_NAME.fullmatch(name)][:SHOWN_PARTS]
    return [(name, weight_of(run, name)) for name in names]


def weight_of(run: RunRecord, name: str) -> float | None:
    weight = run.key("rewards", "parts", name, "weight", default=1.0 if name == CORRECT else None)
    return float(weight) if is_number(weight) else None
