"""Whether two answers have the same mathematical value. Exact here; what needs real analysis is left to a worker.

Rationals are compared as fractions, never as floats. Shapes (lists, tuples, intervals, sets, matrices, equations) are
compared part by part. UndecidedError means: only numerics or algebra can tell, ask again with `compare_scalars`.
"""

from __future__ import annotations

from fractions import Fraction

from dapo.rewards.math.names import (
    Named,
    has_indices,
    is_name,
    is_one_letter,
    is_quantity,
    named_values,
    spelled,
    without_indices,
)
from dapo.rewards.math.rationals import TooLargeError, exact_or_none
from dapo.rewards.math.scalars import CompareScalars, UndecidedError, compare_exactly, same_scalar, with_decimal_logs
from dapo.rewards.math.tree import Node, bare, free_symbols

_MAX_LIST = 40
_ANY_ARGUMENT = frozenset("xyztn")
_MAY_NAME = ("eq", "list", "set", "rel")


def settled(node: Node, *, is_reference: bool = False, compare: CompareScalars | None = None) -> Node:
    """An equation that only names its value, `x = 42` or `6·7 = 42`, as that value; sides that differ are no answer.

    A reference `x + y = 5` is a line; in an answer it names the value 5 of x + y. UndecidedError where only numerics
    can tell whether the sides agree and `compare` is exact.
    """
    if node.op == "list":
        args = tuple(settled(arg, is_reference=is_reference, compare=compare) for arg in node.args)
        return Node("list", args, name=node.name)
    if node.op == "rel" and node.name == "in" and is_name(node.args[0]):
        return node.args[1]  # x ∈ [0, 1)
    if node.op != "eq":
        return node
    if is_reference and node.args[0].op not in ("sym", "apply") and free_symbols(node):
        return node
    compare = trusting if is_reference else compare or compare_exactly
    unnamed = [side for side in node.args if not is_name(side)]
    closed = [side for side in unnamed if not free_symbols(side)]
    if any(not _sides_agree(closed[0], other, compare) for other in closed[1:]):
        return Node("contradiction", node.args)
    if not unnamed:
        return node if len(node.args) > 1 and not is_name(node.args[0]) else node.args[-1]
    if closed:
        value = next((side for side in reversed(closed) if exact_or_none(side) is not None), closed[-1])
        is_named = all(is_quantity(side) for side in unnamed if free_symbols(side))
        if len(closed) == len(unnamed) or (is_named and exact_or_none(value) != 0):
            return value
        return node
    if is_name(node.args[0]) and len(unnamed) == 1 and not _defines_line(node):
        return unnamed[0]
    return node


def trusting(left: Node, right: Node) -> bool:
    """For sides of a reference: equal unless exact rules tell otherwise."""
    try:
        return compare_exactly(left, right)
    except (UndecidedError, TooLargeError):
        return True


def _sides_agree(left: Node, right: Node, compare: CompareScalars) -> bool:
    """Two closed sides of an equation. Too large, undefined, of another shape or beyond numerics: they do not."""
    left, right = _decimal(left), _decimal(right)
    values = [exact_or_none(left), exact_or_none(right)]
    if None not in values:
        return values[0] == values[1]
    try:
        if "degree" in (left.op, right.op):  # 60° is 60, and π/3
            return same_scalar(left, right, compare) or compare(left, right)
        return same(left, right, compare) or (
            with_decimal_logs(left) != left and same(with_decimal_logs(left), right, compare)
        )
    except UndecidedError:
        if compare is compare_exactly:
            raise
        return False
    except TooLargeError:
        return False


def _decimal(node: Node) -> Node:
    """`203_7` as the number it is."""
    if node.op != "base":
        return node
    digits, base = (arg.value for arg in node.args)
    if digits is None or base is None or base.denominator != 1 or not 2 <= base <= 36:
        return node
    try:
        return Node("num", value=Fraction(int(str(digits), int(base))))
    except ValueError:  # a digit the base does not have
        return node


def _defines_line(node: Node) -> bool:
    """`y = 2x + 1` is a line, and stays an equation; `x = 3\\sqrt2` names a value."""
    return node.args[0].op == "sym" and bool(free_symbols(node.args[-1]))


def agree(left: Node, right: Node) -> bool:
    """Two values in one statement are the same. What cannot be decided exactly does not agree, unless spelled alike."""
    try:
        return same(left, right)
    except (UndecidedError, TooLargeError):
        return False


def same(reference: Node, said: Node, compare_scalars: CompareScalars | None = None) -> bool:
    """Whether `said` has the reference's value."""
    compare = compare_scalars or compare_exactly
    if reference.op == said.op == "rel" and free_symbols(reference) != free_symbols(said):
        return False
    if reference.op == said.op == "list" and _differ_in_logic(reference, said):
        return False
    if reference.op in _MAY_NAME or said.op in _MAY_NAME:
        by_name = _same_by_name(reference, said, compare)
        if by_name is not None:
            return by_name
    reference = settled(reference, is_reference=True)
    said = said if reference.op == "eq" and said.op == "eq" else settled(said, compare=compare)
    if "contradiction" in (reference.op, said.op):
        return False
    if bare(reference) == bare(said):
        return True
    if said.op == "list" and reference.op not in ("list", "set", "bracket", "pm"):  # 42, 42: one value said twice
        return all(same(reference, item, compare) for item in said.args[:_MAX_LIST]) and len(said.args) <= _MAX_LIST
    expanded = _expanded(reference, compare)
    if expanded.op == "bracket" and said.op == "set" and len(said.args) > 1:
        return False  # {0, 1} has two elements and no order: neither the interval nor the point (0, 1)
    return _same_shape(expanded, _expanded(said, compare), compare)


def _differ_in_logic(reference: Node, said: Node) -> bool:
    """`x < 3 and x > 5` for `x < 3 or x > 5`. A comma says neither; of values, `1 and 2`, both say the same."""
    is_told = reference.name and said.name and any(item.op == "rel" for item in (*reference.args, *said.args))
    return bool(is_told) and (reference.name != said.name or " " in said.name)


def _same_by_name(reference: Node, said: Node, compare: CompareScalars) -> bool | None:
    """Whether each variable has its value, or None where the names do not tell.

    Where only one side names them, `x = 1, y = 2` beside (1, 2), its values count in the order of the names.
    """
    wanted, given = named_values(reference), named_values(said)
    if wanted is not None and given is not None:
        return _same_values(wanted, given, compare, is_choice=said.name == "or" != reference.name)
    if wanted is not None and said.op == "eq" and len(wanted) == 1 and free_symbols(said):
        names = {name for names in wanted for name in names}
        return None if names & {bare(side) for side in said.args} else False  # x + y = 5 for x = 5
    if wanted is not None and len(wanted) > 1 and not is_one_letter(wanted):
        values = _in_name_order(wanted)
        is_point = said.op == "bracket" and said.name == "()"
        if values is None or not (is_point or said.op == "list") or (said.op == "list" and _has_names(said)):
            return False
        return _in_order(values, said.args, compare)
    if given is None or reference.op not in ("list", "bracket", "set"):
        return None
    is_point = reference.op == "bracket"
    if is_point and any(len(values) > 1 for values in given.values()):
        return False  # x = 1 or x = 2 for (1, 2)
    if len(given) > 1 and (is_point or not is_one_letter(given)) and (values := _in_name_order(given)) is not None:
        is_ordered = reference.name in ("", "or", "()") and said.name != "or"
        return is_ordered and _in_order(reference.args, values, compare)
    return None


def _same_values(wanted: Named, given: Named, compare: CompareScalars, *, is_choice: bool) -> bool | None:
    is_plain = not has_indices(wanted) or not has_indices(given)  # a_1 = 2 is not a_2 = 2
    if wanted.keys() != given.keys() and 1 in (len(wanted), len(given)) and is_plain:
        wanted, given = without_indices(wanted), without_indices(given)
    if wanted.keys() == given.keys():
        if len(wanted) > 1 and is_choice:  # x = 1 or y = 2
            return False
        return all(same(_listed(values), _listed(given[names]), compare) for names, values in wanted.items())
    kinds = {name.op for names in (*wanted, *given) for name in names}
    if kinds == {"apply"} and len(wanted) == len(given) == 1:
        return None if _is_one_call(*next(iter(wanted)), *next(iter(given))) else False
    return False if kinds == {"sym"} or len(wanted) > 1 else None


def _is_one_call(one: Node, other: Node) -> bool:
    """f(2) and f(1 + 1), f(x) and f(n), not f(2) and f(3)."""
    if one.name != other.name:
        return False
    pairs = zip(one.args, other.args, strict=True)
    return all(agree(a, b) or {a.name, b.name} <= _ANY_ARGUMENT for a, b in pairs)


def _listed(values: tuple[Node, ...]) -> Node:
    return values[0] if len(values) == 1 else Node("list", values)


def _in_name_order(named: Named) -> tuple[Node, ...] | None:
    """One value for each variable, x before y; None where one has several."""
    if any(len(names) > 1 or len(values) > 1 for names, values in named.items()):
        return None
    return tuple(named[names][0] for names in sorted(named, key=lambda names: spelled(names[0])))


def _has_names(node: Node) -> bool:
    return any(item.op == "eq" for item in node.args)


def _expanded(node: Node, compare: CompareScalars) -> Node:
    """± as its two values; a set or list of one as that one."""
    if node.op == "pm":
        left, right = node.args
        return Node("list", (Node("add", (left, right)), Node("add", (left, Node("neg", (right,))))))
    if node.op == "set" and len(node.args) == 1 and node.args[0] != Node("sym", name="emptyset"):
        return settled(node.args[0], compare=compare)
    if node.op == "rel":
        return _interval(node) or node
    if node == Node("sym", name="mathbb R"):
        infinity = Node("sym", name="infty")
        return Node("bracket", (Node("neg", (infinity,)), infinity), name="()")
    if node.op in ("list", "set"):
        items: list[Node] = []
        for arg in node.args:
            inner = _expanded(settled(arg, compare=compare), compare)
            items += inner.args if inner.op == "list" else (inner,)
        return Node("list", tuple(items))
    return node


def _interval(node: Node) -> Node | None:
    """`x > 3` as (3, ∞) and `-1 < x ≤ 2` as (−1, 2]; None for other relations."""
    signs, sides = node.name.split(), node.args
    if any(sign in (">", ">=") for sign in signs):
        flipped = {">": "<", ">=": "<=", "<": ">", "<=": ">="}
        signs, sides = [flipped.get(sign, sign) for sign in reversed(signs)], sides[::-1]
    if any(sign not in ("<", "<=") for sign in signs):
        return None
    infinity = Node("sym", name="infty")
    variables = [index for index, side in enumerate(sides) if side.op == "sym" and side.name != "infty"]
    if variables == [0] and len(sides) == 2:
        return Node("bracket", (Node("neg", (infinity,)), sides[1]), name="(" + ("]" if signs[0] == "<=" else ")"))
    if variables == [1] and len(sides) == 2:
        return Node("bracket", (sides[0], infinity), name=("[" if signs[0] == "<=" else "(") + ")")
    if variables == [1] and len(sides) == 3:
        brackets = ("[" if signs[0] == "<=" else "(") + ("]" if signs[1] == "<=" else ")")
        return Node("bracket", (sides[0], sides[2]), name=brackets)
    return None


def _same_shape(reference: Node, said: Node, compare: CompareScalars) -> bool:
    shapes = ("list", "bracket", "union", "matrix", "row", "ratio", "eq", "rel", "text", "base")
    if reference.op not in shapes and said.op not in shapes:
        return same_scalar(reference, said, compare)
    if reference.op == "list" and said.op == "list":
        return _matched(reference.args, said.args, compare)
    if reference.op == "bracket" and said.op == "bracket":
        return reference.name == said.name and _in_order(reference.args, said.args, compare)
    if reference.op == "bracket" and said.op == "list" and reference.name == "()":
        return _in_order(reference.args, said.args, compare)
    if reference.op == said.op == "union":
        return _matched(reference.args, said.args, compare)
    if reference.op == said.op and reference.op in ("matrix", "row"):
        return reference.name == said.name and _in_order(reference.args, said.args, compare)
    if reference.op == said.op == "ratio":
        return _same_ratio(reference, said, compare)
    if "ratio" in (reference.op, said.op):
        return _same_quotient(reference, said)
    if reference.op == said.op == "text":
        return reference.name == said.name
    if reference.op == "base":
        digits = said.args[0] if said.op == "base" else said
        return (
            digits.op == "num"
            and bare(digits) == bare(reference.args[0])
            and (said.op != "base" or bare(said.args[1]) == bare(reference.args[1]))
        )
    if reference.op == said.op == "eq":
        return _same_equation(reference, said, compare)
    if reference.op == "eq" and reference.args[0].op in ("sym", "apply") and len(reference.args) == 2:
        return said.op not in shapes and same_scalar(reference.args[1], said, compare)
    if said.op == "eq" and is_name(said.args[0]) and len(said.args) == 2:
        return reference.op not in shapes and same_scalar(reference, said.args[1], compare)
    if "rel" in (reference.op, said.op) and reference.op in ("rel", "bracket", "union"):
        raise UndecidedError
    return False


def _in_order(left: tuple[Node, ...], right: tuple[Node, ...], compare: CompareScalars) -> bool:
    if len(left) != len(right):
        return False
    return all(same(a, b, compare) for a, b in zip(left, right, strict=True))


def _matched(left: tuple[Node, ...], right: tuple[Node, ...], compare: CompareScalars) -> bool:
    """The same values in any order, each as often as in the other."""
    if len(left) != len(right) or len(left) > _MAX_LIST:
        return False
    rest = list(right)
    for item in left:
        for index, other in enumerate(rest):
            if same(item, other, compare):
                del rest[index]
                break
        else:
            return False
    return True


def _same_ratio(reference: Node, said: Node, compare: CompareScalars) -> bool:
    if _may_be_time(reference) or _may_be_time(said):  # 3:45 is not 1:15, nor 3:05 3:5
        return [arg.name for arg in reference.args] == [arg.name for arg in said.args]
    left, right = [exact_or_none(arg) for arg in reference.args], [exact_or_none(arg) for arg in said.args]
    if len(left) != len(right):
        return False
    if None in left or None in right or not left[0] or not right[0]:
        return _in_order(reference.args, said.args, compare)
    scale = right[0] / left[0]
    return all(a is not None and b is not None and a * scale == b for a, b in zip(left, right, strict=True))


def _may_be_time(node: Node) -> bool:
    return len(node.args[-1].name) == 2 and node.args[-1].name.isdigit()


def _same_quotient(reference: Node, said: Node) -> bool:
    """`1:2` for one half, in lowest terms, and 1/2 for `1:2`. Not `42:1` for 42: that is no way to write a number."""
    ratio, number = (reference, said) if reference.op == "ratio" else (said, reference)
    parts, value = [exact_or_none(part) for part in ratio.args], exact_or_none(number)
    if len(parts) != 2 or value is None or None in parts or _may_be_time(ratio):
        return False
    is_fraction = value.denominator > 1 and (number.op == "div" or ratio is said)
    return is_fraction and parts == [value.numerator, value.denominator]


def _same_equation(reference: Node, said: Node, compare: CompareScalars) -> bool:
    if len(reference.args) != 2 or len(said.args) != 2:
        return False
    if compare is compare_exactly:
        raise UndecidedError
    differences = [Node("add", (side.args[0], Node("neg", (side.args[1],)))) for side in (reference, said)]
    return compare(Node("equation", (differences[0],)), Node("equation", (differences[1],)))
