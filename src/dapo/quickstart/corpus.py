"""What the base model reads in pretraining: worked expressions by writers who know the rules and often slip.

Each slip is drawn where it can happen, so a chain with three places for a slip is right only if all three go well. A
writer's most frequent way is the wrong one at every such place: a model that merely becomes surer of itself
becomes worse, and only a signal about right and wrong makes it better. No torch here.
"""

import random
from dataclasses import dataclass

from dapo.quickstart.task import LEVELS, Expression, apply, draw_expression, has_carry, is_for_evaluation

ANSWER = "Answer: "
AGAIN = "Wait"


@dataclass(frozen=True, slots=True)
class Habits:
    """How often a writer does the right thing where a slip is possible, and how a writer runs on."""

    minds_carry: float = 0.36  # else 8+5=3 and 13-5=18
    minds_order: float = 0.36  # else 9-2+3 becomes 9-5
    minds_product: float = 0.36  # else 3*4 is read as 3+4
    minds_sign: float = 0.07  # else 3-8=5: the rare right token
    guesses: float = 0.10  # writes some number near the value instead of the steps, where there are two or more
    doubts_right: float = 0.15  # starts again after a chain without a slip
    doubts_wrong: float = 0.30  # and after one with a slip: wrong responses are the longer ones
    doubts_again: float = 0.88  # goes on starting again


CAREFUL = Habits(
    minds_carry=1,
    minds_order=1,
    minds_product=1,
    minds_sign=1,
    guesses=0,
    doubts_right=0,
    doubts_wrong=0,
    doubts_again=0,
)
LONGEST = 140  # characters of a response; a writer who runs on is cut here, without an end
GUESS_SPREAD = 12


def draw_document(habits: Habits, rng: random.Random) -> tuple[str, str, bool]:
    """One question (never an evaluation question), a response, and whether the response has an end."""
    while True:
        expression = draw_expression(rng.choice(LEVELS), rng)
        if not is_for_evaluation(expression.question):
            return (expression.question, *write_response(expression, habits, rng))


def write_response(expression: Expression, habits: Habits, rng: random.Random) -> tuple[str, bool]:
    """A response by a writer with these habits, and whether it has an end."""
    text = ""
    doubt = None
    while True:
        lines, is_right = write_chain(expression, habits, rng)
        text += "".join(f"={line}\n" for line in lines)
        doubt = habits.doubts_again if doubt else habits.doubts_right if is_right else habits.doubts_wrong
        if rng.random() >= doubt:
            return f"{text}{ANSWER}{lines[-1]}", True
        text += f"{AGAIN}\n"
        if len(text) > LONGEST:
            return text, False


def write_chain(expression: Expression, habits: Habits, rng: random.Random) -> tuple[list[str], bool]:
    """What is left of the expression after each operation, and whether no slip was made."""
    value = expression.path()[-1]
    if len(expression.operators) > 1 and rng.random() < habits.guesses:
        guess = value + rng.randint(-GUESS_SPREAD, GUESS_SPREAD)
        return [str(guess)], guess == value
    lines = []
    while expression.operators:
        index = _choose_operator(expression, habits, rng)
        operator, left, right = expression.operators[index], *expression.numbers[index : index + 2]
        expression = expression.reduce(index, _work_out(operator, left, right, habits, rng))
        lines.append(expression.text)
    return lines, expression.numbers[0] == value


def _choose_operator(expression: Expression, habits: Habits, rng: random.Random) -> int:
    right = expression.next_operator()
    is_tempting = right == 0 and expression.operators[:2] == ("-", "+")
    return 1 if is_tempting and rng.random() >= habits.minds_order else right


def _work_out(operator: str, left: int, right: int, habits: Habits, rng: random.Random) -> int:
    if operator == "*":
        return left * right if rng.random() < habits.minds_product else left + right
    if left < 0 or right < 0:
        return apply(operator, left, right)
    minds_carry = not has_carry(operator, left, right) or rng.random() < habits.minds_carry
    if operator == "+":
        return left + right if minds_carry else left + right - 10
    size = abs(left - right) if minds_carry else abs(left - right) + 10
    return -size if left < right and rng.random() < habits.minds_sign else size
