"""The exact parser: equal to floating point on what it reads, and quick to refuse everything else."""

import contextlib
import math
import sys
import tracemalloc
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dapo.data.closed_forms import ExactValue, NoClosedForm, parse, squarefree

small = st.integers(-50, 50)
positive = st.integers(1, 200)


@given(small, small, positive, positive)
def test_a_surd_equals_its_floating_point_value(a, b, m, d):
    value = parse(f"\\frac{{{a}+({b})\\sqrt{{{m}}}}}{{{d}}}")
    assert math.isclose(float(value), (a + b * math.sqrt(m)) / d, rel_tol=1e-12, abs_tol=1e-12)


@given(small, small, small, small, positive)
def test_equal_numbers_have_equal_terms(a, b, c, d, m):
    """(a + b√m)(c + d√m) = ac + bdm + (ad + bc)√m."""
    left = parse(f"({a}+{b}\\sqrt{{{m}}})*({c}+{d}\\sqrt{{{m}}})".replace("+-", "-"))
    right = parse(f"({a * c + b * d * m})+({a * d + b * c})\\sqrt{{{m}}}")
    assert left == right


@given(small, small, positive)
def test_the_inverse_is_the_inverse(a, b, m):
    value = parse(f"{a}+({b})\\sqrt{{{m}}}")
    assume(value.terms)
    assert value * value.inverse() == ExactValue.rational(1)


@given(st.integers(1, 10**6))
def test_squarefree_part(number):
    outside, inside = squarefree(number)
    assert outside**2 * inside == number
    assert all(inside % (p * p) for p in range(2, 1001))


@given(st.fractions())
def test_every_way_to_write_a_fraction(number):
    assume(abs(number.numerator) < 10**9)
    p, q = number.numerator, number.denominator
    for text in (f"{p}/{q}", f"\\frac{{{p}}}{{{q}}}", f"\\dfrac{{{p}}}{{{q}}}", f"$ {p} / {q} $", f"({p})\\div({q})"):
        assert parse(text).as_rational() == number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\frac12", Fraction(1, 2)),
        ("\\frac{1}2", Fraction(1, 2)),
        ("2^{10}", Fraction(1024)),
        ("2^{-1}", Fraction(1, 2)),
        ("\\sqrt{49}", Fraction(7)),
        ("\\left(3\\right)", Fraction(3)),
        ("−5", Fraction(-5)),
        ("0.25", Fraction(1, 4)),
        ("2\\cdot 3", Fraction(6)),
        ("3\\,!", None),
        ("3 5", None),
        ("2\\frac12", None),
        ("\\frac123", None),
        ("\\sqrt12", None),
        ("\\sqrt[3]{8}", None),
        ("2^10", None),
        ("x", None),
        ("", None),
        ("(1,2)", None),
        ("1/0", None),
        ("0^{-1}", None),
        ("\\sqrt{-1}", None),
        ("१२", None),
    ],
)
def test_what_is_read_and_what_is_not(text, expected):
    try:
        assert parse(text).as_rational() == expected
    except NoClosedForm:
        assert expected is None


HOSTILE = [
    "9^9^9^9", "9^{9^{9^{9}}}", "((((((((9^{64})^{64})^{64})^{64})))))", "2^{999999999}", "\\sqrt{" + "9" * 150 + "}",
    "(" * 10_000, "\\frac{1}{" * 30, "\\sqrt{999999937}" * 12, "\\sqrt{999999937}\\sqrt{999999929}", "1" * 100_000,
    "(1+\\sqrt{2})^{64}",
    "(1+\\sqrt{2}+\\sqrt{3}+\\sqrt{5}+\\sqrt{7}+\\sqrt{11}+\\sqrt{13}+\\sqrt{17})^{64}", "1/(" * 60,
    "\\" * 150, "{}" * 90, "\x00", "٣", "²", "𝟗^𝟗", "--" * 90 + "1",
]  # fmt: skip


MOST_CALLS = 10_000  # of functions; all that loops in one of them is the search for square factors
MOST_LINES = 200_000  # of that search: 32,000 turns of five lines
MOST_BYTES = 100_000  # at once: no number on the way is long


class TooMuchWork(BaseException):
    """Nothing that is caught on the way."""


def work_of(what: Callable[[], object], *, event: str, most: int) -> int:
    """How many lines of Python or calls of functions it takes, which is the same on every machine; stopped beyond."""
    n = 0

    def count(_frame: object, seen: str, _argument: object) -> Callable[..., Any] | None:
        nonlocal n
        n += seen == event
        if n > most or (seen == "call" and tracemalloc.get_traced_memory()[1] > MOST_BYTES):
            raise TooMuchWork(n, tracemalloc.get_traced_memory()[1])
        return count if event == "line" else None

    before = sys.gettrace()
    tracemalloc.start()
    sys.settrace(count)
    try:
        with contextlib.suppress(NoClosedForm):
            what()
    finally:
        sys.settrace(before)
        tracemalloc.stop()
    return n


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_refused_or_read_at_once(text):
    assert work_of(lambda: float(parse(text)), event="call", most=MOST_CALLS)  # or nothing was counted


@pytest.mark.parametrize("number", [999_999_937, 31_607**2, 999_999_999_989, 10**300])
def test_the_search_for_square_factors_ends(number):
    """The largest prime below the limit and the largest square of one; a prime and another number beyond it."""
    assert work_of(lambda: squarefree(number), event="line", most=MOST_LINES)


@given(st.text("0123456789+-*/^(){}[]\\sqrtfacpi .,$_√π", max_size=80))
def test_any_text_is_a_value_or_a_refusal(text):
    try:
        value = parse(text)
    except NoClosedForm:
        return
    assert math.isfinite(float(value))
