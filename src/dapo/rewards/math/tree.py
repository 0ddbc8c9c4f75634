"""A value as it was written, as a tree of operations; what can be said of a tree without computing it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Node:
    """One operation with its operands. `value` for numbers, `name` for symbols, functions, brackets and words."""

    op: str
    args: tuple[Node, ...] = ()
    value: Fraction | None = None
    name: str = ""


def bare(node: Node) -> Node:
    """The tree without how its numbers were spelled."""
    if node.op == "num":
        return Node("num", value=node.value)
    return Node(node.op, tuple(bare(arg) for arg in node.args), name=node.name)


def free_symbols(node: Node) -> frozenset[str]:
    if node.op in ("sym", "text"):
        return frozenset() if node.name in ("pi", "e", "i", "infty") else frozenset({node.name})
    return frozenset().union(*(free_symbols(arg) for arg in node.args)) if node.args else frozenset()
