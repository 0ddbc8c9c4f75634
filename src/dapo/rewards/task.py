"""What a verifier gets, and what it says: a task, and a decision or a graded score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dapo.types import Score, StopReason, Verdict

JUDGE_PREFIX = "judge:"


@dataclass(frozen=True, slots=True)
class Task:
    """One response to verify against one reference, with the problem's extra data (`meta`)."""

    response: str
    answer: str
    stop_reason: StopReason | None = None
    meta: Mapping[str, object] = field(default_factory=dict)
    seconds: float = 10.0  # CPU time limit


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict with the extracted answer, and the reason where the verdict alone does not say it."""

    verdict: Verdict
    extracted: str | None = None
    message: str = ""


Outcome = Decision | Score
