"""How hard a problem set is for a model: pass rates from k answers, and the expected share of mixed groups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dapo.errors import DataError
from dapo.evaluation.runner import Answers
from dapo.sampling.predictive import chance_mixed, n_above_mean
from dapo.types import Problem, Verdict

GROUP_SIZES = (4, 8, 16, 32)
N_BINS = 5  # of the pass rates strictly between 0 and 1


@dataclass(frozen=True, slots=True)
class Difficulty:
    """One problem under a model. Graded responses count as predictive selection counts them: right above their mean."""

    id: str
    question: str
    n: int
    correct: int
    mean_tokens: float
    truncated: float  # share of the responses that ran into the limit
    mean_value: float | None = None  # of graded responses
    alike: tuple[int, ...] = ()  # of graded responses: how many have each value

    @property
    def pass_rate(self) -> float:
        return self.correct / self.n

    def as_json(self) -> dict[str, Any]:
        line = asdict(self)
        return {key: line[key] for key in ("id", "question", "n", "correct")} | {
            "pass_rate": self.pass_rate, "mean_tokens": self.mean_tokens, "truncated": self.truncated,
        } | ({"mean_value": self.mean_value} if self.mean_value is not None else {})  # fmt: skip


def difficulties(problems: Sequence[Problem], answers: Answers, *, k: int) -> list[Difficulty]:
    """Every problem's counts from its k answers."""
    table = []
    for problem in problems:
        own = [answers[problem.id, i] for i in range(k)]
        values = [answer.value for answer in own]
        is_graded = any(answer.is_graded for answer in own)
        table.append(
            Difficulty(
                problem.id,
                problem.question,
                k,
                n_above_mean(values) if is_graded else sum(answer.verdict is Verdict.CORRECT for answer in own),
                float(np.mean([answer.n_tokens for answer in own])),
                float(np.mean([answer.is_truncated for answer in own])),
                mean_value=float(np.mean(values)) if is_graded else None,
                alike=tuple(Counter(values).values()) if is_graded else (),
            )
        )
    return table


def summary(table: Sequence[Difficulty]) -> dict[str, Any]:
    """Means over problems, the histogram, and the expected share of mixed groups."""
    graded = [one.mean_value for one in table if one.mean_value is not None]
    return {
        "problems": len(table),
        "pass_rate": float(np.mean([one.pass_rate for one in table])),
        "mean_tokens": float(np.mean([one.mean_tokens for one in table])),
        "truncated": float(np.mean([one.truncated for one in table])),
        "mixed": {str(G): mixed_fraction(table, G) for G in GROUP_SIZES},
        "histogram": histogram(table),
    } | ({"mean_value": float(np.mean(graded))} if graded else {})


def mixed_fraction(table: Sequence[Difficulty], G: int) -> float:
    """Expected share of groups of G with 0 < correct < G, if every problem is drawn equally often.

    For G ≤ n without bias: 1 − [C(c, G) + C(n−c, G)] / C(n, G), the chance that G of the n answers, drawn without
    putting back, are mixed; of graded ones, that their values are not all the same. Beyond n there is no unbiased
    estimate; then it is the posterior mean under a Beta prior fitted to the whole set, so that a set with many hopeless
    problems does not count them as half hopeful.
    """
    prior = fitted_prior(table) if any(one.n < G for one in table) else (1.0, 1.0)
    return float(np.mean([chance_of(one, G, prior) for one in table]))


def chance_of(one: Difficulty, G: int, prior: tuple[float, float]) -> float:
    n, c = one.n, one.correct
    if n >= G:
        return 1.0 - sum(math.comb(m, G) for m in one.alike or (c, n - c)) / math.comb(n, G)
    a, b = prior
    return chance_mixed(a + c, b + n - c, G)


def fitted_prior(table: Sequence[Difficulty]) -> tuple[float, float]:
    """(a, b) of the Beta under which the counts are most likely (beta-binomial), on a grid from 0.02 to 50."""
    counts = Counter((one.n, one.correct) for one in table)
    grid = [float(value) for value in np.geomspace(0.02, 50.0, 35)]

    def log_likelihood(a: float, b: float) -> float:
        beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
        return sum(
            times * (math.lgamma(a + c) + math.lgamma(b + n - c) - math.lgamma(a + b + n) - beta)
            for (n, c), times in counts.items()
        )

    return max(((a, b) for a in grid for b in grid), key=lambda pair: log_likelihood(*pair))


def histogram(table: Sequence[Difficulty]) -> list[dict[str, Any]]:
    """Problems by pass rate: never solved, fifths of what lies between, always solved."""
    bins = Counter(
        -1 if one.correct == 0 else N_BINS if one.correct == one.n else N_BINS * one.correct // one.n for one in table
    )
    rows = [{"from": 0.0, "to": 0.0, "problems": bins[-1]}]
    rows += [{"from": i / N_BINS, "to": (i + 1) / N_BINS, "problems": bins[i]} for i in range(N_BINS)]
    return [*rows, {"from": 1.0, "to": 1.0, "problems": bins[N_BINS]}]


def select(problems: Sequence[Problem], table: Sequence[Difficulty], low: float, high: float) -> list[Problem]:
    """The problems with low ≤ pass rate ≤ high, in their order."""
    kept = [p for p, one in zip(problems, table, strict=True) if low <= one.pass_rate <= high]
    if not kept:
        rates = sorted(one.pass_rate for one in table)
        raise DataError(
            f"--select {low:g} {high:g}: no problem has such a pass rate; they lie from {rates[0]:g} to {rates[-1]:g}.",
            remedy="Widen the bounds.",
        )
    return kept
