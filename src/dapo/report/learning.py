"""Did a run learn? One answer for report and doctor: held-out problems after training against before, paired."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dapo.report.evidence import too_few_steps, too_little
from dapo.report.load import RunRecord, is_number

IMPROVED, WORSE, INCONCLUSIVE = "improved", "worse", "inconclusive"

Scores = NDArray[np.float64]  # [P]


@dataclass(frozen=True, slots=True)
class Change:
    """The last evaluation of a set against the first, and what it says."""

    verdict: str  # improved, worse or inconclusive
    why: str  # in words, with the interval where there is one
    name: str  # of the set
    score: str  # what before and after are: avg@8, or the mean reward where rewards are graded
    before: float
    after: float
    steps: tuple[int, int]
    interval: tuple[float, float] | None = None  # of after − before, 95 %, on the same problems


def change_of(run: RunRecord, name: str | None = None) -> Change | None:
    """Of the set named, or of the first one; None where it was not evaluated twice in the same way."""
    if not run.evaluations:
        return None
    name = str(run.evaluations[0]["set"]) if name is None else name
    same = comparable(run.evaluations, run.eval_problems, name)
    if len(same) < 2:
        return None
    first, last = same[0], same[-1]
    graded, key = is_graded(last), score_key(last)
    score = score_name(last)
    steps = int(first["step"]), int(last["step"])
    pair = paired_scores(run, name, steps, graded=graded)
    if pair is not None:
        verdict, why, interval = by_problems(*pair, steps[1] - steps[0])
        before, after = (float(scores.mean()) for scores in pair)
        return Change(verdict, why, name, score, before, after, steps, interval)
    verdict, why = (INCONCLUSIVE, "no scores per problem") if graded else by_intervals(first, last)
    return Change(verdict, why, name, score, float(first[key]), float(last[key]), steps)


def comparable(
    evaluations: Iterable[dict[str, Any]], problems: Iterable[dict[str, Any]], name: str
) -> list[dict[str, Any]]:
    """Evaluations of a set that can be compared with its last one: of as many responses, graded or not.

    And of the same problems, sampled alike, as far as there are lines with single problems.
    """
    lines = [e for e in evaluations if str(e["set"]) == name]
    made = {e["step"]: how_made(e) for e in problems if str(e.get("set")) == name}
    last = made.get(lines[-1]["step"]) if lines else None
    same = [e for e in lines if e["k"] == lines[-1]["k"] and is_graded(e) == is_graded(lines[-1])]
    return [e for e in same if last is None or made.get(e["step"], last) == last]


def is_graded(line: dict[str, Any]) -> bool:
    return is_number(line.get("mean_value"))


def score_key(line: dict[str, Any]) -> str:
    """What an evaluation is compared by."""
    return "mean_value" if is_graded(line) else "avg@k"


def score_name(line: dict[str, Any]) -> str:
    return "mean reward" if is_graded(line) else f"avg@{int(line['k'])}"


def paired_scores(run: RunRecord, name: str, steps: tuple[int, int], *, graded: bool) -> tuple[Scores, Scores] | None:
    """Each problem's score in both evaluations; None where they are not of the same problems, sampled alike.

    Of graded rewards the values alone: how many responses were right is another score.
    """
    lines = {int(e["step"]): e for e in run.eval_problems if str(e.get("set")) == name}
    if steps[0] == steps[1] or not set(steps) <= lines.keys():
        return None
    start, end = (lines[step] for step in steps)
    if how_made(start) != how_made(end):
        return None
    if not has_values(start) == has_values(end) == graded:
        return None
    return scores_of(start), scores_of(end)


def how_made(line: dict[str, Any]) -> list[Any]:
    """Of a line with single problems: what two evaluations have to have in common."""
    return [line.get(key) for key in ("ids", "k", "sampling")]


def has_values(line: dict[str, Any]) -> bool:
    values = line.get("values")
    return isinstance(values, list) and len(values) == len(line["ids"]) and all(map(is_number, values))


def scores_of(line: dict[str, Any]) -> Scores:
    """Share of right responses per problem, or the mean of their graded rewards. [P]"""
    if has_values(line):
        return np.array(line["values"], dtype=np.float64)
    return np.array(line["correct"], dtype=np.float64) / float(line["k"])


def by_problems(before: Scores, after: Scores, steps: int) -> tuple[str, str, tuple[float, float]]:
    """A normal interval instead of a bootstrap: a live page recomputes it at every step."""
    difference = after - before
    half = 1.96 * float(difference.std(ddof=1)) / math.sqrt(len(difference)) if len(difference) > 1 else math.inf
    low, high = float(difference.mean()) - half, float(difference.mean()) + half
    if reason := too_little(steps=steps, changed=int(np.count_nonzero(difference))):
        return INCONCLUSIVE, reason, (low, high)
    told = f"on the same problems {signed(low)} to {signed(high)} (95 % interval)"
    verdict = IMPROVED if low > 0 else WORSE if high < 0 else INCONCLUSIVE
    return verdict, told if verdict != INCONCLUSIVE else f"{told}, which includes 0", (low, high)


def by_intervals(first: dict[str, Any], last: dict[str, Any]) -> tuple[str, str]:
    """For records without single problems: the two intervals must not overlap."""
    (low_before, high_before), (low, high) = first["avg@k_interval"], last["avg@k_interval"]
    told = f"95 % interval {low:.3f}–{high:.3f} now, {low_before:.3f}–{high_before:.3f} before"
    if reason := too_few_steps(int(last["step"]) - int(first["step"])):
        return INCONCLUSIVE, reason
    if low > high_before:
        return IMPROVED, told
    if high < low_before:
        return WORSE, told
    return INCONCLUSIVE, f"{told}: they overlap"


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
