r"""The paper's data transformation, the part that needs no model: a closed form becomes a question for one integer.

DAPO §3.5: answers are made integers, so that the rule that checks them is exact. (a+√b)/c asks for a+b+c, 11−2√6 as
k−m√n for k+m+n = 19. Every form is stated so that its letters are determined: squarefree radicand, lowest terms.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from dapo.data.closed_forms import ExactValue, NoClosedForm, parse
from dapo.data.keys import problem_id
from dapo.data.references import plain_answer
from dapo.types import Problem

LETTERS = "pqmnkabcdrstuvwxyzhgfjl"  # e, i, o are easily misread as constants or digits
ROUNDED = re.compile(r"nearest|decimal|round|approximat|近似|四舍五入|小数|精确到", re.IGNORECASE)
COMMAND = re.compile(r"\\(?:text|mbox|mathrm|textbf|textit|operatorname)\s*\{[^{}]*\}|\\[a-zA-Z]+")
MATH = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
MATH_SIGNS = frozenset("0123456789^_=+*/<>|")
MAX_CHARS = 10_000  # of a question that is restated
SINGLE = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")


@dataclass(frozen=True, slots=True)
class Restated:
    """A problem with an integer answer, and how it came from the original: `form` = original value, `asks` = answer."""

    problem: Problem
    form: str  # "" where the answer already was an integer
    asks: str
    values: dict[str, int]


def integer_answer(problem: Problem) -> Restated | str:
    """The problem restated to ask for one integer; or, as text, why its answer has no such form."""
    if len(problem.question) > MAX_CHARS:
        return f"a question of over {MAX_CHARS:,} characters"
    try:
        value = parse(plain_answer(problem.answer))
    except NoClosedForm as error:
        return str(error)
    number = value.as_rational()
    if number is not None and number.denominator == 1:
        return Restated(with_answer(problem, problem.question, int(number)), "", "", {})
    if number is not None and "." in problem.answer and ROUNDED.search(problem.question):
        return "a rounded decimal has no exact value"
    form = canonical_form(value)
    if form is None:
        return "more terms than a rational and one root"
    return restate(problem, form)


@dataclass(frozen=True, slots=True)
class Form:
    """A canonical form: TeX with one {} per letter, the letters' positive values, and what determines them."""

    tex: str
    values: tuple[int, ...]
    conditions: str  # with {0}, {1}, … for the letters


def canonical_form(value: ExactValue) -> Form | None:
    """The unique positive integers of ±p/q, ±p/q·π, ±p√m/q, (±a ± b√m)/c; signs stand in the form, as in the paper."""
    terms = dict(value.terms)
    if not terms or any(power not in (0, 1) for _, power in terms):
        return None
    if len(terms) == 1:
        (((radicand, power), c),) = terms.items()
        return one_term(c, radicand, "\\pi" if power else "")
    rational = terms.pop((1, 0), None)
    if rational is None or len(terms) != 1:
        return None
    (((radicand, power), c),) = terms.items()
    return None if power else two_terms(rational, c, radicand)


def one_term(c: Fraction, radicand: int, pi: str) -> Form | None:
    sign = "-" if c < 0 else ""
    p, q = abs(c.numerator), c.denominator
    if radicand > 1 and pi:
        return None
    if radicand > 1:
        root, free = "\\sqrt{{{}}}", "${%d}$ is not divisible by the square of any prime"
        if q == 1:
            return Form(f"{sign}{{}}{root}", (p, radicand), "${0}$ and ${1}$ are positive integers and " + free % 1)
        return Form(
            f"{sign}\\frac{{{{{{}}{root}}}}}{{{{{{}}}}}}",
            (p, radicand, q),
            "${0}$, ${1}$ and ${2}$ are positive integers, ${0}$ and ${2}$ are relatively prime, and " + free % 1,
        )
    if q == 1:
        return Form(f"{sign}{{}}{pi}", (p,), "${0}$ is a positive integer")
    return Form(
        f"{sign}\\frac{{{{{{}}}}}}{{{{{{}}}}}}{pi}", (p, q), "${0}$ and ${1}$ are relatively prime positive integers"
    )


def two_terms(rational: Fraction, c: Fraction, radicand: int) -> Form:
    """(a + b√m)/d in lowest terms; a letter that would always be 1 is left out, as in (a+√b)/c."""
    d = math.lcm(rational.denominator, c.denominator)
    a, b = int(rational * d), int(c * d)
    lead, join = "-" if a < 0 else "", "-" if b < 0 else "+"
    with_b = abs(b) != 1
    top = f"{lead}{{}}{join}{'{}' if with_b else ''}\\sqrt{{{{{{}}}}}}"
    values = (abs(a), *((abs(b),) if with_b else ()), radicand)
    listed = [f"${{{at}}}$" for at in range(len(values) + (d > 1))]
    positive = f"{', '.join(listed[:-1])} and {listed[-1]} are positive integers"
    free = f"{listed[len(values) - 1]} is not divisible by the square of any prime"
    if d == 1:
        return Form(top, values, f"{positive} and {free}")
    coprime = f", no prime divides all of {listed[0]}, {listed[1]} and {listed[3]}," if with_b else ""
    return Form(f"\\frac{{{{{top}}}}}{{{{{{}}}}}}", (*values, d), f"{positive}{coprime} and {free}")


def restate(problem: Problem, form: Form) -> Restated | str:
    free = [letter for letter in LETTERS if letter not in letters_used(problem.question)]
    if len(free) < len(form.values):
        return "no unused letters"
    letters = sorted(free[: len(form.values)]) if len(form.values) > 2 else free[: len(form.values)]
    tex, asks = form.tex.format(*letters), "+".join(letters)
    what = f"${asks}$" if len(letters) > 1 else f"${letters[0]}$"
    sentence = (
        f"The answer can be written in the form ${tex}$, where {form.conditions.format(*letters)}. "
        f"Give the value of {what} as the answer."
    )
    question = f"{problem.question.rstrip()}\n{sentence}"
    values = dict(zip(letters, form.values, strict=True))
    if parse(tex, values) != parse(plain_answer(problem.answer)):
        raise AssertionError(f"{problem.answer}: the form {tex} with {values} is another number")
    return Restated(with_answer(problem, question, sum(form.values)), tex, asks, values)


def with_answer(problem: Problem, question: str, answer: int) -> Problem:
    """The problem under its new question, which is another problem with its own id, and its new answer."""
    if question == problem.question:
        return replace(problem, answer=str(answer))
    meta = {**problem.meta, "original_id": problem.id, "original_answer": problem.answer}
    return Problem(problem_id(question), question, str(answer), problem.source, meta)


def letters_used(question: str) -> set[str]:
    """Letters that may stand for something in the question, lower case: all in its math, single ones elsewhere."""
    math_parts = ["".join(part or "" for part in match.groups()) for match in MATH.finditer(question)]
    outside = MATH.sub(" ", question)
    math_parts += [word for word in outside.split() if MATH_SIGNS & set(word)]
    used = {letter for part in math_parts for letter in COMMAND.sub(" ", part) if letter.isalpha()}
    used |= set(SINGLE.findall(COMMAND.sub(" ", outside)))
    return {letter.lower() for letter in used}
