"""Problems that saturate at once: the first level of the embedded task; its model gets two thirds of it right."""

from dapo.quickstart.task import train_problems
from dapo.types import Problem


def problems() -> tuple[Problem, ...]:
    return tuple(problem for problem in train_problems() if problem.meta["level"] == 1)
