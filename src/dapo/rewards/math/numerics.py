"""Values that are not rational, compared to 100 digits; runs in a worker only, where it can be killed.

Expressions with free symbols are compared at several points: two formulas that agree at unrelated points, small and
large, of either sign, are the same function. A difference that more digits do not make smaller is a difference. What
our notation cannot read is given to math-verify.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import mpmath

from dapo.rewards.math.rationals import TooLargeError, exact
from dapo.rewards.math.scalars import UndecidedError, with_decimal_logs
from dapo.rewards.math.tree import Node, free_symbols
from dapo.rewards.math.vocabulary import word_set

_DIGITS = 140
_TOLERANCE = mpmath.mpf(10) ** -100
_NOISE = mpmath.mpf(10) ** -130  # what rounding alone leaves between equal numbers of _DIGITS digits
_POINTS = 5
_WIDE_POINTS = 8
_MAX_EXPONENT = 10**5


def compare(left: Node, right: Node) -> bool:
    """Equal in value, with free symbols as reals and `\\log` to either base.

    UndecidedError where a sign has no numeric meaning.
    """
    if left.op == right.op == "equation":
        return _same_curve(left.args[0], right.args[0])
    try:
        values = [exact(node) for node in (left, right)]
        if values[0] is not None and values[1] is not None:
            return values[0] == values[1]
    except TooLargeError:
        pass
    decimal = with_decimal_logs(left), with_decimal_logs(right)
    return _agree(left, right) and ((left, right) == decimal or _agree(*decimal))


def _agree(left: Node, right: Node) -> bool:
    if any(_calculates_with_infinity(node) for node in (left, right)):
        return False
    n_agreeing = 0
    for a, b, again in _values(left, right):
        if not _close(a, b, again):
            return False
        n_agreeing += 1
    if n_agreeing == 0 and (free_symbols(left) or free_symbols(right)):
        raise UndecidedError
    return n_agreeing > 0  # 1/0 has no value, and equals nothing


Pair = tuple[Any, Any]


def _values(left: Node, right: Node) -> Iterator[tuple[Any, Any, Callable[[], Pair]]]:
    """Both values wherever both are defined, and how to have them with twice the digits."""
    names = sorted(free_symbols(left) | free_symbols(right))
    with mpmath.workdps(_DIGITS):
        for point in _points(names):
            try:
                a, b = evaluate(left, point), evaluate(right, point)
            except (ZeroDivisionError, ValueError, OverflowError):
                continue
            yield a, b, partial(_precisely, left, right, point)
        if not names or _has_imaginary_unit(left) or _has_imaginary_unit(right):
            return
        for point in _wide_points(names):
            try:
                a, b = evaluate(left, point, is_real=True), evaluate(right, point, is_real=True)
            except (ZeroDivisionError, ValueError, OverflowError, TooLargeError):
                continue
            yield a, b, partial(_precisely, left, right, point)


def _precisely(left: Node, right: Node, point: dict[str, Any]) -> Pair:
    with mpmath.workdps(2 * _DIGITS):
        return evaluate(left, point), evaluate(right, point)


def _calculates_with_infinity(node: Node) -> bool:
    """1/∞ and ∞ − ∞ are no numbers; ∞ and −∞ alone are what they are."""
    infinite = Node("sym", name="infty") in node.args
    return (infinite and node.op != "neg") or any(_calculates_with_infinity(arg) for arg in node.args)


def _has_imaginary_unit(node: Node) -> bool:
    return (node.op, node.name) == ("sym", "i") or any(_has_imaginary_unit(arg) for arg in node.args)


def _same_curve(left: Node, right: Node) -> bool:
    """Two equations f = 0 and g = 0 with f = c g for one constant c."""
    if free_symbols(left) != free_symbols(right):
        return False
    with mpmath.workdps(_DIGITS):
        ratios = [a / b for a, b, _ in _values(left, right)]
        if len(ratios) < 2:
            raise UndecidedError
        return all(_close(ratio, ratios[0]) for ratio in ratios) and abs(ratios[0]) > _TOLERANCE


def _close(a: Any, b: Any, again: Callable[[], Pair] | None = None) -> bool:
    """Equal to 100 digits of the larger one; where that is more than rounding, equal only if more digits say so."""
    if mpmath.isnan(a) or mpmath.isnan(b):
        return False
    if mpmath.isinf(a) or mpmath.isinf(b) or a == b:
        return bool(a == b)
    difference, size = abs(a - b), max(abs(a), abs(b))
    if again is None or difference <= _NOISE * size:
        return bool(difference <= _TOLERANCE * size)
    if difference > _TOLERANCE * max(1, size):
        return False
    a, b = again()  # sin π is 0 to any number of digits, π·10⁻¹⁰¹ is not
    with mpmath.workdps(2 * _DIGITS):
        return bool(abs(a - b) <= _TOLERANCE * difference)


def _points(names: list[str]) -> list[dict[str, Any]]:
    noise = random.Random(20250317)  # the same points on every machine
    return [
        {name: mpmath.mpf(noise.randrange(3 * 10**11, 3 * 10**12)) / 10**12 for name in names} for _ in range(_POINTS)
    ]


def _wide_points(names: list[str]) -> list[dict[str, Any]]:
    """Of either sign, from 0.1 to 100: where |x| is not x, and |x − 5| not 5 − x."""
    noise = random.Random(20250318)

    def coordinate(sign: int) -> Any:
        return sign * mpmath.mpf(noise.randrange(10**11, 10**12)) / 10 ** noise.randrange(10, 13)

    all_negative = {name: coordinate(-1) for name in names}
    all_large = {name: 10 + abs(coordinate(1)) for name in names}
    drawn = [{name: coordinate(noise.choice((-1, 1))) for name in names} for _ in range(_WIDE_POINTS - 2)]
    return [all_negative, all_large, *drawn]


def evaluate(node: Node, point: dict[str, Any], *, is_real: bool = False) -> Any:
    """The complex or real value of a tree at a point. `is_real`: ValueError where any part has no real value."""
    value = _applied(node, [evaluate(arg, point, is_real=is_real) for arg in node.args], point)
    if is_real and mpmath.im(value) != 0:  # √x·√x is not defined at −2, although the product is real again
        raise ValueError("no real value there")
    return value


def _applied(node: Node, args: list[Any], point: dict[str, Any]) -> Any:
    match node.op:
        case "num":
            assert node.value is not None, "numbers carry their value"
            return _number(node.value)
        case "sym":
            return _symbol(node.name, point)
        case "neg":
            return -args[0]
        case "add":
            return args[0] + args[1]
        case "mul":
            return args[0] * args[1]
        case "div":
            return args[0] / args[1]
        case "percent":
            return args[0] / 100
        case "degree":
            return args[0] * mpmath.pi / 180
        case "pow":
            return _power(args[0], args[1])
        case "root":
            return _root(args[0], args[1])
        case "factorial":
            return (mpmath.fac2 if node.name else mpmath.factorial)(_bounded(args[0]))
        case "binomial":
            return mpmath.binomial(_bounded(args[0]), _bounded(args[1]))
        case "func":
            return _function(node.name, args)
    raise UndecidedError


def _number(value: Fraction) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator


def _symbol(name: str, point: dict[str, Any]) -> Any:
    match name:
        case "pi":
            return +mpmath.pi
        case "e":
            return +mpmath.e
        case "i":
            return mpmath.mpc(0, 1)
        case "infty":
            return mpmath.inf
    return point[name]


def _bounded(value: Any) -> Any:
    if abs(value) > _MAX_EXPONENT:
        raise TooLargeError
    return value


def _power(base: Any, exponent: Any) -> Any:
    if mpmath.isinf(base) or mpmath.isinf(exponent):
        raise UndecidedError
    if abs(exponent) > _MAX_EXPONENT:
        raise TooLargeError
    return mpmath.power(base, exponent)


def _root(value: Any, index: Any) -> Any:
    if mpmath.im(value) == 0 and mpmath.re(value) < 0 and mpmath.isint(index) and int(index) % 2:
        return -mpmath.root(-mpmath.re(value), int(index))
    return mpmath.power(value, 1 / index)


_FUNCTIONS: dict[str, Any] = {
    **{name: getattr(mpmath, name) for name in word_set("sin cos tan cot sec csc sinh cosh tanh sqrt cbrt floor ceil")},
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    "ln": mpmath.log,
    "abs": abs,
}


def _function(name: str, args: list[Any]) -> Any:
    first = args[0]
    if name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh"):
        _bounded(first)
    if name == "exp":
        return mpmath.exp(_bounded(first))
    if name == "log":
        return mpmath.log(first, args[1]) if len(args) > 1 else mpmath.log(first)
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](first)
    raise UndecidedError
