"""avg@k, pass@k, maj@k and their bootstrap intervals: pure functions of verdicts and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dapo.rewards.math.answer_values import Value, value_of


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
    """1 where at least one of the k responses is correct. [P, k] -> [P]."""
    per_problem: NDArray[np.float64] = np.max(correct.astype(np.float64), axis=1)
    return per_problem


def maj_at_k(correct: NDArray[np.bool_], answers: Sequence[Sequence[str | None]]) -> NDArray[np.float64]:
    """Is the most frequent extracted answer right? Ties count as the right answers' share among the tied. [P]

    Votes are counted by value, however it is spelled. Responses of one value may be judged differently (one offered a
    second answer, or was cut off): most of them decide, and as many right as wrong is a half. Responses without a
    readable answer have no vote; a problem where none has one counts 0. Where no problem has one, as with a
    verifier that extracts nothing, there is no maj@k at all (`runner.summarise`).
    """
    return np.array([_majority(row, texts) for row, texts in zip(correct, answers, strict=True)], dtype=np.float64)


def _majority(correct: NDArray[np.bool_], texts: Sequence[str | None]) -> float:
    verdicts: dict[Value, list[bool]] = {}
    for text, right in zip(texts, correct, strict=True):
        if text is not None:
            verdicts.setdefault(value_of(text), []).append(bool(right))
    if not verdicts:
        return 0.0
    most = max(len(votes) for votes in verdicts.values())
    tied = [votes for votes in verdicts.values() if len(votes) == most]
    return sum(_most_say(votes) for votes in tied) / len(tied)


def _most_say(votes: Sequence[bool]) -> float:
    """1 where more than half hold, 0.5 where exactly half do, else 0."""
    n_right = 2 * sum(votes)
    return float(n_right > len(votes)) + 0.5 * (n_right == len(votes))


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
