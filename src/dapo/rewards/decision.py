"""What a verifier says of a task: a decision, or a graded score."""

from __future__ import annotations

from dataclasses import dataclass

from dapo.types import Score, Verdict

JUDGE_PREFIX = "judge:"


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict with the extracted answer, and the reason where the verdict alone does not say it."""

    verdict: Verdict
    extracted: str | None = None
    message: str = ""


Outcome = Decision | Score
