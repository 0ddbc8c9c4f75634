"""Whether two single values are the same, by exact rules; percent, degree and unit letters beside a plain reference."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from dapo.rewards.math.rationals import TooLargeError, exact, exact_or_none
from dapo.rewards.math.tree import Node, bare, free_symbols
from dapo.rewards.math.units import Mention, Unit, split_letters

CompareScalars = Callable[[Node, Node], bool]


class UndecidedError(Exception):
    """The exact rules cannot tell whether the two are equal."""


def compare_exactly(left: Node, right: Node) -> bool:
    """Spelled alike, or the same fraction. UndecidedError where roots, functions or symbols are left."""
    if bare(left) == bare(right):
        return True
    values = []
    for node in (left, right):
        try:
            values.append(exact(node))
        except TooLargeError:
            other = right if node is left else left
            if exact_or_none(other) is not None:
                return False
            raise
    if values[0] is not None and values[1] is not None:
        return values[0] == values[1]
    if left.op == right.op == "sym":
        return left.name == right.name
    if left.op == right.op == "apply" and left.name != right.name:
        return False
    if "sym" in (left.op, right.op) and values != [None, None]:
        return False
    if any(node.op == "sym" and node.name == "infty" for node in (left, right)):
        return False
    raise UndecidedError


def with_decimal_logs(node: Node) -> Node:
    """`\\log 100` to base 10: without a base it may be either."""
    args = tuple(with_decimal_logs(arg) for arg in node.args)
    if node.op == "func" and node.name == "log" and len(args) == 1:
        args = (*args, Node("num", value=Fraction(10)))
    return Node(node.op, args, node.value, node.name)


def same_scalar(reference: Node, said: Node, compare: CompareScalars) -> bool:
    """Percent and degree signs are units where the reference has none."""
    marked, plain_reference = _unmarked(reference)
    said_mark, plain_said = _unmarked(said)
    if not free_symbols(plain_reference):
        plain_said, _ = split_letters(plain_said)
    if "percent" in (marked, said_mark) and marked != said_mark:
        percent, number = (plain_reference, plain_said) if marked == "percent" else (plain_said, plain_reference)
        number_value = exact_or_none(number)
        if number_value is not None and abs(number_value) > 1 and compare(percent, number):
            return True
        return compare(Node("percent", (percent,)), number)
    return compare(plain_reference, plain_said)


def _unmarked(node: Node) -> tuple[str, Node]:
    if node.op in ("percent", "degree"):
        return node.op, node.args[0]
    if node.op == "neg" and node.args[0].op in ("percent", "degree"):
        return node.args[0].op, Node("neg", node.args[0].args)
    return "", node


def marks(node: Node) -> tuple[list[str], list[Mention]]:
    """What a percent or degree sign says of the unit, and what a letter does: `42 m`."""
    mark, number = _unmarked(node)
    letters: Unit = split_letters(number)[1]
    return [mark] if mark else [], [frozenset({letters})] if letters else []
