"""Whether two single values are the same, by exact rules; percent, degree and unit letters beside a plain reference."""

from __future__ import annotations

from collections.abc import Callable

from dapo.rewards.rationals import TooLargeError, exact, exact_or_none
from dapo.rewards.tree import Node, bare, free_symbols
from dapo.rewards.vocabulary import UNIT_LETTERS

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
    if any(node.op == "sym" and node.name == "infty" for node in (left, right)):
        return False
    raise UndecidedError


def same_scalar(reference: Node, said: Node, compare: CompareScalars) -> bool:
    """Percent and degree signs are units where the reference has none."""
    marked, plain_reference = _unmarked(reference)
    said_mark, plain_said = _unmarked(said)
    if not free_symbols(plain_reference):
        plain_said = _without_unit_letters(plain_said)
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


def _without_unit_letters(node: Node) -> Node:
    """`42 m`, `42 m^2`, `42 m/s` as 42, where the reference has no symbols."""
    if node.op == "neg":
        return Node("neg", (_without_unit_letters(node.args[0]),))
    if node.op in ("mul", "div"):
        unit = node.args[1]
        if unit.op == "pow" and unit.args[1].value in (2, 3):
            unit = unit.args[0]
        if unit.op == "sym" and unit.name in UNIT_LETTERS:
            return _without_unit_letters(node.args[0])
    return node


def unit_letters(node: Node) -> frozenset[str]:
    """The letters that stand as units: m in `10 m`."""
    return free_symbols(node) if _without_unit_letters(node) != node else frozenset()


def unit_powers(node: Node) -> frozenset[int]:
    """The exponents of letters that stand as units: 3 in `10 m^3`."""
    if node.op in ("neg", "mul", "div") and _without_unit_letters(node) != node:
        unit = node.args[-1]
        own = {int(unit.args[1].value)} if unit.op == "pow" and unit.args[1].value is not None else set()
        return frozenset(own) | unit_powers(node.args[0])
    return frozenset()
