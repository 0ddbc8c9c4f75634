"""How much there must be before anything is judged: one rule for the doctor's findings, verdicts and p-values."""

from __future__ import annotations

MIN_STEPS = 6  # fewer steps say nothing: neither a trend, nor a level that stays, nor a difference between runs
MIN_CHANGED_PROBLEMS = 10  # right in one of two evaluations and not in the other: of fewer an interval tells little


def too_few_steps(steps: int) -> str:
    """Why nothing is said after so many steps; empty where there are enough."""
    return f"{steps} step{'s' * (steps != 1)}; findings need {MIN_STEPS}" if steps < MIN_STEPS else ""


def too_little(*, steps: int, changed: int) -> str:
    """Why a difference between two evaluations has no p and no verdict; empty where there is enough to go by.

    `steps` lie between the two evaluations, or behind the younger of two runs; `changed` problems came out differently.
    """
    if steps < MIN_STEPS:
        return too_few_steps(steps)
    if changed < MIN_CHANGED_PROBLEMS:
        return f"{changed} problems came out differently; findings need {MIN_CHANGED_PROBLEMS}"
    return ""
