"""Paired differences with bootstrap intervals over seeds and problems: pure functions of score matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dapo.report.evidence import too_little

RESAMPLES = 4000
ROUNDING = 1e-12
Matrix = NDArray[np.float64]  # [S, P]: seeds x problems


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference with its 95 % interval and the two-sided bootstrap p."""

    value: float
    low: float
    high: float
    p: float
    seeds: int
    insufficient_evidence: str = ""  # why p is withheld: too little evidence

    def judged(self, *, steps: int, changed: int) -> Difference:
        """The same, with its p withheld where there is too little evidence."""
        return replace(self, insufficient_evidence=too_little(steps=steps, changed=changed))

    @property
    def shown_p(self) -> float | None:
        return None if self.insufficient_evidence else self.p


def resampled_means(scores: Matrix, *, resamples: int = RESAMPLES) -> NDArray[np.float64]:
    """Means of `scores` with seeds and problems both drawn with replacement. [resamples]

    Weights instead of index lists: a resample is Σ_sp w_s·v_p·x_sp with multinomial counts w and v.
    """
    S, P = scores.shape
    of_seeds, of_problems = counts(S, P, resamples)
    means: NDArray[np.float64] = np.einsum("rs,sp,rp->r", of_seeds / S, scores, of_problems / P, optimize=True)
    return means


@lru_cache(maxsize=1)
def counts(S: int, P: int, resamples: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """How often each seed and each problem is drawn, [R, S] and [R, P]: the same for all evaluations of a run."""
    generator = np.random.Generator(np.random.PCG64(0))
    of_seeds, of_problems = (generator.multinomial(n, np.full(n, 1 / n), size=resamples) for n in (S, P))
    return of_seeds.astype(np.int32), of_problems.astype(np.int32)


def paired_difference(scores: Matrix, other: Matrix) -> Difference:
    """scores − other, the same seeds and problems in the same places."""
    assert scores.shape == other.shape, "pairs need the same seeds and problems"
    difference = scores - other
    means = resampled_means(difference)
    low, high = np.quantile(means, [0.025, 0.975])
    # One more in numerator and denominator: with R resamples p is never below 1/(R + 1). With few problems many
    # resampled means are exactly 0 up to rounding; they count for both sides.
    below = (1 + np.sum(means <= ROUNDING)) / (len(means) + 1)
    above = (1 + np.sum(means >= -ROUNDING)) / (len(means) + 1)
    p = min(1.0, 2 * float(min(below, above)))
    return Difference(float(difference.mean()), float(low), float(high), p, len(scores))
