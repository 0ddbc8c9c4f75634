"""Whether two answers have the same mathematical value. Exact here; what needs real analysis is left to a worker.

Rationals are compared as fractions, never as floats. Shapes (lists, tuples, intervals, sets, matrices, equations) are
compared part by part. `Undecided` means: only numerics or algebra can tell, ask again with `compare_scalars`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from dapo.rewards.limits import MAX_BITS, MAX_FACTORIAL
from dapo.rewards.notation import Node
from dapo.rewards.vocabulary import UNIT_LETTERS


class UndecidedError(Exception):
    """The exact rules cannot tell whether the two are equal."""


class TooLargeError(Exception):
    """A number too large to be worth computing: a power tower, a huge factorial."""


CompareScalars = Callable[[Node, Node], bool]
_MAX_LIST = 40


def exact(node: Node) -> Fraction | None:
    """The rational value of an expression, None when it is not (visibly) rational. TooLargeError before it explodes."""
    match node.op:
        case "num":
            return node.value
        case "neg":
            inner = exact(node.args[0])
            return None if inner is None else -inner
        case "percent":
            inner = exact(node.args[0])
            return None if inner is None else inner / 100
        case "add" | "mul" | "div":
            left, right = exact(node.args[0]), exact(node.args[1])
            if left is None or right is None:
                return None
            if node.op == "add":
                return left + right
            if node.op == "mul":
                return _checked(left * right)
            return _checked(left / right) if right else None
        case "pow":
            return _power(exact(node.args[0]), exact(node.args[1]))
        case "factorial":
            inner = exact(node.args[0])
            if inner is None or inner.denominator != 1 or inner < 0:
                return None
            if inner > MAX_FACTORIAL:
                raise TooLargeError
            return Fraction(math.factorial(int(inner)))
        case "binomial":
            top, bottom = exact(node.args[0]), exact(node.args[1])
            if (
                top is None
                or bottom is None
                or top.denominator != 1
                or bottom.denominator != 1
                or bottom < 0
                or top < 0
            ):
                return None
            if top > MAX_FACTORIAL:
                raise TooLargeError
            return Fraction(math.comb(int(top), int(bottom)))
        case "func" | "root":
            return _exact_function(node)
    return None


def _checked(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise TooLargeError
    return value


def _power(base: Fraction | None, exponent: Fraction | None) -> Fraction | None:
    if base is None or exponent is None:
        return None
    if exponent.denominator != 1:
        root = _exact_root(base, exponent.denominator) if exponent.denominator <= 64 else None
        return None if root is None else _power(root, Fraction(exponent.numerator))
    if base == 0:
        return Fraction(0) if exponent > 0 else (Fraction(1) if exponent == 0 else None)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and abs(exponent) * bits > MAX_BITS:
        raise TooLargeError
    if abs(base) == 1:
        return Fraction(1) if base == 1 or exponent % 2 == 0 else Fraction(-1)
    return Fraction(base ** int(exponent))


def _exact_root(value: Fraction, index: int) -> Fraction | None:
    """The index-th root when it is rational; of a negative number only for odd index 3."""
    if value < 0:
        return None
    parts = [_integer_root(part, index) for part in (value.numerator, value.denominator)]
    if parts[0] is None or parts[1] is None:
        return None
    return Fraction(parts[0], parts[1])


def _integer_root(value: int, index: int) -> int | None:
    if index == 2:
        root = math.isqrt(value)
    else:
        low, high = 0, 1 << (value.bit_length() // index + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**index <= value else (low, middle - 1)
        root = low
    return root if root**index == value else None


def _exact_function(node: Node) -> Fraction | None:
    if node.name in _OF_SEVERAL and node.args[0].op == "bracket":
        several = [exact(arg) for arg in node.args[0].args]
        known = [value for value in several if value is not None]
        return _OF_SEVERAL[node.name](known) if len(known) == len(several) else None
    values = [exact(arg) for arg in node.args]
    if any(value is None for value in values):
        return None
    first = values[0]
    assert first is not None, "checked above"
    if node.op == "root":
        index = values[1]
        if index is None or index.denominator != 1 or not 1 < index <= 64:
            return None
        if first < 0 and int(index) % 2:
            root = _exact_root(-first, int(index))
            return None if root is None else -root
        return _exact_root(first, int(index))
    match node.name:
        case "sqrt":
            return _exact_root(first, 2)
        case "abs":
            return abs(first)
        case "floor":
            return Fraction(math.floor(first))
        case "ceil":
            return Fraction(math.ceil(first))
    return None


def _of_integers(function: Callable[..., int]) -> Callable[[list[Fraction]], Fraction | None]:
    def call(values: list[Fraction]) -> Fraction | None:
        if any(value.denominator != 1 for value in values):
            return None
        return Fraction(function(*map(int, values)))

    return call


_OF_SEVERAL: dict[str, Callable[[list[Fraction]], Fraction | None]] = {
    "max": max,
    "min": min,
    "gcd": _of_integers(math.gcd),
    "lcm": _of_integers(math.lcm),
}


def settled(node: Node, *, is_reference: bool = False, compare: CompareScalars | None = None) -> Node:
    """An equation that only names its value, `x = 42` or `6·7 = 42`, as that value; sides that differ are no answer.

    A reference `x + y = 5` is a line; in an answer it names the value 5 of x + y. UndecidedError where only numerics
    can tell whether the sides agree and `compare` is exact.
    """
    if node.op == "list":
        return Node("list", tuple(settled(arg, is_reference=is_reference, compare=compare) for arg in node.args))
    if node.op == "rel" and node.name == "in" and _is_name(node.args[0]):
        return node.args[1]  # x ∈ [0, 1)
    if node.op != "eq":
        return node
    if is_reference and node.args[0].op not in ("sym", "apply") and _free(node):
        return node
    compare = trusting if is_reference else compare or _compare_exactly
    unnamed = [side for side in node.args if not _is_name(side)]
    closed = [side for side in unnamed if not _free(side)]
    if any(not _sides_agree(closed[0], other, compare) for other in closed[1:]):
        return Node("contradiction", node.args)
    if not unnamed:
        return node if len(node.args) > 1 and not _is_name(node.args[0]) else node.args[-1]
    if closed:
        value = next((side for side in reversed(closed) if exact_or_none(side) is not None), closed[-1])
        is_named = all(_is_quantity(side) for side in unnamed if _free(side))
        if len(closed) == len(unnamed) or (is_named and exact_or_none(value) != 0):
            return value
        return node
    if _is_name(node.args[0]) and len(unnamed) == 1 and not _defines_line(node):
        return unnamed[0]
    return node


def trusting(left: Node, right: Node) -> bool:
    """For sides of a reference: equal unless exact rules tell otherwise."""
    try:
        return _compare_exactly(left, right)
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
            return _same_scalar(left, right, compare) or compare(left, right)
        return same(left, right, compare) or (
            _with_decimal_logs(left) != left and same(_with_decimal_logs(left), right, compare)
        )
    except UndecidedError:
        if compare is _compare_exactly:
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


def _with_decimal_logs(node: Node) -> Node:
    """`\\log 100` to base 10: without a base it may be either."""
    args = tuple(_with_decimal_logs(arg) for arg in node.args)
    if node.op == "func" and node.name == "log" and len(args) == 1:
        args = (*args, Node("num", value=Fraction(10)))
    return Node(node.op, args, node.value, node.name)


def _defines_line(node: Node) -> bool:
    """`y = 2x + 1` is a line, and stays an equation; `x = 3\\sqrt2` names a value."""
    return node.args[0].op == "sym" and bool(_free(node.args[-1]))


def exact_or_none(node: Node) -> Fraction | None:
    try:
        return exact(node)
    except TooLargeError:
        return None


def _is_name(node: Node) -> bool:
    """A quantity's name: x, f(2), m + n, AB, |AB|. Not `2x`: that would be an equation to solve."""
    if node.op == "sym":
        return node.name not in ("pi", "e", "i", "infty", "emptyset") and not node.name.startswith("mathbb ")
    if node.op in ("sub", "prime"):
        return _is_name(node.args[0])
    if node.op in ("apply", "text"):
        return True
    if node.op in ("add", "mul") and len(_free(node)) > 1:
        return all(_is_name(arg) for arg in node.args)
    if node.op == "bracket":
        return all(_is_name(arg) for arg in node.args)
    return node.op == "func" and node.name in ("abs", "floor", "ceil") and _is_name(node.args[0])


def _is_quantity(node: Node) -> bool:
    """What a problem asks the value of: 100m + n, a² + b², πr². Of one variable it is an equation to solve."""
    return _is_form(node) and (len(_free(node)) > 1 or _is_circle(node))


def _is_circle(node: Node) -> bool:
    """A measure of a circle or sphere: a product with π and the radius."""
    return _free(node) in ({"r"}, {"R"}) and node.op == "mul" and Node("sym", name="pi") in _factors(node)


def _factors(node: Node) -> tuple[Node, ...]:
    return (*_factors(node.args[0]), *_factors(node.args[1])) if node.op == "mul" else (node,)


def _is_form(node: Node) -> bool:
    """A combination such as 100m + n that a problem asks for; with a constant it is an equation to solve."""
    if node.op == "mul":
        return bool(_free(node)) and all(_is_form(arg) or _is_coefficient(arg) for arg in node.args)
    if node.op == "pow":
        return node.args[0].op == "sym" and _is_form(node.args[0]) and node.args[1].value in (2, 3, 4)
    if node.op == "add":
        return all(_is_form(arg) for arg in node.args)
    return node.op == "sym" and bool(_free(node))


def _is_coefficient(node: Node) -> bool:
    return node == Node("sym", name="pi") or bool(exact_or_none(node))


def _free(node: Node) -> frozenset[str]:
    if node.op in ("sym", "text"):
        return frozenset() if node.name in ("pi", "e", "i", "infty") else frozenset({node.name})
    return frozenset().union(*(_free(arg) for arg in node.args)) if node.args else frozenset()


free_symbols = _free


def agree(left: Node, right: Node) -> bool:
    """Two values in one statement are the same. What cannot be decided exactly does not agree, unless spelled alike."""
    try:
        return same(left, right)
    except (UndecidedError, TooLargeError):
        return False


def same(reference: Node, said: Node, compare_scalars: CompareScalars | None = None) -> bool:
    """Whether `said` has the reference's value."""
    compare = compare_scalars or _compare_exactly
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


def _expanded(node: Node, compare: CompareScalars) -> Node:
    """± as its two values; a set or list of one as that one."""
    if node.op == "pm":
        left, right = node.args
        return Node("list", (Node("add", (left, right)), Node("add", (left, Node("neg", (right,))))))
    if node.op == "set" and len(node.args) == 1:
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
        return _same_scalar(reference, said, compare)
    if reference.op == "list" and said.op == "list":
        return _matched(reference.args, said.args, compare)
    if reference.op == "bracket" and said.op == "bracket":
        return reference.name == said.name and _in_order(reference.args, said.args, compare)
    if reference.op == "bracket" and said.op == "list" and reference.name == "()":
        return _in_order(reference.args, said.args, compare)
    if reference.op == said.op == "union":
        return _matched(reference.args, said.args, compare)
    if reference.op == said.op and reference.op in ("matrix", "row"):
        return _in_order(reference.args, said.args, compare)
    if reference.op == said.op == "ratio":
        return _same_ratio(reference, said, compare)
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
        return said.op not in shapes and _same_scalar(reference.args[1], said, compare)
    if said.op == "eq" and _is_name(said.args[0]) and len(said.args) == 2:
        return reference.op not in shapes and _same_scalar(reference, said.args[1], compare)
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
    left, right = [exact_or_none(arg) for arg in reference.args], [exact_or_none(arg) for arg in said.args]
    if len(left) != len(right):
        return False
    if None in left or None in right or not left[0] or not right[0]:
        return _in_order(reference.args, said.args, compare)
    scale = right[0] / left[0]
    return all(a is not None and b is not None and a * scale == b for a, b in zip(left, right, strict=True))


def _same_equation(reference: Node, said: Node, compare: CompareScalars) -> bool:
    if len(reference.args) != 2 or len(said.args) != 2:
        return False
    if compare is _compare_exactly:
        raise UndecidedError
    differences = [Node("add", (side.args[0], Node("neg", (side.args[1],)))) for side in (reference, said)]
    return compare(Node("equation", (differences[0],)), Node("equation", (differences[1],)))


def _same_scalar(reference: Node, said: Node, compare: CompareScalars) -> bool:
    """Percent and degree signs are units where the reference has none."""
    marked, plain_reference = _unmarked(reference)
    said_mark, plain_said = _unmarked(said)
    if not _free(plain_reference):
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
    return _free(node) if _without_unit_letters(node) != node else frozenset()


def unit_powers(node: Node) -> frozenset[int]:
    """The exponents of letters that stand as units: 3 in `10 m^3`."""
    if node.op in ("neg", "mul", "div") and _without_unit_letters(node) != node:
        unit = node.args[-1]
        own = {int(unit.args[1].value)} if unit.op == "pow" and unit.args[1].value is not None else set()
        return frozenset(own) | unit_powers(node.args[0])
    return frozenset()


def bare(node: Node) -> Node:
    """The tree without how its numbers were spelled."""
    if node.op == "num":
        return Node("num", value=node.value)
    return Node(node.op, tuple(bare(arg) for arg in node.args), name=node.name)


def _compare_exactly(left: Node, right: Node) -> bool:
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
