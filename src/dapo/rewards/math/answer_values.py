"""The value an extracted answer stands for, as a key: `42`, `$42$`, `42.0` and `x = 42` are one answer.

Exact rules alone, those of the verifier's first stage: nothing here needs a worker. What they cannot bring to one form
(`\\sqrt{8}` and `2\\sqrt{2}`) stays apart.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from dapo.rewards.math import equivalence
from dapo.rewards.math.rationals import exact_or_none
from dapo.rewards.math.statement import read
from dapo.rewards.math.tokens import NotationError
from dapo.rewards.math.tree import Node, bare
from dapo.rewards.math.typography import plain, trimmed

Value = Node | str


@lru_cache(maxsize=65_536)
def value_of(answer: str) -> Value:
    """The tree of a readable answer, its rational parts as numbers; else its text without meaningless signs.

    Unit words and a degree sign count for nothing, as with the verifier beside a plain reference. An estimate is not
    the number it estimates.
    """
    try:
        reading = read(answer)
    except NotationError:
        return " ".join(trimmed(plain(answer)).replace("\x1f", " ").split())
    node = reduced(equivalence.settled(reading.node, compare=equivalence.trusting))
    if node.op == "degree":
        node = node.args[0]
    return Node("approx", (node,)) if reading.is_hedged else node


def reduced(node: Node) -> Node:
    """Every part that is visibly rational as that number; a set or list in one order."""
    number = exact_or_none(node)
    if number is not None:
        return Node("num", value=number)
    if node.op == "num":
        return bare(node)
    parts = [reduced(part) for part in node.args]
    if node.op in ("list", "set"):
        return Node("list", tuple(sorted(parts, key=sort_key)))
    return replace(node, args=tuple(parts))


def sort_key(node: Node) -> tuple[str, str, object, tuple[object, ...]]:
    return node.op, node.name, node.value or 0, tuple(sort_key(part) for part in node.args)
