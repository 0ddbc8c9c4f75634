"""Mutation operators that mutmut lacks, and what of a module is not worth mutating: functions of libcst nodes alone.

An operator takes a node and yields what may stand in its place; each place is one mutant.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import libcst as cst

Operator = Callable[[Any], Iterator[cst.CSTNode]]
TIMES = (cst.Multiply, cst.Divide, cst.MatrixMultiply, cst.Power)
SHOWN = {"event", "progress"}  # tell the user something
CHECKS = {"check_shapes"}  # as good as an assert
CLOCK = {"perf_counter"}
# Arguments whose absence no test on a CPU can notice (where a tensor lies), checks, and what tells the user something.
UNNOTICED = {"device", "non_blocking", "pin_memory", "strict"} | SHOWN


def swap_keywords(call: cst.Call) -> Iterator[cst.Call]:
    """f(a=x, b=y) -> f(a=y, b=x), for neighbours; so with positional arguments that are names."""
    for i, (one, other) in enumerate(zip(call.args, call.args[1:], strict=False)):
        both_named = one.keyword is not None and other.keyword is not None
        both_placed = all(
            arg.keyword is None and not arg.star and isinstance(arg.value, cst.Name) for arg in (one, other)
        )
        if (both_named or both_placed) and not one.value.deep_equals(other.value):
            swapped = [one.with_changes(value=other.value), other.with_changes(value=one.value)]
            yield call.with_changes(args=[*call.args[:i], *swapped, *call.args[i + 2 :]])


def leave_out_argument(call: cst.Call) -> Iterator[cst.Call]:
    """f(x, y, a=z) -> f(x, a=z), f(x, y): named arguments, and the last of the others; what is left has a default."""
    places = [i for i, arg in enumerate(call.args) if arg.keyword is not None and arg.keyword.value not in UNNOTICED]
    placed = [i for i, arg in enumerate(call.args) if arg.keyword is None and not arg.star]
    for i in sorted([*places, *placed[1:][-1:]]):
        yield call.with_changes(args=[*call.args[:i], *call.args[i + 1 :]])


def drop_term(node: cst.BinaryOperation) -> Iterator[cst.BaseExpression]:
    """a + b -> a, b · a − b -> a, −b · a·b -> a, b · a/b -> a."""
    if isinstance(node.operator, cst.Add | cst.Multiply):
        yield grouped(node.left)
        yield grouped(node.right)
    elif isinstance(node.operator, cst.Subtract):
        yield grouped(node.left)
        yield negated(node.right)
    elif isinstance(node.operator, cst.Divide):
        yield grouped(node.left)


def drop_added(node: cst.AugAssign) -> Iterator[cst.CSTNode]:
    """a += b -> nothing."""
    if isinstance(node.operator, cst.AddAssign | cst.SubtractAssign | cst.MultiplyAssign | cst.DivideAssign):
        yield cst.Pass()


def flip_sign(node: cst.BinaryOperation) -> Iterator[cst.BaseExpression]:
    """a·b -> −(a·b); of a chain the first pair, since any other would be the same mutant."""
    left = node.left
    if isinstance(node.operator, TIMES) and not (
        isinstance(left, cst.BinaryOperation) and isinstance(left.operator, TIMES)
    ):
        yield negated(node)


def negated(node: cst.BaseExpression) -> cst.BaseExpression:
    return in_brackets(cst.UnaryOperation(cst.Minus(), in_brackets(node)))


def grouped(node: cst.BaseExpression) -> cst.BaseExpression:
    """As it is where nothing around it can bind tighter."""
    return node if isinstance(node, cst.Name | cst.Attribute | cst.Call | cst.Subscript) else in_brackets(node)


def in_brackets(node: cst.BaseExpression) -> cst.BaseExpression:
    made: cst.BaseExpression = node.with_changes(
        lpar=[cst.LeftParen(), *node.lpar], rpar=[*node.rpar, cst.RightParen()]
    )
    return made


def one_string(node: cst.SimpleString) -> Iterator[cst.SimpleString]:
    """A word that code compares or looks up becomes another word; messages stay."""
    if not is_message(node) and not node.value.startswith(('"""', "'''")):
        yield node.with_changes(value=f"{node.quote}XX{node.raw_value}XX{node.quote}")


def ignored_keys(defaults: Mapping[str, str]) -> Operator:
    """config.x.y -> the default of x.y, as source. `defaults`: dotted key -> source of its default.

    The key is the one whose dotted name ends in what is read: through `config`, or through a name of a section
    (`clip.low` is algorithm.clip.low). What could be two keys is left alone.
    """
    sections = {part for key in defaults for part in key.split(".")[:-1]} | {"config", "settings"}

    def ignore_key(node: cst.Attribute) -> Iterator[cst.BaseExpression]:
        read = dotted(node)
        if len(read) < 2 or read[-2] not in sections:
            return
        path = [part for part in read if part not in ("self", "run", "config", "settings")]
        found = {value for key, value in defaults.items() if key.split(".")[-len(path) :] == path}
        if len(found) == 1:
            yield cst.parse_expression(f"({found.pop()})")

    return ignore_key


def dotted(node: cst.BaseExpression) -> list[str]:
    """a.b.c -> [a, b, c]; empty where something else is in the chain."""
    if isinstance(node, cst.Name):
        return [node.value]
    if isinstance(node, cst.Attribute) and (before := dotted(node.value)):
        return [*before, node.attr.value]
    return []


# ---------------------------------------------------------------- what is left alone


def is_left_alone(node: cst.CSTNode) -> bool:
    """What a user is told, and when: errors, checks, messages, events, progress, clocks, docstrings."""
    if isinstance(node, cst.Raise | cst.Assert | cst.Import | cst.ImportFrom):
        return True
    if isinstance(node, cst.Arg) and node.keyword is not None:
        return node.keyword.value in UNNOTICED
    if isinstance(node, cst.SimpleStatementLine):
        return any(is_report(statement) for statement in node.body)
    return isinstance(node, cst.BaseString) and is_message(node)


def is_report(statement: cst.BaseSmallStatement) -> bool:
    if isinstance(statement, cst.Expr):
        value = statement.value
        if isinstance(value, cst.BaseString):
            return True
        if isinstance(value, cst.Call):
            return called(value) in SHOWN | CHECKS or any(is_message(arg.value) for arg in value.args)
    if isinstance(statement, cst.Assign):
        return (
            is_message(statement.value)
            or any(isinstance(node, cst.Call) and called(node) in CLOCK for node in walk(statement.value))
            or any("timing." in text.value for text in walk(statement) if isinstance(text, cst.SimpleString))
        )
    return False


def is_message(node: cst.CSTNode) -> bool:
    """Text for a reader: it has a space in it. Code compares words."""
    if isinstance(node, cst.SimpleString):
        return " " in node.raw_value
    if isinstance(node, cst.FormattedString):
        return any(isinstance(part, cst.FormattedStringText) and " " in part.value for part in node.parts)
    if isinstance(node, cst.ConcatenatedString):
        return is_message(node.left) or is_message(node.right)
    if isinstance(node, cst.IfExp):
        return is_message(node.body) or is_message(node.orelse)
    return False


def called(call: cst.Call) -> str:
    return (dotted(call.func) or [""])[-1]


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from walk(child)
