"""Verifier `exact`: the final statement, or the whole response where none is marked, is the reference to the letter."""

from __future__ import annotations

from dapo.rewards.decision import Decision
from dapo.rewards.math.extract import final_statement
from dapo.types import Task, Verdict


def decide(task: Task) -> Decision:
    """Compare without spaces at the ends, and with nothing else done to either side."""
    statement = final_statement(task.response, in_prose=False)
    said = (statement.text if statement is not None else task.response[-4_000:]).strip()
    if not said:
        return Decision(Verdict.UNPARSEABLE, None, "the response is empty")
    return Decision(Verdict.CORRECT if said == task.answer.strip() else Verdict.WRONG, said[:200])
