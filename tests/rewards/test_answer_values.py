"""Which spellings are one answer, and which must stay apart."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.rewards.math.answer_values import value_of


@pytest.mark.parametrize(
    "spellings",
    [
        ["42", "$42$", "42.0", r"\(42\)", "**42**", "x = 42", "42.", r"\boxed{42}", "6 * 7 = 42", "42 cm", "84/2"],
        ["1/2", "0.5", r"\frac12", r"\dfrac{1}{2}", r"50\%"],
        ["1000", "1,000", "10^3"],
        ["60", r"60^\circ"],
        ["1, 2", "2, 1", r"\{1, 2\}", "1 and 4/2"],
        [r"\sqrt{2}/2", r"\frac{\sqrt 2}{4/2}"],
        ["even", "Even", "$even$"],
        ["B", "(B)", r"\text{B}"],
        ["print('x')", " print('x')  "],
    ],
)
def test_one_value(spellings: list[str]):
    assert len({value_of(text) for text in spellings}) == 1, [value_of(text) for text in spellings]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("42", "-42"),
        ("42", "about 42"),
        ("(1, 2)", "(2, 1)"),
        ("(1, 2)", "[1, 2]"),
        ("6 * 7 = 41", "41"),
        ("x", "y"),
        ("1 2", "12"),
        ("", "0"),
        ("9^9^9^9", "9^9^9"),
    ],
)
def test_two_values(one: str, other: str):
    assert value_of(one) != value_of(other)


SIGNS = st.sampled_from(
    [*"0123456789.,+-*/^=(){}[]<>!%$|_&~:; xye", "\\frac", "\\sqrt", "\\pi", "\\text{", "±", "½", "²"]
)


@given(st.one_of(st.text(max_size=80), st.lists(SIGNS, max_size=30).map("".join)))
@settings(max_examples=400)
def test_any_text_has_a_value_that_can_be_counted(text: str):
    assert value_of(text) == value_of(text)
    assert isinstance(hash(value_of(text)), int)
