"""Is one run better than another? Paired differences on the held-out problems that both answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dapo.report.learning import signed
from dapo.report.load import RunRecord, is_number
from dapo.report.paired import Difference, Matrix, paired_difference

SHOWN_STEPS = 6
SURE = 0.05  # a smaller p counts as a difference


@dataclass(frozen=True, slots=True)
class StepDifference:
    """One run after `step` against the other after `other_step`."""

    step: int
    other_step: int
    avg: float
    other_avg: float
    difference: Difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run against the first of the page; without rows where `answer` says why."""

    answer: str
    detail: str
    tone: str  # good: the run is better, bad: worse, "": not to be seen
    rows: tuple[StepDifference, ...] = ()


Scores = dict[int, tuple[tuple[str, ...], Matrix]]  # by step: ids of the problems, share of right responses [1, P]


def compare(run: RunRecord, other: RunRecord) -> Comparison:
    """`run` − `other` at the steps both evaluated, and at the last evaluation of each."""
    name, of = run.folder.resolve().name, other.folder.resolve().name
    mine, theirs = scores_of(run), scores_of(other)
    if not mine or not theirs:
        which = name if not mine else of
        return Comparison("Not compared", f"{which} has no evaluation, problem by problem.", "")
    values = [(name, mean_value(run)), (of, mean_value(other))]
    if any(value is not None for _, value in values):
        said = ", ".join(f"{of_run} {'none' if value is None else f'{value:.3f}'}" for of_run, value in values)
        return Comparison(
            "Not compared", f"Rewards are graded: no response counts as correct. Mean value at the end: {said}.", ""
        )
    how = [(name, sampling_of(run)), (of, sampling_of(other))]
    if how[0][1] != how[1][1] and all(known for _, known in how):  # old runs did not write it
        said = ", ".join(f"{of_run} with {known}" for of_run, known in how)
        return Comparison("Not compared", f"Evaluations were sampled differently: {said}.", "")
    end = row_of(mine, theirs, max(mine), max(theirs))
    if end is None:
        return Comparison("Not compared", f"{name} and {of} were evaluated on different problems.", "")
    shared = [step for step in sorted(mine.keys() & theirs.keys()) if step < min(max(mine), max(theirs))]
    middle = [row for step in spread(shared) if (row := row_of(mine, theirs, step, step))]
    found = end.difference
    is_sure = found.shown_p is not None and found.p < SURE
    word = "above" if found.value > 0 else "below"
    unsure = "No significant difference to {}" if found.shown_p is not None else "Too little data to compare with {}"
    answer = f"{abs(found.value):.3f} {word} {of}" if is_sure else unsure.format(of)
    told_p = f"p = {found.p:.2g}" if found.shown_p is not None else f"no p ({found.insufficient_evidence})"
    detail = (
        f"At the end of each {signed(found.value)}, 95 % interval {signed(found.low)} to {signed(found.high)}, "
        f"{told_p}, paired over {len(mine[max(mine)][0]):,} problems. "
        "The interval does not cover variation between seeds."
    )
    return Comparison(answer, detail, ("good" if found.value > 0 else "bad") if is_sure else "", (*middle, end))


def lines_of(run: RunRecord) -> list[dict[str, Any]]:
    """Of the first evaluation set, whose name may differ from run to run; those sampled like the last one."""
    lines = [line for line in run.eval_problems if line.get("set") == run.eval_problems[0].get("set")]
    return [line for line in lines if line.get("sampling") == lines[-1].get("sampling")]


def sampling_of(run: RunRecord) -> str:
    """How the last evaluation was sampled; nothing where it is not known."""
    values = lines_of(run)[-1].get("sampling")
    if not isinstance(values, list):
        return ""
    keys = ("eval.temperature", "eval.top_p", "eval.top_k")
    return ", ".join(f"{key} = {value}" for key, value in zip(keys, values, strict=False))


def scores_of(run: RunRecord) -> Scores:
    """Problems in the order of their ids."""
    scores: Scores = {}
    for line in lines_of(run):
        pairs = sorted(zip(line["ids"], line["correct"], strict=True))
        ids, correct = zip(*pairs, strict=True)
        scores[int(line["step"])] = ids, np.array([correct], dtype=float) / line["k"]
    return scores


def mean_value(run: RunRecord) -> float | None:
    """Of graded responses in the last evaluation of the first set; None where responses are right or wrong."""
    lines = [line for line in run.evaluations if line["set"] == run.evaluations[0]["set"]]
    value = lines[-1].get("mean_value") if lines else None
    return float(value) if value is not None and is_number(value) else None


def row_of(mine: Scores, theirs: Scores, step: int, other_step: int) -> StepDifference | None:
    (ids, scores), (other_ids, other_scores) = mine[step], theirs[other_step]
    if ids != other_ids:
        return None
    found = paired_difference(scores, other_scores)
    found = found.judged(steps=min(step, other_step), changed=int(np.count_nonzero(scores != other_scores)))
    return StepDifference(step, other_step, float(scores.mean()), float(other_scores.mean()), found)


def spread(steps: Sequence[int]) -> list[int]:
    """At most so many of them, evenly, the last one included."""
    if len(steps) <= SHOWN_STEPS:
        return list(steps)
    return [steps[round(at)] for at in np.linspace(0, len(steps) - 1, SHOWN_STEPS)]


def to_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "answer": comparison.answer,
        "detail": comparison.detail,
        "tone": comparison.tone,
        "rows": [
            [row.step, row.other_step, row.avg, row.other_avg, row.difference.value, row.difference.low,
             row.difference.high, row.difference.shown_p]
            for row in comparison.rows
        ],
    }  # fmt: skip
