"""The bundled task: integer arithmetic in five levels of difficulty, drawn from a seed. No torch here.

A question is an expression such as `17+8-2*3=?`. A response works it out line by line and ends with its answer:

    =17+8-6
    =25-6
    =19
    Answer: 19

A single step on the right path is easy (numbers up to 29, one of the two with one digit, small products); the
difficulty lies in doing all steps with care: carries, borrows, the order of operations and the sign.
"""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from dapo.types import Problem

SOURCE = "quickstart"
LARGEST = 29  # size of a number on the right path; wrong paths may leave it
LARGEST_FACTOR = 5
EVAL_ONE_IN = 8  # one question in eight may be asked in evaluation, and those are never trained on


class Step(NamedTuple):
    """One operation that was worked out."""

    operator: str
    left: int
    right: int
    result: int


@dataclass(frozen=True, slots=True)
class Expression:
    """numbers[0] operators[0] numbers[1] …, written without spaces or brackets."""

    numbers: tuple[int, ...]
    operators: tuple[str, ...]

    @property
    def text(self) -> str:
        rest = (f"{operator}{number}" for operator, number in zip(self.operators, self.numbers[1:], strict=True))
        return f"{self.numbers[0]}{''.join(rest)}"

    @property
    def question(self) -> str:
        return f"{self.text}=?"

    def reduce(self, index: int, result: int) -> "Expression":
        """The expression after operator `index` and its two numbers were replaced by their result."""
        return Expression(
            (*self.numbers[:index], result, *self.numbers[index + 2 :]),
            (*self.operators[:index], *self.operators[index + 1 :]),
        )

    def next_operator(self) -> int:
        return first_operator(self.operators)

    def steps(self) -> list[Step]:
        """The operations in their right order."""
        numbers, operators = [*self.numbers], [*self.operators]
        done = []
        while operators:
            index = first_operator(operators)
            left, right = numbers[index : index + 2]
            operator = operators.pop(index)
            done.append(Step(operator, left, right, apply(operator, left, right)))
            numbers[index : index + 2] = [done[-1].result]
        return done

    def path(self) -> list[int]:
        """The results of the operations in their right order; the last one is the value."""
        return [step.result for step in self.steps()]


@dataclass(frozen=True, slots=True)
class Level:
    """Expressions of one difficulty: the shapes they have and what must hold for them."""

    number: int
    needs: str  # in words, for tables
    shapes: tuple[str, ...]  # operators in order
    fits: Callable[[list[Step]], bool]


def first_operator(operators: Sequence[str]) -> int:
    """Index of the operation to do next: products first, then from the left."""
    return operators.index("*") if "*" in operators else 0


def apply(operator: str, left: int, right: int) -> int:
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    raise ValueError(f"no such operator: {operator!r}")


def has_carry(operator: str, left: int, right: int) -> bool:
    """Whether the units of a sum or difference of non-negative numbers carry into, or borrow from, the tens."""
    if operator == "+":
        return left % 10 + right % 10 > 9
    large, small = max(left, right), min(left, right)
    return operator == "-" and large % 10 < small % 10


def _is_easy(steps: list[Step]) -> bool:
    """Every step within two digits, and every sum or difference with a number of one digit, on the right path."""
    return all(
        abs(result) <= LARGEST and (operator == "*" or min(abs(left), abs(right)) <= 9)
        for operator, left, right, result in steps
    )


def n_carries(steps: list[Step]) -> int:
    """How many steps of the right path carry or borrow."""
    return sum(has_carry(operator, left, right) for operator, left, right, _ in steps)


def _is_never_negative(steps: list[Step]) -> bool:
    return min(step.result for step in steps) >= 0


def _ends_negative(steps: list[Step]) -> bool:
    *before, value = (step.result for step in steps)
    return value < 0 <= min(before, default=0)


LEVELS = (
    Level(1, "plain steps", ("++", "+-", "--", "++-", "+--"), lambda s: _is_never_negative(s) and n_carries(s) == 0),
    Level(2, "a carry or a borrow", ("++", "+-", "--"), lambda s: _is_never_negative(s) and n_carries(s) == 1),
    Level(3, "the right order", ("+*", "-*", "-+", "-+-"), lambda s: _is_never_negative(s) and n_carries(s) <= 1),
    Level(4, "all of these", ("+-*", "-+*", "+*-", "-*+"), lambda s: _is_never_negative(s) and n_carries(s) >= 1),
    Level(5, "a negative result", ("+-", "--", "-*", "+-*", "-+-"), _ends_negative),
)


def draw_expression(level: Level, rng: random.Random) -> Expression:
    """One expression of this level, every shape as often. Numbers have one digit, but the first may have two."""
    operators = tuple(rng.choice(level.shapes))
    while True:
        around = zip(operators, (*operators[1:], ""), strict=True)
        rest = (rng.randint(2, LARGEST_FACTOR if "*" in pair else 9) for pair in around)
        expression = Expression((rng.randint(2, 9 if level.number == 5 else LARGEST), *rest), operators)
        steps = expression.steps()
        if _is_easy(steps) and level.fits(steps):
            return expression


def normalise(question: str) -> str:
    """Two questions are the same question when this is equal: case and white space do not count."""
    return re.sub(r"\s+", "", question).casefold()


def is_for_evaluation(question: str) -> bool:
    """Which side of the split a question is on. A property of its text, so that no two seeds can mix the sides."""
    return _digest(question)[0] % EVAL_ONE_IN == 0


@cache  # a process may ask for them many times
def train_problems(seed: int = 0, *, per_level: int = 600) -> tuple[Problem, ...]:
    """Training problems, all levels mixed, the same for the same seed."""
    return _draw_problems(random.Random(f"train {seed}"), per_level=per_level, for_evaluation=False)


@cache
def eval_problems(seed: int = 0, *, per_level: int = 40) -> tuple[Problem, ...]:
    """Held-out problems, all levels mixed; disjoint from every seed's training problems by normalised text."""
    return _draw_problems(random.Random(f"eval {seed}"), per_level=per_level, for_evaluation=True)


def _draw_problems(rng: random.Random, *, per_level: int, for_evaluation: bool) -> tuple[Problem, ...]:
    problems: list[Problem] = []
    for level in LEVELS:
        questions: dict[str, Expression] = {}
        while len(questions) < per_level:
            expression = draw_expression(level, rng)
            if is_for_evaluation(expression.question) == for_evaluation:
                questions.setdefault(normalise(expression.question), expression)
        problems += [_problem(expression, level) for expression in questions.values()]
    rng.shuffle(problems)
    return tuple(problems)


def _problem(expression: Expression, level: Level) -> Problem:
    return Problem(
        id=f"{SOURCE}-{_digest(expression.question).hex()[:12]}",
        question=expression.question,
        answer=str(expression.path()[-1]),
        source=f"{SOURCE}-level-{level.number}",
        meta={"level": level.number},
    )


def _digest(question: str) -> bytes:
    return hashlib.sha256(normalise(question).encode()).digest()
