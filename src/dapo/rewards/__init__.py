"""Verdicts: from what a model wrote to CORRECT, WRONG, UNPARSEABLE, TIMEOUT or CRASH."""

from __future__ import annotations

from dapo.rewards import rule


def reference_error(answer: str, *, verifier: str = "math") -> str | None:
    """Why a reference answer cannot be judged against, or None. Integers cost a regular expression."""
    if verifier == "math":
        return rule.reference_error(answer)
    return None if answer.strip() else "it is empty"


__all__ = ["reference_error"]
