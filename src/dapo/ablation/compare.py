"""Intervals and paired differences over seeds and problems; steps, tokens and minutes to the baseline's best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo.ablation.measure import Evaluated, Measured
from dapo.evaluation.avg_at_k import Estimate
from dapo.report.paired import Difference, Matrix, paired_difference, resampled_means


def estimate(scores: Matrix) -> Estimate:
    """Mean over seeds and problems with its 95 % interval."""
    low, high = np.quantile(resampled_means(scores), [0.025, 0.975])
    return Estimate(float(scores.mean()), float(low), float(high))


def end_scores(runs: Sequence[Measured]) -> Matrix:
    return np.stack([run.end.scores for run in runs])


def late_scores(runs: Sequence[Measured]) -> Matrix:
    return np.stack([run.late for run in runs])


def best_scores(runs: Sequence[Measured]) -> Matrix:
    return np.stack([run.best.scores for run in runs])


def compare_runs(runs: Sequence[Measured], others: Sequence[Measured]) -> Difference | None:
    """Late scores on the seeds that both have; None without common seeds or with different problems."""
    mine, theirs = {run.seed: run for run in runs}, {run.seed: run for run in others}
    seeds = [seed for seed in mine if seed in theirs]
    if not seeds or any(mine[seed].problems != theirs[seed].problems for seed in seeds):
        return None
    pairs = [(mine[seed], theirs[seed]) for seed in seeds]
    own, other = late_scores([run for run, _ in pairs]), late_scores([run for _, run in pairs])
    steps = min(run.end.step for pair in pairs for run in pair)
    return paired_difference(own, other).judged(steps=steps, changed=int((own != other).any(axis=0).sum()))


# ------------------------------------------------------------------ curves


@dataclass(frozen=True, slots=True)
class Point:
    """The mean over seeds at a step that all of them evaluated."""

    step: int
    updates: float
    tokens: float
    minutes: float
    avg: float


def mean_curve(runs: Sequence[Sequence[Evaluated]]) -> list[Point]:
    """At steps that every seed evaluated; each seed's last evaluation makes the last point, wherever it was."""
    by_step = [{evaluation.step: evaluation for evaluation in run} for run in runs]
    shared = sorted(set.intersection(*(set(steps) for steps in by_step)))
    points = [point([steps[step] for steps in by_step]) for step in shared]
    last = point([run[-1] for run in runs])
    return [*(p for p in points if p.step < last.step), last]


def point(evaluations: Sequence[Evaluated]) -> Point:
    return Point(
        step=round(float(np.mean([e.step for e in evaluations]))),
        updates=float(np.mean([e.spent.updates for e in evaluations])),
        tokens=float(np.mean([e.spent.tokens for e in evaluations])),
        minutes=float(np.mean([e.spent.seconds for e in evaluations])) / 60,
        avg=float(np.mean([e.avg for e in evaluations])),
    )


def reaching(curve: Sequence[Point], target: float) -> Point | None:
    """The first point at or above the target."""
    return next((p for p in curve if p.avg >= target), None)


def difference_json(change: Difference | None) -> dict[str, Any] | None:
    """A difference; p is null where it is withheld, with the reason next to it."""
    if change is None:
        return None
    found = as_json(change)
    if change.insufficient_evidence:
        return found | {"p": None}
    return {name: value for name, value in found.items() if name != "insufficient_evidence"}


def as_json(value: Any) -> dict[str, Any]:
    """A small frozen dataclass as JSON, floats to six digits."""
    return {
        name: float(f"{field:.6g}") if isinstance(field, float) else field
        for name, field in ((name, getattr(value, name)) for name in value.__dataclass_fields__)
    }
