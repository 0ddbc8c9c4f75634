"""The rational value of an expression: a fraction, never a float, and bounded so that no power tower is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from dapo.rewards.limits import MAX_BITS, MAX_FACTORIAL
from dapo.rewards.math.tree import Node


class TooLargeError(Exception):
    """A number too large to be worth computing: a power tower, a huge factorial."""


def exact(node: Node) -> Fraction | None:
    """The rational value of an expression, None when it is not (visibly) rational. TooLargeError before it explodes."""
    match node.op:
        case "num":
            return node.value
        case "neg":
            inner = exact(node.args[0])
            return None if inner is None else -inner
        case "percent":
            inner = exact(node.args[0])
            return None if inner is None else inner / 100
        case "add" | "mul" | "div":
            left, right = exact(node.args[0]), exact(node.args[1])
            if left is None or right is None:
                return None
            if node.op == "add":
                return left + right
            if node.op == "mul":
                return _checked(left * right)
            return _checked(left / right) if right else None
        case "pow":
            return _power(exact(node.args[0]), exact(node.args[1]))
        case "factorial":
            inner = exact(node.args[0])
            if inner is None or inner.denominator != 1 or inner < 0:
                return None
            if inner > MAX_FACTORIAL:
                raise TooLargeError
            return Fraction(math.prod(range(int(inner), 0, -2)) if node.name else math.factorial(int(inner)))
        case "binomial":
            top, bottom = exact(node.args[0]), exact(node.args[1])
            if (
                top is None
                or bottom is None
                or top.denominator != 1
                or bottom.denominator != 1
                or bottom < 0
                or top < 0
            ):
                return None
            if top > MAX_FACTORIAL:
                raise TooLargeError
            return Fraction(math.comb(int(top), int(bottom)))
        case "func" | "root":
            return _exact_function(node)
    return None


def exact_or_none(node: Node) -> Fraction | None:
    try:
        return exact(node)
    except TooLargeError:
        return None


def _checked(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise TooLargeError
    return value


def _power(base: Fraction | None, exponent: Fraction | None) -> Fraction | None:
    if base is None or exponent is None:
        return None
    if exponent.denominator != 1:
        root = _exact_root(base, exponent.denominator) if exponent.denominator <= 64 else None
        return None if root is None else _power(root, Fraction(exponent.numerator))
    if base == 0:
        return Fraction(0) if exponent > 0 else (Fraction(1) if exponent == 0 else None)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and abs(exponent) * bits > MAX_BITS:
        raise TooLargeError
    if abs(base) == 1:
        return Fraction(1) if base == 1 or exponent % 2 == 0 else Fraction(-1)
    return Fraction(base ** int(exponent))


def _exact_root(value: Fraction, index: int) -> Fraction | None:
    """The index-th root when it is rational; none of a negative number."""
    if value < 0:
        return None
    parts = [_integer_root(part, index) for part in (value.numerator, value.denominator)]
    if parts[0] is None or parts[1] is None:
        return None
    return Fraction(parts[0], parts[1])


def _integer_root(value: int, index: int) -> int | None:
    if index == 2:
        root = math.isqrt(value)
    else:
        low, high = 0, 1 << (value.bit_length() // index + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**index <= value else (low, middle - 1)
        root = low
    return root if root**index == value else None


def _exact_function(node: Node) -> Fraction | None:
    if node.name in _OF_SEVERAL and node.args[0].op == "bracket":
        several = [exact(arg) for arg in node.args[0].args]
        known = [value for value in several if value is not None]
        return _OF_SEVERAL[node.name](known) if len(known) == len(several) else None
    values = [exact(arg) for arg in node.args]
    if any(value is None for value in values):
        return None
    first = values[0]
    assert first is not None, "checked above"
    if node.op == "root":
        index = values[1]
        if index is None or index.denominator != 1 or not 1 < index <= 64:
            return None
        if first < 0 and int(index) % 2:
            root = _exact_root(-first, int(index))
            return None if root is None else -root
        return _exact_root(first, int(index))
    match node.name:
        case "sqrt":
            return _exact_root(first, 2)
        case "abs":
            return abs(first)
        case "floor":
            return Fraction(math.floor(first))
        case "ceil":
            return Fraction(math.ceil(first))
    return None


def _of_integers(function: Callable[..., int]) -> Callable[[list[Fraction]], Fraction | None]:
    def call(values: list[Fraction]) -> Fraction | None:
        if any(value.denominator != 1 for value in values):
            return None
        return Fraction(function(*map(int, values)))

    return call


_OF_SEVERAL: dict[str, Callable[[list[Fraction]], Fraction | None]] = {
    "max": max,
    "min": min,
    "gcd": _of_integers(math.gcd),
    "lcm": _of_integers(math.lcm),
}
