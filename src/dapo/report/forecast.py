"""Where a run will end: a saturating curve through its evaluations, with its interval.

R(C) = R_0 + (A − R_0) / (1 + (C_mid/C)^B): ScaleRL (arXiv:2510.13786), the sigmoid in compute. A is where it levels
off, C_mid where half of the gain is reached, B how steep. Compute is counted in training steps, which cost about the
same within a run. The parameters are not chosen but weighed: every combination of a grid by how well it explains the
evaluations, so that few or noisy ones give a wide interval, and a run that has not bent yet may still go anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo.report.learning import comparable, is_graded
from dapo.report.load import RunRecord, is_number

LEAST = 8  # evaluations; fewer do not tell a curve that levels off from one that goes on
STEEPNESS = np.geomspace(0.5, 4.0, 7)  # B
CEILINGS = np.linspace(0.0, 1.0, 51)  # A
N_HALFWAY = 30  # values of C_mid, from before the first evaluation to far behind the last
STARTS = np.linspace(-2.0, 2.0, 5)  # R_0, in standard errors around the first evaluation
WOBBLE = np.array([0.005, 0.015, 0.03, 0.06])  # how far training itself moves a score between evaluations, a std

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Forecast:
    """The score of an evaluation at `step`, with a 95 % interval."""

    step: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Evaluations of one set: steps, scores from 0 to 1, and their standard errors."""

    steps: Floats
    scores: Floats
    errors: Floats

    def __len__(self) -> int:
        return len(self.steps)

    def first(self, n: int) -> Curve:
        return Curve(self.steps[:n], self.scores[:n], self.errors[:n])


def curve_of(run: RunRecord) -> Curve | None:
    """Of the run's first evaluation set; None where rewards are graded, or no score is usable."""
    if not run.evaluations:
        return None
    lines = [e for e in run.evaluations if e["set"] == run.evaluations[0]["set"]]
    same = comparable(run.evaluations, run.eval_problems, str(lines[0]["set"]))
    alike = [e for e in same if is_share(e.get("avg@k"))]
    if not any(e["step"] > 0 for e in alike) or any(map(is_graded, lines)):
        return None
    half_widths = [interval_half(e.get("avg@k_interval")) for e in alike]
    return Curve(
        np.array([float(e["step"]) for e in alike]),
        np.array([float(e["avg@k"]) for e in alike]),
        np.array(half_widths) / 1.96,
    )


def is_share(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def interval_half(interval: object) -> float:
    is_pair = isinstance(interval, list | tuple) and len(interval) == 2 and all(map(is_number, interval))
    return min(1.0, abs(float(interval[1]) - float(interval[0])) / 2) if is_pair else 0.0  # type: ignore[index]


def saturating(steps: Floats, start: Floats, ceiling: Floats, halfway: Floats, steepness: Floats) -> Floats:
    """R(C); R_0 at C = 0. All but `steps` broadcast, `steps` is the last axis."""
    with np.errstate(divide="ignore", over="ignore"):
        share = 1 / (1 + (halfway[..., None] / steps) ** steepness[..., None])
    return start[..., None] + (ceiling - start)[..., None] * share


def forecast(curve: Curve, steps: Sequence[int]) -> list[Forecast]:
    """The scores of evaluations at these steps, by all curves of the grid, weighed by the evaluations so far."""
    after = curve.steps[curve.steps > 0]
    assert after.size, "a forecast needs an evaluation after the first step"
    halfway = np.geomspace(after[0] / 4, 4 * after[-1], N_HALFWAY)
    error = max(float(curve.errors[0]), 0.005)
    start = np.clip(curve.scores[0] + STARTS * error, 0, 1)
    grid = [axis.ravel() for axis in np.meshgrid(start, CEILINGS, halfway, STEEPNESS, indexing="ij")]
    misses = saturating(curve.steps, *grid) - curve.scores  # [curves, evaluations]
    # [curves, wobbles]: log-likelihood of the evaluations, Gaussian around the curve.
    variance = curve.errors**2 + WOBBLE[:, None] ** 2
    fit = -0.5 * (misses**2 @ (1 / variance).T + np.log(variance).sum(axis=1))
    weight = np.exp(fit - fit.max())
    weight /= weight.sum()
    spread = np.sqrt(curve.errors[-1] ** 2 + WOBBLE**2)  # of one more evaluation around the curve
    ahead = saturating(np.array(steps, dtype=np.float64), *grid)
    return [summary(step, ahead[:, i], spread, weight) for i, step in enumerate(steps)]


def summary(step: int, means: Floats, spread: Floats, weight: Floats) -> Forecast:
    """Mean and 95 % interval of a mixture: one Gaussian per curve and wobble, by histogram."""
    edges = np.linspace(0, 1, 401)
    at = np.clip(np.digitize(means, edges) - 1, 0, len(edges) - 2)
    middle = (edges[:-1] + edges[1:]) / 2
    mass = np.zeros_like(middle)
    for column, width in zip(weight.T, spread, strict=True):
        here = np.bincount(at, weights=column, minlength=len(middle))
        kernel = np.exp(-0.5 * ((middle[:, None] - middle[None]) / width) ** 2)
        mass += (kernel / kernel.sum(axis=0)) @ here  # scores stay between 0 and 1
    total = np.cumsum(mass) / mass.sum()
    low, high = (float(middle[np.searchsorted(total, q)]) for q in (0.025, 0.975))
    return Forecast(step, float((mass * middle).sum() / mass.sum()), low, high)


def target_step(run: RunRecord) -> int:
    """The run's last step while it is running; of one that has ended, twice as many steps: would more have helped?"""
    return run.wanted_steps if run.steps < run.wanted_steps else 2 * run.steps
