"""Values that are not rational, compared to 100 digits; runs in a worker only, where it can be killed.

Expressions with free symbols are compared at several points: two formulas that agree to 100 digits at five unrelated
points are the same function. What our notation cannot read is given to math-verify.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import mpmath

from dapo.rewards.equivalence import TooLargeError, UndecidedError, exact, free_symbols
from dapo.rewards.notation import Node
from dapo.rewards.vocabulary import word_set

_DIGITS = 140
_TOLERANCE = mpmath.mpf(10) ** -100
_POINTS = 5
_MAX_EXPONENT = 10**5


def compare(left: Node, right: Node) -> bool:
    """Equal in value, with free symbols as positive reals. UndecidedError where a sign has no numeric meaning."""
    if left.op == right.op == "equation":
        return _same_curve(left.args[0], right.args[0])
    try:
        values = [exact(node) for node in (left, right)]
        if values[0] is not None and values[1] is not None:
            return values[0] == values[1]
    except TooLargeError:
        pass
    names = sorted(free_symbols(left) | free_symbols(right))
    n_agreeing = 0
    with mpmath.workdps(_DIGITS):
        for point in _points(names):
            try:
                a, b = evaluate(left, point), evaluate(right, point)
            except (ZeroDivisionError, ValueError, OverflowError):
                continue
            if not _close(a, b):
                return False
            n_agreeing += 1
    if n_agreeing == 0:
        raise UndecidedError
    return True


def _same_curve(left: Node, right: Node) -> bool:
    """Two equations f = 0 and g = 0 with f = c g for one constant c."""
    names = sorted(free_symbols(left) | free_symbols(right))
    if free_symbols(left) != free_symbols(right):
        return False
    with mpmath.workdps(_DIGITS):
        ratios = [evaluate(left, point) / evaluate(right, point) for point in _points(names)]
        return all(_close(ratio, ratios[0]) for ratio in ratios) and abs(ratios[0]) > _TOLERANCE


def _close(a: Any, b: Any) -> bool:
    if mpmath.isnan(a) or mpmath.isnan(b):
        return False
    if mpmath.isinf(a) or mpmath.isinf(b):
        return bool(a == b)
    return bool(abs(a - b) <= _TOLERANCE * max(1, abs(a), abs(b)))


def _points(names: list[str]) -> list[dict[str, Any]]:
    noise = random.Random(20250317)  # the same points on every machine
    return [
        {name: mpmath.mpf(noise.randrange(3 * 10**11, 3 * 10**12)) / 10**12 for name in names} for _ in range(_POINTS)
    ]


def evaluate(node: Node, point: dict[str, Any]) -> Any:
    """The complex or real value of a tree at a point."""
    args = node.args
    match node.op:
        case "num":
            assert node.value is not None, "numbers carry their value"
            return _number(node.value)
        case "sym":
            return _symbol(node.name, point)
        case "neg":
            return -evaluate(args[0], point)
        case "add":
            return evaluate(args[0], point) + evaluate(args[1], point)
        case "mul":
            return evaluate(args[0], point) * evaluate(args[1], point)
        case "div":
            return evaluate(args[0], point) / evaluate(args[1], point)
        case "percent":
            return evaluate(args[0], point) / 100
        case "degree":
            return evaluate(args[0], point) * mpmath.pi / 180
        case "pow":
            return _power(evaluate(args[0], point), evaluate(args[1], point))
        case "root":
            return _root(evaluate(args[0], point), evaluate(args[1], point))
        case "factorial":
            return mpmath.factorial(_bounded(evaluate(args[0], point)))
        case "binomial":
            return mpmath.binomial(_bounded(evaluate(args[0], point)), _bounded(evaluate(args[1], point)))
        case "func":
            return _function(node.name, [evaluate(arg, point) for arg in args])
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
