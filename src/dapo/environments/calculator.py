"""`calculator`: for the bundled model, which writes its steps as lines `=17+6` and `Wait` where it has doubts.

A turn that ends with `Wait` is a call: the answer is the value of the last line that has something to work out, which is
the question until the model has written one. A turn that does not is the final answer.
"""

from __future__ import annotations

import re

from dapo.environments.protocol import Turn
from dapo.rewards.gym.expression import value_of
from dapo.types import Problem

CALL = "Wait"
_OPERATION = re.compile(r"[\d)]\s*[-+*/]")  # a sign alone is none


class Calculator:
    """Exact, of whole numbers with + - * / and brackets; read by a parser of its own, nothing is evaluated."""

    stop = (CALL,)  # ends a turn as the end token does

    def start(self, problem: Problem, seed: int) -> None:
        """The prompt stays as it is."""
        self._lines = [problem.question.strip().removesuffix("=?")]

    def respond(self, said: str) -> Turn:
        written, call, after = said.rpartition(CALL)
        if not call or after.strip():
            return Turn()
        newline = "" if after.endswith("\n") else "\n"
        self._lines += [line.strip().removeprefix("=") for line in written.splitlines()]
        expression = next((line for line in reversed(self._lines) if _OPERATION.search(line)), "")
        try:
            value, _ = value_of(expression)
        except ValueError:  # none, or it is not one
            return Turn(f"{newline}=?\n", called=True, failed=True)
        return Turn(f"{newline}={value}\n", called=True)
