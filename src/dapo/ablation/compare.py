"""Intervals and paired differences over seeds and problems; steps and tokens to the baseline's best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo.ablation.measure import Evaluated, Measured
from dapo.evaluation.avg_at_k import Estimate

RESAMPLES = 4000
Matrix = NDArray[np.float64]  # [S, P]: seeds x problems


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference with its 95 % interval and the two-sided bootstrap p."""

    value: float
    low: float
    high: float
    p: float
    seeds: int


def resampled_means(scores: Matrix, *, seed: int = 0, resamples: int = RESAMPLES) -> NDArray[np.float64]:
    """Means of `scores` with seeds and problems both drawn with replacement. [resamples]

    Weights instead of index lists: a resample is Σ_sp w_s·v_p·x_sp with multinomial counts w and v.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    S, P = scores.shape
    of_seeds = generator.multinomial(S, np.full(S, 1 / S), size=resamples) / S  # [R, S]
    of_problems = generator.multinomial(P, np.full(P, 1 / P), size=resamples) / P  # [R, P]
    means: NDArray[np.float64] = np.einsum("rs,sp,rp->r", of_seeds, scores, of_problems, optimize=True)
    return means


def estimate(scores: Matrix) -> Estimate:
    """Mean over seeds and problems with its 95 % interval."""
    low, high = np.quantile(resampled_means(scores), [0.025, 0.975])
    return Estimate(float(scores.mean()), float(low), float(high))


def paired_difference(scores: Matrix, other: Matrix) -> Difference:
    """scores − other, the same seeds and problems in the same places."""
    assert scores.shape == other.shape, "pairs need the same seeds and problems"
    difference = scores - other
    means = resampled_means(difference)
    low, high = np.quantile(means, [0.025, 0.975])
    # One more in numerator and denominator: with R resamples p is never below 1/(R + 1).
    below, above = (1 + np.sum(means <= 0)) / (len(means) + 1), (1 + np.sum(means >= 0)) / (len(means) + 1)
    p = min(1.0, 2 * float(min(below, above)))
    return Difference(float(difference.mean()), float(low), float(high), p, len(scores))


def end_scores(runs: Sequence[Measured]) -> Matrix:
    return np.stack([run.end.scores for run in runs])


def late_scores(runs: Sequence[Measured]) -> Matrix:
    return np.stack([run.late for run in runs])


def best_scores(runs: Sequence[Measured]) -> Matrix:
    return np.stack([run.best.scores for run in runs])


def compare_runs(
    runs: Sequence[Measured],
    others: Sequence[Measured],
    scores: Callable[[Sequence[Measured]], Matrix] = late_scores,
) -> Difference | None:
    """By the seeds that both have; None where there is none, or the problems are not the same."""
    mine, theirs = {run.seed: run for run in runs}, {run.seed: run for run in others}
    seeds = [seed for seed in mine if seed in theirs]
    if not seeds or any(mine[seed].problems != theirs[seed].problems for seed in seeds):
        return None
    return paired_difference(scores([mine[seed] for seed in seeds]), scores([theirs[seed] for seed in seeds]))


# ------------------------------------------------------------------ curves


@dataclass(frozen=True, slots=True)
class Point:
    """The mean over seeds at a step that all of them evaluated."""

    step: int
    updates: float
    tokens: float
    avg: float


def mean_curve(runs: Sequence[Measured]) -> list[Point]:
    """At steps that every seed evaluated; each seed's last evaluation makes the last point, wherever it was."""
    by_step = [{evaluation.step: evaluation for evaluation in run.evaluations} for run in runs]
    shared = sorted(set.intersection(*(set(steps) for steps in by_step)))
    points = [point([steps[step] for steps in by_step]) for step in shared]
    last = point([run.end for run in runs])
    return [*(p for p in points if p.step < last.step), last]


def point(evaluations: Sequence[Evaluated]) -> Point:
    return Point(
        step=round(float(np.mean([e.step for e in evaluations]))),
        updates=float(np.mean([e.updates for e in evaluations])),
        tokens=float(np.mean([e.tokens for e in evaluations])),
        avg=float(np.mean([e.avg for e in evaluations])),
    )


def reaching(curve: Sequence[Point], target: float) -> Point | None:
    """The first point at or above the target."""
    return next((p for p in curve if p.avg >= target), None)


def as_json(value: Any) -> dict[str, Any]:
    """A small frozen dataclass as JSON, floats to six digits."""
    return {
        name: float(f"{field:.6g}") if isinstance(field, float) else field
        for name, field in ((name, getattr(value, name)) for name in value.__dataclass_fields__)
    }
