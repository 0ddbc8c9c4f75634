"""Which expressions only name a quantity (x, |AB|, 100m + n) and which are equations to solve."""

from __future__ import annotations

from dapo.rewards.math.rationals import exact_or_none
from dapo.rewards.math.tree import Node, free_symbols


def is_name(node: Node) -> bool:
    """A quantity's name: x, f(2), m + n, AB, |AB|. Not `2x` or `|x|`: those would be equations to solve."""
    if node.op == "sym":
        if node.name.rpartition(" ")[2][:1].isdigit():  # 41', \\overline{41}
            return False
        return node.name not in ("pi", "e", "i", "infty", "emptyset") and not node.name.startswith("mathbb ")
    if node.op == "sub":
        return is_name(node.args[0])
    if node.op in ("apply", "text"):
        return True
    if node.op in ("add", "mul") and len(free_symbols(node)) > 1:
        return all(is_name(arg) for arg in node.args)
    if node.op == "bracket":
        return all(is_name(arg) for arg in node.args)
    if node.op == "func" and node.name == "abs":  # of a set or a segment
        return is_name(node.args[0]) and all(name[:1].isupper() for name in free_symbols(node))
    return node.op == "func" and node.name in ("floor", "ceil") and is_name(node.args[0])


def is_quantity(node: Node) -> bool:
    """What a problem asks the value of: 100m + n, a² + b², πr². Of one variable it is an equation to solve."""
    return _is_form(node) and (len(free_symbols(node)) > 1 or _is_circle(node))


def _is_circle(node: Node) -> bool:
    """A measure of a circle or sphere: a product with π and the radius."""
    return free_symbols(node) in ({"r"}, {"R"}) and node.op == "mul" and Node("sym", name="pi") in _factors(node)


def _factors(node: Node) -> tuple[Node, ...]:
    return (*_factors(node.args[0]), *_factors(node.args[1])) if node.op == "mul" else (node,)


def _is_form(node: Node) -> bool:
    """A combination such as 100m + n that a problem asks for; with a constant it is an equation to solve."""
    if node.op == "mul":
        return bool(free_symbols(node)) and all(_is_form(arg) or _is_coefficient(arg) for arg in node.args)
    if node.op == "pow":
        return node.args[0].op == "sym" and _is_form(node.args[0]) and node.args[1].value in (2, 3, 4)
    if node.op in ("add", "neg"):
        return all(_is_form(arg) for arg in node.args)
    return node.op == "sym" and bool(free_symbols(node))


def _is_coefficient(node: Node) -> bool:
    return node == Node("sym", name="pi") or bool(exact_or_none(node))
