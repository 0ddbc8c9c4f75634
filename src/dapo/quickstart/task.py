"""The embedded task: integer arithmetic in five levels of difficulty, drawn from a seed. No torch here.

A question is an expression such as `12+7*3-5=?`. A response works it out line by line and ends with its answer:

    =12+21-5
    =33-5
    =28
    Answer: 28

Every number on the right path has at most two digits and every product is one of the multiplication table, so that a
single step is easy and the difficulty lies in doing all steps with care: carries, borrows, the order of operations
and the sign.
"""

import hashlib
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from dapo.types import Problem

SOURCE = "quickstart"
LARGEST = 99  # on the right path; wrong paths may leave it
EVAL_SHARE = 8  # one question in eight may be asked in evaluation, and those are never trained on


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
        """Index of the operation to do next: products first, then from the left."""
        return self.operators.index("*") if "*" in self.operators else 0

    def path(self) -> list[int]:
        """The results of the operations in their right order; the last one is the value."""
        results = []
        rest = self
        while rest.operators:
            index = rest.next_operator()
            result = apply(rest.operators[index], rest.numbers[index], rest.numbers[index + 1])
            results.append(result)
            rest = rest.reduce(index, result)
        return results


@dataclass(frozen=True, slots=True)
class Level:
    """Expressions of one difficulty: the shapes they have and what must hold for them."""

    number: int
    needs: str  # in words, for tables
    shapes: tuple[str, ...]  # operators in order
    fits: Callable[[Expression], bool]


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


def _carries(expression: Expression) -> bool:
    return has_carry(expression.operators[0], expression.numbers[0], expression.numbers[1])


def _is_never_negative(expression: Expression) -> bool:
    return min(expression.path()) >= 0


def _ends_negative(expression: Expression) -> bool:
    *before, value = expression.path()
    return value < 0 <= min(before, default=0)


LEVELS = (
    Level(1, "one step", ("+", "-"), lambda e: _is_never_negative(e) and not _carries(e)),
    Level(2, "one step with a carry or a borrow", ("+", "-"), lambda e: _is_never_negative(e) and _carries(e)),
    Level(3, "two steps in the right order", ("+*", "-*", "-+", "*-"), _is_never_negative),
    Level(4, "three steps in the right order", ("+*-", "-+*", "+-*", "-*+", "*-+"), _is_never_negative),
    Level(5, "a negative result", ("-", "*-", "-*", "+-", "+-*"), _ends_negative),
)


def draw_expression(level: Level, rng: random.Random) -> Expression:
    """One expression of this level. Factors are 2 to 9, other numbers 2 to 99."""
    while True:
        operators = tuple(rng.choice(level.shapes))
        around = zip(("", *operators), (*operators, ""), strict=True)
        numbers = tuple(rng.randint(2, 9 if "*" in pair else LARGEST) for pair in around)
        expression = Expression(numbers, operators)
        if max(map(abs, expression.path())) <= LARGEST and level.fits(expression):
            return expression


def normalise(question: str) -> str:
    """Two questions are the same question when this is equal: case and white space do not count."""
    return re.sub(r"\s+", "", question).casefold()


def is_for_evaluation(question: str) -> bool:
    """Which side of the split a question is on. A property of its text, so that no two seeds can mix the sides."""
    return _digest(question)[0] % EVAL_SHARE == 0


def train_problems(seed: int = 0, *, per_level: int = 800) -> tuple[Problem, ...]:
    """Training problems, all levels mixed, the same for the same seed."""
    return _draw_problems(random.Random(f"train {seed}"), per_level=per_level, for_evaluation=False)


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
