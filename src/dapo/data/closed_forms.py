r"""Exact values of short closed forms: \frac{1+\sqrt{5}}{2}, 11-2\sqrt6, 3\pi/4.

Our own small parser, so that a hostile reference can at most be refused: no power towers, no big factorisations, no
recursion without end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 200
MAX_DEPTH = 20
MAX_BITS = 256  # of any numerator, denominator or radicand on the way
MAX_RADICAND = 10**9  # trial division needs 32,000 steps at most
MAX_EXPONENT = 64
MAX_TERMS = 16

TOKEN = re.compile(r"\s*(?:([0-9]+(?:\.[0-9]+)?)|(\\[a-zA-Z]+)|(sqrt|pi)(?![a-zA-Z])|([a-zA-Z])|(.))", re.DOTALL)
SPACING = re.compile(r"\\[,;:! ]|\\q?quad|~")
SAME = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\cdot": "*", "\\times": "*", "·": "*", "×": "*",
    "\\div": "/", "÷": "/", "−": "-", "–": "-", "sqrt": "√", "π": "\\pi", "pi": "\\pi", "[": "(", "]": ")",
    "\\{": "(", "\\}": ")",
}  # fmt: skip
SQRT_INDEX = re.compile(r"\\sqrt\s*\[")


class NoClosedForm(ValueError):
    """The text is not one of the forms this module knows, or would grow out of bounds."""


@dataclass(frozen=True, slots=True)
class ExactValue:
    """Σ c · √r · π^k with rational c, squarefree r: exact, and equal if and only if the terms are equal."""

    terms: tuple[tuple[tuple[int, int], Fraction], ...]  # ((r, k), c) sorted, c ≠ 0

    @classmethod
    def of(cls, terms: Mapping[tuple[int, int], Fraction]) -> ExactValue:
        kept = {key: c for key, c in terms.items() if c}
        if len(kept) > MAX_TERMS:
            raise NoClosedForm("too many terms")
        for (radicand, power), c in kept.items():
            if (
                max(c.numerator.bit_length(), c.denominator.bit_length(), radicand.bit_length()) > MAX_BITS
                or abs(power) > 8
            ):
                raise NoClosedForm("a number grows too large")
        return cls(tuple(sorted(kept.items())))

    @classmethod
    def rational(cls, number: Fraction | int) -> ExactValue:
        return cls.of({(1, 0): Fraction(number)})

    def __add__(self, other: ExactValue) -> ExactValue:
        terms = dict(self.terms)
        for key, c in other.terms:
            terms[key] = terms.get(key, Fraction(0)) + c
        return ExactValue.of(terms)

    def __neg__(self) -> ExactValue:
        return ExactValue(tuple((key, -c) for key, c in self.terms))

    def __mul__(self, other: ExactValue) -> ExactValue:
        product: dict[tuple[int, int], Fraction] = {}
        for (r, k), c in self.terms:
            for (s, j), d in other.terms:
                common = math.gcd(r, s)  # r and s are squarefree, so √r √s = common · √(rs/common²)
                key = (r * s // common**2, k + j)
                product[key] = product.get(key, Fraction(0)) + c * d * common
        return ExactValue.of(product)

    def inverse(self) -> ExactValue:
        """1/x for one term; for two by the conjugate, when (a+b)(a−b) = a² − b² has one term."""
        if len(self.terms) == 1:
            ((radicand, power), c) = self.terms[0]
            return ExactValue.of({(radicand, -power): 1 / (c * radicand)})
        if len(self.terms) == 2:
            first, second = self.terms
            conjugate = ExactValue((first, (second[0], -second[1])))
            square = self * conjugate
            if len(square.terms) == 1:
                return conjugate * square.inverse()
        raise NoClosedForm("a denominator with no simple inverse")

    def root(self) -> ExactValue:
        """√x of a non-negative rational."""
        number = self.as_rational()
        if number is None or number < 0:
            raise NoClosedForm("a root of something other than a non-negative rational")
        outside, inside = squarefree(number.numerator * number.denominator)
        return ExactValue.of({(inside, 0): Fraction(outside, number.denominator)})

    def power(self, exponent: int) -> ExactValue:
        if abs(exponent) > MAX_EXPONENT:
            raise NoClosedForm("an exponent over 64")
        base = self if exponent >= 0 else self.inverse()
        result = ExactValue.rational(1)
        for _ in range(abs(exponent)):
            result = result * base
        return result

    def as_rational(self) -> Fraction | None:
        if not self.terms:
            return Fraction(0)
        (key, c) = self.terms[0]
        return c if len(self.terms) == 1 and key == (1, 0) else None

    def __float__(self) -> float:
        return math.fsum(float(c) * math.sqrt(r) * math.pi**k for (r, k), c in self.terms)


def squarefree(number: int) -> tuple[int, int]:
    """(a, b) with number = a²·b and b squarefree."""
    if number > MAX_RADICAND:
        root = math.isqrt(number)
        if root * root == number:
            return root, 1
        raise NoClosedForm("a radicand over 10⁹")
    outside, inside, rest, factor = 1, 1, number, 2
    while factor * factor <= rest:
        times = 0
        while rest % factor == 0:
            rest, times = rest // factor, times + 1
        outside, inside = outside * factor ** (times // 2), inside * factor ** (times % 2)
        factor += 1
    return outside, inside * rest if number else 0


def parse(text: str, letters: Mapping[str, int] | None = None) -> ExactValue:
    """The exact value of a closed form, with single letters standing for the integers given. NoClosedForm otherwise."""
    if len(text) > MAX_CHARS:
        raise NoClosedForm("longer than 200 characters")
    if SQRT_INDEX.search(text):
        raise NoClosedForm("a root other than the square root")
    parser = Parser(tokens(text), letters or {})
    value = parser.sum()
    if parser.peek() is not None:
        raise NoClosedForm(f"cannot read {parser.peek()!r}")
    return value


def tokens(text: str) -> list[str]:
    cleaned = (
        SPACING.sub(" ", text).replace("\\left", " ").replace("\\right", " ").replace("\\{", "(").replace("\\}", ")")
    )
    found = []
    for match in TOKEN.finditer(cleaned.strip()):
        number, command, word, letter, other = match.groups()
        if number:
            found.append(number)
        elif (token := command or word or letter or (other or "").strip()) and token != "$":
            found.append(SAME.get(token, token))
    return found


class Parser:
    """Recursive descent: a sum of products of powers."""

    def __init__(self, tokens: list[str], letters: Mapping[str, int]) -> None:
        self.tokens = tokens
        self.letters = letters
        self.at = 0
        self.depth = 0

    def peek(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self, wanted: str | None = None) -> str:
        token = self.peek()
        if token is None or (wanted is not None and token != wanted):
            raise NoClosedForm(f"expected {wanted or 'more'}, found {token or 'the end'}")
        self.at += 1
        return token

    def sum(self) -> ExactValue:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NoClosedForm("nested too deeply")
        value = self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value + -self.product()
        self.depth -= 1
        return value

    def product(self) -> ExactValue:
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        value = self.raised()
        while True:
            token = self.peek()
            if token == "*":
                self.take()
                value = value * self.raised()
            elif token == "/":
                self.take()
                value = value * self.raised().inverse()
            elif token is not None and self.multiplies(token):
                value = value * self.raised()
            else:
                return value if sign > 0 else -value

    def multiplies(self, token: str) -> bool:
        """Whether a token right after a factor multiplies it. A number or \\frac does not: 2\\frac12 is no product."""
        return token in ("(", "{", "\\sqrt", "√", "\\pi") or token in self.letters

    def raised(self) -> ExactValue:
        value = self.atom()
        if self.peek() == "^":
            self.take()
            exponent = self.argument().as_rational()
            if exponent is None or exponent.denominator != 1:
                raise NoClosedForm("an exponent that is not an integer")
            value = value.power(int(exponent))
        return value

    def atom(self) -> ExactValue:
        token = self.take()
        if is_number(token):
            return ExactValue.rational(bounded(token))
        if token in ("(", "{"):
            value = self.sum()
            self.take(")" if token == "(" else "}")
            return value
        if token == "\\frac":
            return self.fraction()
        if token == "\\sqrt":
            return self.argument().root()
        if token == "√":  # outside TeX a root reaches over the whole number
            return self.atom().root()
        if token == "\\pi":
            return ExactValue.of({(1, 1): Fraction(1)})
        if token in self.letters:
            return ExactValue.rational(self.letters[token])
        raise NoClosedForm(f"cannot read {token!r}")

    def fraction(self) -> ExactValue:
        """\\frac{a}{b}, and TeX's \\frac12, which the tokens hold as one number."""
        token = self.peek() or ""
        if is_number(token) and len(token) == 2:
            self.tokens[self.at : self.at + 1] = list(token)
        return self.argument() * self.argument().inverse()

    def argument(self) -> ExactValue:
        """A braced expression or a single digit. TeX and readers disagree about more digits: refused."""
        token = self.peek() or ""
        if is_number(token) and len(token) > 1:
            raise NoClosedForm(f"{token} without braces")
        return self.atom()


def is_number(token: str) -> bool:
    return token[:1].isascii() and token[:1].isdigit()


def bounded(digits: str) -> Fraction:
    if len(digits) > 60:
        raise NoClosedForm("a number of over 60 digits")
    return Fraction(digits)
