"""Problems with their prompts, in the order of the run."""

from __future__ import annotations

from collections.abc import Sequence

from dapo.data.order import ProblemOrder
from dapo.types import Problem


class OrderedSource:
    """Every epoch every problem once, shuffled; no problem twice in a step; taken back where a step did not use it."""

    def __init__(self, problems: Sequence[Problem], prompts: Sequence[tuple[int, ...]], order: ProblemOrder) -> None:
        self.problems = problems
        self.prompts = prompts
        self.order = order

    def start_step(self) -> None:
        self.order.start_step()

    def next(self) -> tuple[Problem, int, tuple[int, ...]] | None:
        came = self.order.next()
        if came is None:
            return None
        index, visit = came
        return self.problems[index], visit, self.prompts[index]

    def rewind(self, n_used: int) -> None:
        self.order.rewind(n_used)
