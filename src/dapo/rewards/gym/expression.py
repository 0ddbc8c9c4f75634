"""An arithmetic expression of whole numbers, read by a parser of its own: exact, bounded, and nothing is evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

from dapo.rewards.limits import MAX_DEPTH

MAX_CHARS = 2_000
MAX_DIGITS = 12
_TOKEN = re.compile(r"\s*(\d+|[-+*/()])")


def value_of(text: str) -> tuple[Fraction, list[int]]:
    """The expression's value and the numbers it uses, in order. ValueError where it is none, or divides by zero."""
    tokens = tokens_of(text)
    reader = _Reader(tokens)
    value = reader.sum(0)
    if reader.at < len(tokens):
        raise ValueError(f"{tokens[reader.at]!r} is not expected")
    return value, [int(token) for token in tokens if token.isdigit()]


def tokens_of(text: str) -> list[str]:
    text = text.strip()
    if len(text) > MAX_CHARS:
        raise ValueError("the expression is too long")
    tokens: list[str] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or not found[1].isascii() or len(found[1]) > MAX_DIGITS:
            raise ValueError(f"{text[at : at + 12]!r} is no part of an arithmetic expression")
        tokens.append(found[1])
        at = found.end()
    return tokens


class _Reader:
    """Sums of products of factors, by recursive descent; brackets and signs nest to MAX_DEPTH."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0

    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.next()
        self.at += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.next() in ("+", "-"):
            value = value + self.product(depth) if self.take() == "+" else value - self.product(depth)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.next() in ("*", "/"):
            if self.take() == "*":
                value *= self.factor(depth)
            elif divisor := self.factor(depth):
                value /= divisor
            else:
                raise ValueError("it divides by zero")
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        token = self.take()
        if token == "-":
            return -self.factor(depth + 1)
        if token == "+":
            return self.factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise ValueError("a bracket is not closed")
            return value
        if not token.isdigit():
            raise ValueError(f"{token or 'nothing'!r} stands where a number is expected")
        return Fraction(int(token))
