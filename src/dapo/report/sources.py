"""The sources of a mixture, each on its own: what was asked of it, what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.report.load import RunRecord, is_number

SHOWN = 40  # sources; a table may name more
METRICS = ("share_submitted", "share_kept", "accuracy", "groups_kept", "length", "waste", "pass_rate", "retired")


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """One source as its run recorded it."""

    name: str
    wanted: float | None  # its share of the weights
    path: str
    verifier: str
    lines: Sequence[Mapping[str, Any]]  # the run's metrics

    def value(self, line: Mapping[str, Any], metric: str) -> float | None:
        value: Any = line.get(f"source/{self.name}/{metric}")
        return float(value) if is_number(value) else None

    def series(self, metric: str) -> list[float | None]:
        return [self.value(line, metric) for line in self.lines]

    @property
    def submitted(self) -> float | None:
        """Its share of all prompts submitted so far."""
        return weighted(self.series("share_submitted"), [line.get("sampling/prompts_tried") for line in self.lines])

    @property
    def kept(self) -> float | None:
        """Its share of all groups trained on so far."""
        return weighted(self.series("share_kept"), [line.get("sampling/groups_trained") for line in self.lines])

    def over_last(self, metric: str, n_prompts: int) -> tuple[float | None, int, int]:
        """The mean of a metric over its last prompts, at least `n_prompts` where there are so many, their number and
        the step they begin with."""
        known = [
            (int(line["step"]), value, int(tried))
            for line in reversed(self.lines)
            if (value := self.value(line, metric)) is not None and (tried := self.value(line, "prompts_tried"))
        ]
        taken = 0
        for at, (_, _, tried) in enumerate(known, start=1):
            taken += tried
            if taken >= n_prompts:
                known = known[:at]
                break
        mean = weighted([value for _, value, _ in known], [tried for _, _, tried in known])
        return mean, sum(tried for _, _, tried in known), known[-1][0] if known else 0


def weighted(values: Sequence[float | None], weights: Sequence[Any]) -> float | None:
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None and is_number(w) and w > 0]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None


def sources_of(run: RunRecord) -> list[SourceRecord]:
    """In the order of data.train; none where that is no table. A config of somebody else's may hold anything."""
    table = run.key("data", "train")
    if not isinstance(table, dict):
        return []
    own = {name: one if isinstance(one, dict) else {} for name, one in list(table.items())[:SHOWN]}
    weights = {name: one.get("weight", 1.0) for name, one in own.items()}
    known = [weight for weight in weights.values() if is_number(weight) and weight > 0]
    default = run.key("rewards", "verifier", default="?")
    return [
        SourceRecord(
            name=name,
            wanted=weights[name] / sum(known) if len(known) == len(weights) else None,
            path=said(one.get("path"), name),
            verifier=said(one.get("verifier"), str(default)),
            lines=run.metrics,
        )
        for name, one in own.items()
    ]


def said(value: object, default: str) -> str:
    return default if value in (None, "none") else str(value)


def train_of(run: RunRecord) -> str:
    """What data.train names, in words."""
    train = run.key("data", "train", default="?")
    return ", ".join(map(str, train)) if isinstance(train, dict) else str(train)
