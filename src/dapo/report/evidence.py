"""How much evidence a finding, a verdict or a p-value needs: one rule for all."""

from __future__ import annotations

MIN_STEPS = 6  # fewer steps show no trend, no stable level and no difference between runs
MIN_CHANGED_PROBLEMS = 10  # scored differently in two evaluations; with fewer, an interval means little


def too_few_steps(steps: int) -> str:
    """Why nothing is reported after this many steps; empty where there are enough."""
    return f"{steps} step{'s' * (steps != 1)}, at least {MIN_STEPS} needed" if steps < MIN_STEPS else ""


def too_little(*, steps: int, changed: int) -> str:
    """Why a difference between two evaluations has no p and no verdict; empty where the evidence is enough.

    `steps`: between the two evaluations, or of the shorter run. `changed`: problems with different scores.
    """
    if steps < MIN_STEPS:
        return too_few_steps(steps)
    if changed < MIN_CHANGED_PROBLEMS:
        return f"{changed} changed problems, at least {MIN_CHANGED_PROBLEMS} needed"
    return ""
