"""The kinds of reference that `dapo data check` counts, and that no text takes long to classify."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_time import cpu_seconds
from dapo.data.answer_types import answer_type, may_be_decimal


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("42", "integer"),
        ("1,234", "integer"),
        ("\\frac{84}{2}", "integer"),
        ("60^\\circ", "integer"),
        ("0.5", "decimal"),
        ("\\frac{1}{2}", "fraction"),
        ("2\\sqrt{3}", "closed form"),
        ("\\frac{\\pi}{4}", "closed form"),
        ("(B)", "choice"),
        ("\\text{(C)}", "choice"),
        ("(1,2)", "list"),
        ("[0,\\infty)", "list"),
        ("\\text{Monday}", "text"),
        ("east", "text"),
        ("x^2+1", "expression"),
        ("y = 3x", "expression"),
        ("9" * 2000, "long"),
    ],
)
def test_kinds(answer, kind):
    assert answer_type(answer) == kind


@settings(max_examples=30)
@given(st.text())
def test_every_text_has_a_kind(answer):
    assert answer_type(answer)


@pytest.mark.parametrize(
    "answer", ["a" * 900 + "1", "a b" * 300 + "!", " " * 900 + "x", "\\text{" * 150, "1," * 450, "{" * 900]
)
def test_no_text_takes_long(answer):
    assert cpu_seconds(lambda: answer_type(answer)) < 5


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("12,5", True), ("-0,25", True), ("3,1416", True), ("$12,5$", True),
        ("12,500", False), ("1,234,567", False), ("(12,5)", False), ("12.5", False), ("1, 2", False), ("12,", False),
    ],
)  # fmt: skip
def test_a_comma_that_may_be_a_decimal_comma(answer: str, expected: bool):
    assert may_be_decimal(answer) is expected
