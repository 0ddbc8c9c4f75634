"""DAPO §3.5: answers become integers; the paper's own examples, and what must hold for every form."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dapo.data.closed_forms import parse, squarefree
from dapo.data.prepare.integer_answers import Restated, integer_answer, letters_used
from dapo.types import Problem


def ask(answer: str, question: str = "Find it.") -> Restated | str:
    return integer_answer(Problem("original", question, answer))


@pytest.mark.parametrize(
    ("answer", "total"),
    [
        ("\\frac{1+\\sqrt{5}}{2}", 1 + 5 + 2),  # (a+√b)/c → a+b+c
        ("11-2\\sqrt{6}", 11 + 2 + 6),  # k−m√n → k+m+n, the paper's 19
        ("5\\sqrt{3}", 5 + 3),  # k√m → k+m
        ("\\frac{3}{4}", 3 + 4),
        ("-\\frac{6}{8}", 3 + 4),
        ("0.75", 3 + 4),
        ("\\sqrt{12}", 2 + 3),
        ("\\frac{2}{\\sqrt{2}}", 1 + 2),
        ("\\frac{4-6\\sqrt{2}}{8}", 2 + 3 + 2 + 4),
        ("12\\pi", 12),
        ("\\frac{3\\pi}{4}", 3 + 4),
    ],
)
def test_the_papers_forms(answer, total):
    restated = ask(answer)
    assert restated.problem.answer == str(total)
    assert parse(restated.form, restated.values) == parse(answer)


@pytest.mark.parametrize(
    "answer", ["42", "+42", "042", "\\$42", "42^\\circ", "42 \\text{ cm}", "$42$", "\\frac{84}{2}"]
)
def test_what_is_an_integer_stays_its_own_question(answer):
    restated = ask(answer)
    assert (restated.problem.question, restated.problem.answer, restated.problem.id) == ("Find it.", "42", "original")


def test_thousands_commas_count_only_in_their_places():
    assert ask("1,234").problem.answer == "1234"
    assert ask("12{,}345").problem.answer == "12345"
    assert isinstance(ask("1,2"), str)
    assert isinstance(ask("12,34"), str)


@pytest.mark.parametrize(
    "answer", ["(1,2)", "x+1", "\\text{Monday}", "\\sqrt{2}+\\sqrt{3}", "9^9^9", "", "25\\%", "\\pi+1"]
)
def test_everything_else_says_why_not(answer):
    assert isinstance(ask(answer), str)
    assert ask(answer)


def test_a_rounded_decimal_has_no_exact_value():
    assert isinstance(ask("3.14", "Give it to the nearest hundredth."), str)
    assert ask("3.14", "How much is it?").problem.answer == str(157 + 50)


@given(st.integers(-40, 40), st.integers(-40, 40), st.integers(1, 60), st.integers(1, 40))
def test_values_are_determined_by_the_number(a, b, m, d):
    """However (a + b√m)/d is written, the integers are the same, positive, and make up the number."""
    assume(a and b and squarefree(m)[1] > 1)
    written = [f"\\frac{{{k * a}+({k * b})\\sqrt{{{m}}}}}{{{k * d}}}" for k in (1, 2, 5)]
    written.append(f"({a})/{d}+({b})/{d}\\sqrt{{{m}}}")
    restated = [ask(text) for text in written]
    assert len({(r.form, tuple(r.values.items()), r.problem.answer) for r in restated}) == 1
    assert all(value > 0 for value in restated[0].values.values())
    assert parse(restated[0].form, restated[0].values) == parse(written[0])
    assert restated[0].problem.answer == str(sum(restated[0].values.values()))


@given(st.text("abcdefghijklmnopqrstuvwxyzABC $\\", max_size=60))
def test_letters_are_new(question):
    restated = ask("\\frac{1-2\\sqrt{3}}{5}", f"Find it. {question}")
    if isinstance(restated, str):
        assert restated == "no unused letters"
        return
    alone = {letter.lower() for letter in re.findall(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])", question.replace("\\", " "))}
    single_math = {letter for letter in alone if f"\\{letter}" not in question.lower()}  # \\A is a macro
    assert not restated.values.keys() & single_math
    assert restated.problem.question.startswith("Find it.")


def test_letters_in_math_count_one_by_one():
    assert letters_used("Let $ab=\\sin x$ and Q be a point, f(2n)=3.") >= {"a", "b", "x", "q", "f", "n"}
    assert "s" not in letters_used("Compute $\\sin 3$.")


def test_the_restated_problem_is_a_new_one():
    restated = ask("\\frac{1}{2}")
    assert restated.problem.id != "original"
    assert restated.problem.meta == {"original_id": "original", "original_answer": "\\frac{1}{2}"}
