"""Mathematical notation, LaTeX or plain, as a tree. Reads, never evaluates: `9^9^9^9` is four numbers and three powers.

Strict where leniency would change a value: two numbers side by side are an error, and words never disappear from
between digits.
"""

from __future__ import annotations

from fractions import Fraction

from dapo.rewards.limits import MAX_DEPTH
from dapo.rewards.math.tokens import NotationError, Token, UnknownNotationError
from dapo.rewards.math.tree import Node

CLOSERS = {
    "(": ")",
    "[": "]",
    "{": "}",
    "\\{": "\\}",
    "langle": "rangle",
    "lfloor": "rfloor",
    "lceil": "rceil",
    "|": "|",
}


def parse(stream: list[Token]) -> Node:
    """One tree for the whole token list: list > relation > union > sum > product > sign > power > atom."""
    parser = _Parser(stream)
    node = parser.listing()
    parser.skip_breaks()
    if parser.token is not None:
        raise NotationError(f"cannot read {parser.token.text!r} there")
    return node


class _Parser:
    """Recursive descent over tokens. Each method reads what its name says and leaves the position after it."""

    def __init__(self, stream: list[Token]) -> None:
        self.stream = stream
        self.position = 0
        self.depth = 0

    @property
    def token(self) -> Token | None:
        return self.stream[self.position] if self.position < len(self.stream) else None

    def at(self, kind: str, *texts: str) -> bool:
        token = self.token
        return token is not None and token.kind == kind and (not texts or token.text in texts)

    def take(self) -> Token:
        token = self.token
        if token is None:
            raise NotationError("it ends too early")
        self.position += 1
        return token

    def expect(self, kind: str, text: str) -> None:
        self.skip_breaks()
        if not self.at(kind, text):
            raise NotationError(f"{text!r} is missing")
        self.position += 1

    def skip_breaks(self) -> bool:
        start = self.position
        while self.at("BREAK"):
            self.position += 1
        return self.position > start

    def listing(self) -> Node:
        """Values separated by commas; one value alone is itself."""
        items = [self.relation()]
        words: set[str] = set()
        self.skip_breaks()
        while self.at("SEP", ",", ";", "and", "or"):
            words.add(self.take().text)
            self.skip_breaks()
            if self.token is None or self.at("CLOSE"):
                break
            items.append(self.relation())
            self.skip_breaks()
        if len(items) == 1:
            return items[0]
        logic = {"and", "or"} if any(item.op == "rel" for item in items) else {"or"}  # `1 and 2` are just both
        return Node("list", tuple(items), name=" ".join(sorted(words & logic)))

    def relation(self) -> Node:
        """`a = b = c`, `a < b`, or a bare value. A leading `=` (what "is" becomes) has nothing on its left."""
        self.skip_breaks()
        if self.at("REL", "=") or self.at("REL", "to"):
            self.position += 1
            return self.relation()
        if self.at("REL", "approx"):
            self.position += 1
            return Node("approx", (self.union(),))
        sides, names = [self.union()], []
        self.skip_breaks()
        while self.at("REL"):
            names.append(self.take().text)
            sides.append(self.union())
            self.skip_breaks()
        if not names:
            return sides[0]
        if set(names) == {"="}:
            return Node("eq", tuple(sides))
        return Node("rel", tuple(sides), name=" ".join(names))

    def union(self) -> Node:
        parts = [self.ratio()]
        self.skip_breaks()
        while self.at("CMD", "cup") or (self.at("SYM", "U") and parts[-1].op in ("bracket", "set")):
            self.position += 1
            parts.append(self.ratio())
            self.skip_breaks()
        return parts[0] if len(parts) == 1 else Node("union", tuple(parts))

    def ratio(self) -> Node:
        parts = [self.sum()]
        self.skip_breaks()
        if self.at("CMD", "over", "choose"):
            return Node("div" if self.take().text == "over" else "binomial", (parts[0], self.sum()))
        while self.at("OP", ":") or self.at("CMD", "colon"):
            self.position += 1
            parts.append(self.sum())
            self.skip_breaks()
        if len(parts) == 1:
            return parts[0]
        is_padded = any(len(part.name) > 1 and part.name.startswith("0") for part in parts)
        return Node("ratio", tuple(parts), name="padded" if is_padded else "")  # 3:05 is no 3:5

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotationError("nested too deeply")
        node: Node | None = None
        self.skip_breaks()
        if self.at("CMD", "pm", "mp"):
            self.position += 1
            node = Node("pm", (Node("num", value=Fraction(0)), self.product()))
        else:
            node = self.product()
        while True:
            mark = self.position
            self.skip_breaks()
            if self.at("OP", "+"):
                self.position += 1
                node = Node("add", (node, self.product()))
            elif self.at("OP", "-"):
                self.position += 1
                node = Node("add", (node, Node("neg", (self.product(),))))
            elif self.at("CMD", "pm", "mp"):
                self.position += 1
                node = Node("pm", (node, self.product()))
            else:
                self.position = mark
                break
        self.depth -= 1
        return node

    def product(self) -> Node:
        node = self.signed()
        while True:
            mark = self.position
            broken = self.skip_breaks()
            if self.at("OP", "*"):
                self.position += 1
                node = Node("mul", (node, self.signed()))
            elif self.at("OP", "/"):
                self.position += 1
                node = Node("div", (node, self.signed()))
            elif not broken and self.starts_factor(node):
                node = self.juxtaposed(node)
            else:
                self.position = mark
                return node

    def starts_factor(self, left: Node) -> bool:
        """Whether what follows multiplies what stands left without a sign: `2x`, `3\\sqrt2`, `(x+1)(x+2)`."""
        token = self.token
        if token is None:
            return False
        if token.kind == "NUM":  # `4 2`, `x2`, `(4)2`: never a product; `1 1/2` is a mixed number
            return left.op == "num" and self.mixed_fraction_follows(left)
        if token.kind in ("SYM", "FUNC"):
            return not (token.kind == "SYM" and token.text == "U" and left.op in ("bracket", "set"))
        if token.kind == "OPEN":
            return token.text in ("(", "{", "[", "lfloor", "lceil") and left.op not in ("bracket", "set")
        return token.kind == "CMD" and (
            token.text in ("frac", "sqrt", "binom", "begin", "angle", "triangle") or token.text.startswith("accent ")
        )

    def mixed_fraction_follows(self, left: Node) -> bool:
        numbers = self.stream[self.position : self.position + 3]
        if len(numbers) < 3 or not numbers[0].spaced or (numbers[1].kind, numbers[1].text) != ("OP", "/"):
            return False
        whole, top, bottom = left.value, numbers[0].value, numbers[2].value
        return (
            whole is not None and top is not None and bottom is not None and numbers[2].kind == "NUM"
            and whole.denominator == top.denominator == bottom.denominator == 1 and 0 < top < bottom
        )  # fmt: skip

    def juxtaposed(self, left: Node) -> Node:
        if self.at("NUM"):
            top, _, bottom = self.take(), self.take(), self.take()
            assert top.value is not None, "checked in mixed_fraction_follows"
            assert bottom.value is not None, "checked in mixed_fraction_follows"
            return Node("add", (left, Node("num", value=top.value / bottom.value)))
        if self.at("CMD", "frac") and left.op == "num" and left.value is not None and left.value.denominator == 1:
            right = self.power()
            parts = [part.value for part in right.args if part.op == "num"]
            if right.op == "div" and len(parts) == 2 and None not in parts and left.value != 0:
                return Node("add", (left, right))  # 14\frac{6}{7}: a mixed number
            return Node("mul", (left, right))
        return Node("mul", (left, self.power()))

    def signed(self) -> Node:
        self.skip_breaks()
        n_minus = n_signs = 0
        while self.at("OP", "+", "-"):
            n_minus += self.take().text == "-"
            n_signs += 1
            self.skip_breaks()
            if n_signs > 2:
                raise NotationError("a row of signs")
        node = self.power()
        if n_minus:
            # A minus binds weaker than the juxtaposition that follows it: -14\frac{6}{7} is -(14 + 6/7).
            while self.starts_factor(node) and not self.at("BREAK"):
                node = self.juxtaposed(node)
        return Node("neg", (node,)) if n_minus % 2 else node

    def power(self) -> Node:
        start = self.position
        node = self.atom()
        while True:
            if self.at("OP", "!"):
                node = self.factorial(node)
            elif self.at("OP", "%"):
                self.position += 1
                node = Node("percent", (node,))
            elif self.at("OP", "'"):
                self.position += 1
                node = self.primed(start)
            elif self.at("OP", "deg"):
                self.position += 1
                node = Node("degree", (node,))
            elif self.at("OP", "^"):
                self.position += 1
                node = Node("degree", (node,)) if self.degree_follows() else Node("pow", (node, self.exponent()))
            elif self.at("OP", "_"):
                self.position += 1
                node = self.subscripted(node)
            else:
                return node

    def factorial(self, node: Node) -> Node:
        """`5!`, or the double factorial `5!!` = 5·3·1, which is not `(5!)!`."""
        n_signs = 0
        while self.at("OP", "!"):
            self.position += 1
            n_signs += 1
        if n_signs > 2:
            raise NotationError("a row of factorial signs")
        return Node("factorial", (node,), name="double" if n_signs == 2 else "")

    def primed(self, start: int) -> Node:
        """Another quantity than the one without the prime; `f'(2)` is a value of another function."""
        name = self.spelled(start)
        return Node("apply", (self.atom(),), name=name) if self.at("OPEN", "(") else Node("sym", name=name)

    def degree_follows(self) -> bool:
        for pattern in (["deg"], ["{", "deg", "}"], ["o"], ["{", "o", "}"]):
            ahead = [token.text for token in self.stream[self.position : self.position + len(pattern)]]
            if ahead == pattern:
                self.position += len(pattern)
                return True
        return False

    def exponent(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotationError("nested too deeply")
        if self.at("OP", "-", "+"):
            negative = self.take().text == "-"
            node = self.power()
            node = Node("neg", (node,)) if negative else node
        else:
            node = self.power() if not self.at("OPEN", "{") else self.atom()
            if self.at("OP", "^"):  # right-associative: 9^{9}^{9}
                self.position += 1
                node = Node("pow", (node, self.exponent()))
        self.depth -= 1
        return node

    def subscripted(self, node: Node) -> Node:
        start = self.position
        subscript = self.atom()
        if node.op == "num":
            if subscript.op != "num" or node.value is None or node.value.denominator != 1:
                raise NotationError("a number with a subscript that is no base")
            return Node("base", (node, subscript))
        if node.op != "sym":
            return Node("sub", (node, subscript))
        return Node("sym", name=f"{node.name}_{self.spelled(start)}")

    def argument(self) -> Node:
        """The argument of \\frac or \\binom: a group, or the next single digit as TeX takes it."""
        if self.at("OPEN", "{"):
            return self.atom()
        token = self.token
        if token is not None and token.kind == "NUM" and token.text.isdigit() and len(token.text) > 1:
            first, rest = token.text[0], token.text[1:]
            self.stream = [*self.stream]
            self.stream[self.position] = Token("NUM", rest, True, Fraction(rest))
            return Node("num", value=Fraction(first))
        return self.atom()

    def atom(self) -> Node:
        self.skip_breaks()
        token = self.take()
        if token.kind == "NUM":
            return Node("num", value=token.value, name=token.text)
        if token.kind == "SYM":
            if self.at("OPEN", "(") and token.text in "fghFGHP" and token.text != "":
                return Node("apply", (self.atom(),), name=token.text)
            return (token.text == "C" and self.combinations()) or Node("sym", name=token.text)
        if token.kind == "FUNC":
            return self.function(token.text)
        if token.kind == "OPEN":
            return self.bracketed(token.text)
        if token.kind == "OP" and token.text == "|":
            inner = self.sum()
            self.expect("OP", "|")
            return Node("func", (inner,), name="abs")
        if token.kind == "CMD":
            return self.command(token.text)
        raise NotationError(f"cannot read {token.text!r} there")

    def combinations(self) -> Node | None:
        """The rest of `C(5, 2)`; None, and nothing is read, where C is something else."""
        mark = self.position
        self.skip_breaks()
        numbers = self.stream[self.position + 1 : self.position + 4 : 2]
        signs = [token.text for token in self.stream[self.position : self.position + 5 : 2]]
        if signs != ["(", ",", ")"] or any(token.kind != "NUM" for token in numbers):
            self.position = mark
            return None
        self.position += 5
        top, bottom = (Node("num", value=token.value, name=token.text) for token in numbers)
        return Node("binomial", (top, bottom))

    def bracketed(self, opener: str) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotationError("nested too deeply")
        self.skip_breaks()
        if opener == "\\{" and self.at("CLOSE", "\\}"):
            self.position += 1
            self.depth -= 1
            return Node("sym", name="emptyset")
        inner = self.listing()
        self.skip_breaks()
        closer = self.take()
        self.depth -= 1
        allowed = {")", "]"} if opener in ("(", "[") else {CLOSERS.get(opener, "")}
        if closer.text not in allowed:
            raise NotationError("brackets that do not match")
        items = inner.args if inner.op == "list" else (inner,)
        if opener == "{":
            return inner
        if opener == "\\{":
            return Node("set", items)
        if opener in ("lfloor", "lceil"):
            return Node("func", (inner,), name="floor" if opener == "lfloor" else "ceil")
        if opener == "|":
            return Node("func", (inner,), name="abs")
        if opener == "langle":
            return Node("bracket", items, name="()")
        if opener == "(" and closer.text == ")" and len(items) == 1:
            return items[0]
        return Node("bracket", items, name=opener + closer.text)

    def function(self, name: str) -> Node:
        power: Node | None = None
        base: Node | None = None
        for _ in range(2):
            if self.at("OP", "^"):
                self.position += 1
                power = self.exponent() if not self.at("OPEN", "{") else self.atom()
            elif self.at("OP", "_"):
                self.position += 1
                base = self.argument()
        if name == "sqrt" and self.at("OPEN", "["):
            self.position += 1
            index = self.sum()
            self.expect("CLOSE", "]")
            node = Node("root", (self.atom(), index))
        elif name == "sqrt":
            node = Node("func", (self.atom(),), name=name)
        else:
            node = Node("func", (self.operand(), *((base,) if base is not None else ())), name=name)
        if power is not None:
            inverse = power == Node("neg", (Node("num", value=Fraction(1), name="1"),))
            node = Node("func", node.args, name="arc" + name) if inverse else Node("pow", (node, power))
        return node

    def operand(self) -> Node:
        """What a function written without brackets acts on: `\\sin 2x` is sin(2x)."""
        self.skip_breaks()
        if self.at("OPEN", "(", "{", "|") or self.at("OP", "|"):
            return self.atom()
        negative = self.at("OP", "-")
        if negative:
            self.position += 1
        node = self.power()
        while self.at("SYM") or (self.at("CMD", "frac") and node.op == "num"):
            node = Node("mul", (node, self.power()))
        if self.at("OP", "/") and self.position + 1 < len(self.stream) and self.stream[self.position + 1].kind == "NUM":
            self.position += 1
            node = Node("div", (node, self.power()))
        return Node("neg", (node,)) if negative else node

    def command(self, name: str) -> Node:
        if name == "frac":
            top = self.argument()
            return Node("div", (top, self.argument()))
        if name == "binom":
            top = self.argument()
            return Node("binomial", (top, self.argument()))
        if name in ("begin", "begin determinant"):
            return self.matrix(name.removeprefix("begin "))
        if name.startswith("accent "):
            return self.accented(name.removeprefix("accent "))
        if name in ("angle", "triangle", "odot"):
            inner = self.power()
            return Node("sym", name=f"{name} {inner.name}")
        if name == "mathbb":
            inner = self.atom()
            return Node("sym", name=f"mathbb {inner.name}")
        raise UnknownNotationError(f"\\{name} is not read")

    def accented(self, accent: str) -> Node:
        """Another quantity than the one below the accent; a segment, `\\overline{AB}`, is AB."""
        start = self.position
        inner = self.argument()
        if inner.op == "sym" and inner.name.isupper() and len(inner.name) > 1:
            return inner
        return Node("sym", name=f"{accent} {self.spelled(start)}")

    def spelled(self, start: int) -> str:
        """What was read from there on, as one name."""
        return "".join(token.text for token in self.stream[start : self.position]).strip("{}")

    def matrix(self, kind: str) -> Node:
        if self.at("OPEN", "{"):  # column layout of an array
            while not self.at("CLOSE", "}"):
                self.take()
            self.take()
        rows: list[Node] = []
        row: list[Node] = [self.relation()]
        while True:
            self.skip_breaks()
            if self.at("SEP", "&"):
                self.position += 1
                row.append(self.relation())
            elif self.at("SEP", "\\\\"):
                self.position += 1
                rows.append(Node("row", tuple(row)))
                self.skip_breaks()
                if self.at("CMD", "end", "end determinant"):
                    row = []
                    break
                row = [self.relation()]
            elif self.at("CMD", "end", "end determinant"):
                rows.append(Node("row", tuple(row)))
                break
            else:
                raise NotationError("a matrix that cannot be read")
        self.position += 1
        return Node("matrix", tuple(rows), name="determinant" if kind == "determinant" else "")
