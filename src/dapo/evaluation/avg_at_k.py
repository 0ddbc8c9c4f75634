"""avg@k, pass@k, maj@k and their bootstrap intervals: pure functions of verdicts and answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its 95 % bootstrap interval over problems."""

    value: float
    low: float
    high: float


def avg_at_k(correct: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Mean accuracy of each problem's k responses. [P, k] -> [P]."""
    per_problem: NDArray[np.float64] = np.mean(correct.astype(np.float64), axis=1)
    return per_problem


def pass_at_k(correct: NDArray[np.bool_]) -> NDArray[np.float64]:
    """1 where at least one of the k responses is right. [P, k] -> [P]."""
    per_problem: NDArray[np.float64] = np.max(correct.astype(np.float64), axis=1)
    return per_problem


def maj_at_k(correct: NDArray[np.bool_], answers: Sequence[Sequence[str | None]]) -> NDArray[np.float64]:
    """Is the most frequent extracted answer right? Ties count as the right answers' share among the tied. [P]

    Responses without a readable answer have no vote; a problem where none has one counts 0.
    """
    return np.array([_majority(row, texts) for row, texts in zip(correct, answers, strict=True)], dtype=np.float64)


def _majority(correct: NDArray[np.bool_], texts: Sequence[str | None]) -> float:
    votes = Counter(text for text in texts if text is not None)
    if not votes:
        return 0.0
    is_right = {text: bool(right) for text, right in zip(texts, correct, strict=True) if text is not None}
    most = max(votes.values())
    tied = [text for text, count in votes.items() if count == most]
    return sum(is_right[text] for text in tied) / len(tied)


def bootstrap(per_problem: NDArray[np.float64], *, seed: int = 0, resamples: int = 2000) -> Estimate:
    """Mean and its 95 % percentile interval, problems resampled with replacement. One problem has no interval."""
    n = len(per_problem)
    if n == 0:
        return Estimate(0.0, 0.0, 0.0)
    value = float(per_problem.mean())
    generator = np.random.Generator(np.random.PCG64(seed))
    means = np.array([per_problem[generator.integers(0, n, n)].mean() for _ in range(resamples)])
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(value, float(low), float(high))
