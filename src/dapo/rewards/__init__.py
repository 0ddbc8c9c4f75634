"""Verdicts: from what a model wrote to CORRECT, WRONG, UNPARSEABLE, TIMEOUT or CRASH.

    verify("... Answer: 42.", "42")            -> Verdict.CORRECT
    with VerifierPool("math", workers=2) as pool:
        pool.judge_all([(response, answer), ...])

Safe from any thread: what may hang runs in worker processes that are killed, and nothing a model wrote runs in ours.
"""

from __future__ import annotations

from collections.abc import Mapping

from dapo.rewards.pool import VerifierPool, VerifierPools, shared_pool
from dapo.rewards.verifiers import needs_reference, reference_error
from dapo.types import Judgement, StopReason, Task, Verdict


def judge(
    response: str,
    answer: str,
    *,
    verifier: str = "math",
    stop_reason: StopReason | None = None,
    meta: Mapping[str, object] | None = None,
    seconds: float | None = None,
    memory_mb: int | None = None,
    truncated_may_be_correct: bool = False,
) -> Judgement:
    """One response's verdict with its evidence. For many, use a VerifierPool."""
    pool = shared_pool(verifier, seconds=seconds, memory_mb=memory_mb, truncated=truncated_may_be_correct)
    ticket = pool.submit(Task(response, answer, stop_reason, meta or {}))
    return pool.wait([ticket])[ticket]


def verify(response: str, answer: str, *, stop_reason: StopReason | None = None) -> Verdict:
    """Whether the response's final answer has the reference's value. Truncated responses are never CORRECT."""
    return judge(response, answer, stop_reason=stop_reason).verdict


__all__ = ["Task", "VerifierPool", "VerifierPools", "judge", "needs_reference", "reference_error", "verify"]
