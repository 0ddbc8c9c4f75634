"""Names in answers: which expressions only name a quantity (x, |AB|, 100m + n), and which values names have (x = 1)."""

from __future__ import annotations

from dapo.rewards.math.rationals import exact_or_none
from dapo.rewards.math.tree import Node, bare, free_symbols

Named = dict[tuple[Node, ...], tuple[Node, ...]]  # (x, y) for points by their coordinates, in the order of the names


def named_values(node: Node) -> Named | None:
    """Every name with its values; None where a value has no name, or is no value by itself (`y = 2x`)."""
    found: list[tuple[tuple[Node, ...], Node]] = []
    for item in node.args if node.op in ("list", "set") else (node,):
        named = _named(item)
        if named is None and found and item.op not in ("eq", "rel"):
            named = [(found[-1][0], item)]  # x = 1, 2
        if named is None or any(free_symbols(value) for _, value in named):
            return None
        found += named
    sorted_items = [_in_order(names, value) for names, value in found]
    if len(sorted_items) == 1 and len(sorted_items[0][0]) > 1:
        names, value = sorted_items[0]
        if value.op == "bracket" and len(value.args) == len(names):
            return {(name,): (part,) for name, part in zip(names, value.args, strict=True)}
    values: Named = {}
    for names, value in sorted_items:
        values[names] = (*values.get(names, ()), value)
    return values


def _named(node: Node) -> list[tuple[tuple[Node, ...], Node]] | None:
    """`x = 1` as x and 1, `x = y = 1` as both with 1, `(x, y) = (1, 2)` as the pair of names with its point."""
    if node.op == "rel" and node.name == "in" and node.args[1].op == "set" and is_name(node.args[0]):
        return [((bare(node.args[0]),), value) for value in node.args[1].args]  # x ∈ {1, 2}
    if node.op != "eq":
        return None
    names = [side for side in node.args if side.op in ("sym", "apply", "bracket") and is_name(side)]
    rest = tuple(side for side in node.args if side not in names)
    if not names or not rest:
        return None
    value = rest[0] if len(rest) == 1 else Node("eq", rest)
    return [(tuple(map(bare, name.args if name.op == "bracket" else (name,))), value) for name in names]


def _in_order(names: tuple[Node, ...], value: Node) -> tuple[tuple[Node, ...], Node]:
    """`(y, x) = (2, 1)` as `(x, y) = (1, 2)`."""
    order = sorted(range(len(names)), key=lambda index: spelled(names[index]))
    if value.op == "bracket" and len(value.args) == len(names):
        value = Node("bracket", tuple(value.args[index] for index in order), name=value.name)
    return tuple(names[index] for index in order), value


def spelled(name: Node) -> str:
    return name.name + "".join(f"({spelled(arg)}{arg.value or ''})" for arg in name.args)


def is_one_letter(names: Named) -> bool:
    """x_1 and x_2: values of one quantity, which have no order."""
    return len({letter(name) for key in names for name in key}) == 1


def letter(name: Node) -> str:
    return name.name.partition("_")[0] if name.op == "sym" else spelled(name)


def has_indices(names: Named) -> bool:
    return any(name.op == "sym" and "_" in name.name for key in names for name in key)


def without_indices(names: Named) -> Named:
    """x_1 = 1, x_2 = 2 as two values of x."""
    merged: Named = {}
    for key, values in names.items():
        short = tuple(Node("sym", name=letter(name)) if name.op == "sym" else name for name in key)
        merged[short] = (*merged.get(short, ()), *values)
    return merged


# ------------------------------------------------------------------ names and quantities


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
