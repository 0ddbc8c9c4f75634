"""Properties of verdicts on any text. `fuzz.py` looks for an exception to them; the suite draws a few examples, the
same ones every time (`test_answers_properties.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dapo.rewards import VerifierPool, reference_error
from dapo.rewards.math import rule
from dapo.rewards.math.answer_values import value_of
from dapo.rewards.math.vocabulary import CURRENCIES, DERIVED_UNITS, UNITS
from dapo.types import Verdict
from hostile.answers_lines import labelled_lines

LINES = labelled_lines()
_SIGNS = r"""
    \boxed{ } { ( ) $ \frac \sqrt ^ _ 42 41 9 ! = , . or and Answer: \text{ \left( \right) x y - + * / \begin{pmatrix}
    \begin{vmatrix} \end{pmatrix} \\ & % \% ° ≈ < > | \pm e i E5 1,234 1_000 答案： 答案是 ** ` [ ] \cup \infty \{ \}
    \log_ \log million is not : ~ ' " \overline{ \bar \hat{ \vec 0. ½ ⅜ ² ₂ \circ <answer> </answer> </think> C( 5C2
    \choose \over cm m/s per square kg °C \$ dollars p.m. 3:45 \in \{1,2\} x=1 y=2 (x,y)= 1/0 0 \binom \lfloor \rfloor
    sin 𝟒 𝐱 ⑤ the answer is The half forty-two thirds to
    """
SIGNS = [*_SIGNS.split(), " ", "\n", "\u200b", "\ud800", "\x00", "\u0305", "\t"]
_REFERENCES = r"""
    42 \frac12 \sqrt2 (1,2) x^2+1 1,2 \text{even} y=2x+1 [0,\infty) 3:1 101_2 50\% 42\text{cm} x=1,y=2 \$12 42^\circ
    \begin{pmatrix}1\\2\end{pmatrix} \emptyset \infty 1/0 3+4i \ln2 3:45 \overline{z} \{1,2\} x>3 42km/h -5 B \pm3
    """
REFERENCES = _REFERENCES.split()
_CLEAR = r"""
    Answer: {}
    Answer: ${}$
    **Answer:** \({}\).
    \boxed{{{}}}
    <answer>{}</answer>
    The answer is {}.
    So the answer is ${}$.
    Answer: x = {}
    Answer: {} cm
    答案：{}
    <answer>$x = {}$</answer>
    So it is $\boxed{{{}}}$. Actually, 2 is wrong, since it is less than 3 million.
    """
CLEAR = [line.strip() for line in _CLEAR.strip().splitlines()]
# Each makes another value of any integer from 4 on, or none.
_CHANGES = r"""
    -{} ; \sqrt{{{}}} ; \frac{{1}}{{{}}} ; {}^2 ; {}^{{-1}} ; \overline{{{}}} ; \bar{{{}}} ; \hat{{{}}} ; \vec{{{}}}
    \tilde{{{}}} ; \widehat{{{}}} ; \dot{{{}}} ; ${}!$ ; |x| = {} ; \lvert y \rvert = {} ; {}' ; {}'' ; {}^\prime ; {}i
    {}x ; {}\pi ; {} million ; {}k ; {}e3 ; {}_{{37}} ; not {} ; {} or so ; about {} ; ≈ {} ; > {} ; x \ne {} ; \log {}
    \phi({}) ; {}\%\% ; \cancel{{{}}} ; <s>{}</s> ; {} squared ; half of {} ; ±{} ; {}:1 ; [{}] ; ({}, {}) ; {}, -{}
    {}₃₇ ; \lfloor {} \rfloor + 1 ; x^2 = {} ; 2x = {} ; {}? ; {}... ; {} in hex ; the square of {} ; {}nd ; {} + 1
    {}!! ; \neg {} ; {}^c ; {}^T ; 0x{} ; {}\overline{{{}}} ; 1/0 = {} ; {}⑤ ; {}ⁿ ; C({},2) + 1 ; {}:45 ; !{}
    """
_CHANGED_BOXES = r"""
    -\boxed{{{}}} ; 0.\boxed{{{}}} ; 3:\boxed{{{}}} ; \boxed{{{}}}:1 ; \boxed{{{}}}_{{37}} ; $\boxed{{{}}}$ in base 37
    \boxed{{{}}} million ; $\boxed{{{}}}$\text{{ dozen}} ; \boxed{{{}}} squared ; \boxed{{{}}} less than 3
    \boxed{{{}}} < x ; more than \boxed{{{}}} ; the square of $\boxed{{{}}}$ ; \boxed{{{}}} (extraneous)
    \boxed{{{}}} is wrong ; \boxed{{{}}}. No wait, 3. ; \boxed{{{}}}. Actually, that is wrong.
    $\boxed{{{}}}$. Correction: it is 3.
    """
CHANGED_BOXES = [change.strip() for line in _CHANGED_BOXES.strip().splitlines() for change in line.split(" ; ")]
CHANGES = [change.strip() for line in _CHANGES.strip().splitlines() for change in line.split(" ; ")]


def names_of(word: str) -> set[str]:
    """What a unit's word may mean, by the vocabulary alone."""
    return set(UNITS[word])


def base_units(name: str) -> dict[str, int]:
    return dict(DERIVED_UNITS.get(name, ((name, 1),)))


def may_be_equal(word: str, other: str) -> bool:
    return any(base_units(one) == base_units(two) for one in names_of(word) for two in names_of(other))


# `ms` and `dm` are products of variables too, sec is a secant, a unit one of any length, and a percentage a number.
_OTHERWISE = {"ms", "dm", "sec", "unit", "units", "percent", "percentage"}
unit_words = st.sampled_from(sorted(word for word in UNITS if len(word) > 1 and word not in _OTHERWISE))
integers = st.integers(4, 10**6)
fractions = st.fractions(min_value=0, max_denominator=200)
nonsense = st.lists(st.one_of(st.sampled_from(SIGNS), st.text(max_size=3)), max_size=25).map("".join)


@st.composite
def mutated_lines(draw: st.DrawFn) -> str:
    signs = list(draw(st.sampled_from(LINES)).response)
    for _ in range(draw(st.integers(1, 5))):
        place = draw(st.integers(0, len(signs)))
        signs[place : place + draw(st.integers(0, 3))] = [draw(st.sampled_from(SIGNS))]
    return "".join(signs)


responses = st.one_of(
    nonsense, nonsense.map("Answer: {}".format), nonsense.map("\\boxed{{{}}}".format), mutated_lines()
)
references = st.one_of(
    st.sampled_from(REFERENCES), st.sampled_from(sorted({line.reference for line in LINES})), nonsense
)


def never_raises(response: str, reference: str) -> None:
    rule.decide(response, reference)
    reference_error(reference)
    value_of(response[-500:])


def never_crashes(pool: VerifierPool, items: list[tuple[str, str]]) -> None:
    judgements = pool.judge_all(items)
    crashed = [(*item, said) for item, said in zip(items, judgements, strict=True) if said.verdict is Verdict.CRASH]
    assert not crashed


def a_clear_integer_is_itself_alone(number: int, other: int, spelling: str) -> None:
    response = spelling.format(number)
    assert verdict(response, str(number)) is Verdict.CORRECT, response
    assert number == other or verdict(response, str(other)) is Verdict.WRONG, (response, other)


def a_changed_value_is_another(number: int, change: str, spelling: str) -> None:
    response = spelling.format(change.format(number, number))
    assert verdict(response, str(number)) is not Verdict.CORRECT, response


def a_changed_box_is_another(number: int, spelling: str) -> None:
    response = spelling.format(number)
    assert verdict(response, str(number)) is not Verdict.CORRECT, response


def two_changes_are_no_less(number: int, outer: str, inner: str) -> None:
    """Of a value that is no integer; the change taken back (−−n, 1/(1/n)) is the value again."""
    response = f"Answer: {outer.format('(' + inner.format('(' + str(number) + ')') + ')')}"
    is_undone = outer == inner or {outer, inner} == {"\\frac{{1}}{{{}}}", "{}^{{-1}}"} or "$" in outer + inner
    is_undone |= {outer, inner} == {"\\sqrt{{{}}}", "{}^2"}
    assert is_undone or verdict(response, str(number)) is not Verdict.CORRECT, response


def another_unit_is_another_answer(number: int, word: str, other: str, power: int, other_power: int) -> None:
    wanted, said = spelled_unit(word, power), spelled_unit(other, other_power)
    for reference in (f"{number} {wanted}", f"{number}\\text{{ {wanted}}}"):
        found = verdict(f"Answer: {number} {said}", reference)
        if not may_be_equal(word, other) and not _are_volumes(word, other):
            assert found is not Verdict.CORRECT, (reference, said)
        if word == other:
            assert (found is Verdict.CORRECT) == (power == other_power), (reference, said)


def spelled_unit(word: str, power: int) -> str:
    return word if power == 1 else f"{word}^{power}"


def _are_volumes(word: str, other: str) -> bool:
    """ml is cm^3, so that its powers may meet others of cm."""
    powers = [base_units(name) for one in (word, other) for name in names_of(one)]
    return any(a.keys() == b.keys() for a, b in itertools.combinations(powers, 2))


def a_rate_is_told_from_its_parts(number: int, top: str, bottom: str, other: str) -> None:
    reference = f"{number} {top} per {bottom}"
    is_price = (names_of(top) | names_of(bottom)) & (CURRENCIES | {"percent"})  # what it is for need not be said
    if is_price or names_of(top) & names_of(bottom) or _are_volumes(top, bottom):
        return
    for said in (top, bottom, f"{bottom} per {top}", f"{top}^2 per {bottom}", f"{top} {bottom}"):
        assert verdict(f"Answer: {number} {said}", reference) is not Verdict.CORRECT, (reference, said)
    if not may_be_equal(bottom, other) and not _are_volumes(bottom, other):
        assert verdict(f"Answer: {number} {top} per {other}", reference) is not Verdict.CORRECT, (reference, other)
    for said in (f"{top} per {bottom}", f"{top}/{bottom}", f"\\text{{ {top}}}/\\text{{{bottom}}}"):
        assert verdict(f"Answer: {number} {said}", reference) is Verdict.CORRECT, (reference, said)


def variables_have_their_own_values(letters: list[str], values: list[int], data: st.DataObject) -> None:
    names = letters[: len(values)]
    wanted = dict(zip(names, values, strict=True))
    said = dict(zip(names, data.draw(st.permutations(values)), strict=True))
    order = data.draw(st.permutations(names))
    reference = ", ".join(f"{name}={value}" for name, value in wanted.items())
    spellings = (
        ", ".join(f"{name} = {said[name]}" for name in order),
        " and ".join(f"{name} = {said[name]}" for name in order),
        f"({', '.join(order)}) = ({', '.join(str(said[name]) for name in order)})",
    )
    for spelling in spellings:
        expected = Verdict.CORRECT if said == wanted else Verdict.WRONG
        assert verdict(f"Answer: {spelling}", reference) is expected, (reference, spelling)


def a_ratio_is_its_fraction_alone(ratio: Fraction, other: Fraction) -> None:
    if ratio.denominator == 1 or ratio == 0 or len(str(ratio.denominator)) == 2:  # 3:45 may be a time
        return
    response = f"Answer: {ratio.numerator}:{ratio.denominator}"
    assert verdict(response, str(ratio)) is Verdict.CORRECT, response
    assert ratio == other or verdict(response, str(other)) is not Verdict.CORRECT, (response, other)


def verdict(response: str, reference: str) -> Verdict:
    """Of the exact rules, which see everything here; what they leave to a worker is not CORRECT yet."""
    finding = rule.decide(response, reference)
    return rule.decide_fully(response, reference).verdict if finding is None else finding.verdict


PROPERTIES: dict[Callable[..., None], tuple[st.SearchStrategy[Any], ...]] = {
    never_raises: (responses, references),
    a_clear_integer_is_itself_alone: (integers, integers, st.sampled_from(CLEAR)),
    a_changed_value_is_another: (integers, st.sampled_from(CHANGES), st.sampled_from(CLEAR[:6])),
    a_changed_box_is_another: (integers, st.sampled_from(CHANGED_BOXES)),
    two_changes_are_no_less: (integers, st.sampled_from(CHANGES[:12]), st.sampled_from(CHANGES[:12])),
    another_unit_is_another_answer: (integers, unit_words, unit_words, st.integers(1, 3), st.integers(1, 3)),
    a_rate_is_told_from_its_parts: (integers, unit_words, unit_words, unit_words),
    variables_have_their_own_values: (
        st.permutations("xyzabpq"),
        st.lists(st.integers(-9, 9), min_size=2, max_size=3),
        st.data(),
    ),
    a_ratio_is_its_fraction_alone: (
        st.fractions(min_value=0, max_denominator=200),
        st.fractions(min_value=0, max_denominator=200),
    ),
}
ITEMS = st.lists(st.tuples(responses, references), min_size=20, max_size=20)


def drawn(check: Callable[..., None], *, n_examples: int, seed: int) -> Callable[..., None]:
    """A property with that many examples, the same ones for the same seed."""
    quiet = settings(
        max_examples=n_examples, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    return hypothesis.seed(seed)(quiet(given(*PROPERTIES.get(check, (ITEMS,)))(check)))
