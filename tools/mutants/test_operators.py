"""Each operator makes the mutants it promises, and nothing that a reader is told is touched."""

from collections.abc import Iterator
from textwrap import dedent

import libcst as cst
import pytest
from operators import (
    Operator,
    drop_added,
    drop_term,
    flip_sign,
    ignored_keys,
    is_left_alone,
    leave_out_argument,
    one_string,
    swap_keywords,
    walk,
)

DEFAULTS = {
    "algorithm.clip.low": "0.2",
    "algorithm.critic.lr": "1e-06",
    "train.lr": "2e-06",
    "algorithm.kl.place": "'loss'",
    "sampling.dynamic": "True",
}


def mutants(operator: Operator, kind: type, source: str) -> list[str]:
    """The source with each change that the operator proposes."""
    module = cst.parse_module(source)
    return [
        module.deep_replace(node, changed).code
        for node in walk(module)
        if isinstance(node, kind)
        for changed in operator(node)
    ]


@pytest.mark.parametrize(
    ("operator", "kind", "source", "expected"),
    [
        (swap_keywords, cst.Call, "f(x, a=1, b=2, c=2)", ["f(x, a=2, b=1, c=2)"]),
        (swap_keywords, cst.Call, "f(x, y, 3)", ["f(y, x, 3)"]),
        (leave_out_argument, cst.Call, "f(x, y, a=1, **more)", ["f(x, a=1, **more)", "f(x, y, **more)"]),
        (leave_out_argument, cst.Call, "f(x, dim=1, device=d)", ["f(x, device=d)"]),
        (drop_term, cst.BinaryOperation, "a + b", ["a", "b"]),
        (drop_term, cst.BinaryOperation, "(1 - b).abs()", ["(1).abs()", "(-(b)).abs()"]),
        (drop_term, cst.BinaryOperation, "a * b[0]", ["a", "b[0]"]),
        (drop_term, cst.BinaryOperation, "a / b", ["a"]),
        (drop_term, cst.BinaryOperation, "a // b", []),
        (drop_added, cst.AugAssign, "n += 1", ["pass"]),
        (drop_added, cst.AugAssign, "seen |= more", []),
        (flip_sign, cst.BinaryOperation, "a * b / c", ["(-(a * b)) / c"]),
        (flip_sign, cst.BinaryOperation, "a + b", []),
        (one_string, cst.SimpleString, 'kind == "token"', ['kind == "XXtokenXX"']),
        (one_string, cst.SimpleString, 'print("no such token")', []),
        (ignored_keys(DEFAULTS), cst.Attribute, "config.algorithm.clip.low", ["(0.2)"]),
        (ignored_keys(DEFAULTS), cst.Attribute, "clip.low", ["(0.2)"]),
        (ignored_keys(DEFAULTS), cst.Attribute, "self.config.dynamic", ["(True)"]),
        (ignored_keys(DEFAULTS), cst.Attribute, "critic.lr, train.lr", ["(1e-06), train.lr", "critic.lr, (2e-06)"]),
        (ignored_keys(DEFAULTS), cst.Attribute, "settings.lr", []),  # could be either
        (ignored_keys(DEFAULTS), cst.Attribute, "clipped.low", []),
    ],
)
def test_each_operator_makes_what_it_promises(operator: Operator, kind: type, source: str, expected: list[str]):
    assert mutants(operator, kind, source) == expected


def left(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if not is_left_alone(node):
        yield node
        for child in node.children:
            yield from left(child)


def test_what_a_reader_is_told_is_left_alone():
    source = dedent('''
        def f(x):
            """One + two."""
            start = perf_counter() - 1
            what = f"only {x + 2} of them"
            assert x > 3, "x is above 3"
            check_shapes("B", x[11:])
            event("fill", x + 4)
            events.append(f"step {x - 5} skipped")
            x = zip(x, strict=x > 12)
            metrics["timing.update_s"] = x - 6
            if x == 7:
                raise ValueError(x + 8)
            return x["nine"] + 10
    ''')
    kept = list(left(cst.parse_module(source)))
    assert [node.value for node in kept if isinstance(node, cst.Integer)] == ["7", "10"]
    assert [node.value for node in kept if isinstance(node, cst.SimpleString)] == ['"nine"']
