"""The words of a shell script, with the variables it sets put in as text. Nothing is run, no environment is read."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_BEFORE_ASSIGNMENT = {"export", "local", "declare", "readonly", "-x", "-r"}
_DEFAULT = re.compile(r"([A-Za-z_]\w*|\d):?[-=](.*)", re.DOTALL)
_END_OF_COMMAND = ";|&\n"
_LARGEST = 10**15
_MOST_PUT_IN = 4 << 20
_DEEPEST = 50


class NoScriptError(Exception):
    """Text that is not a script; the message names the line."""


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    line: int


@dataclass
class Script:
    """A cursor over a script; `commands` grows as it is read."""

    text: str
    at: int = 0
    line: int = 1
    variables: dict[str, str] = field(default_factory=dict)
    commands: list[list[Word]] = field(default_factory=list)
    put_in: int = 0  # characters that variables came to so far

    def step(self, n: int = 1) -> str:
        taken = self.text[self.at : self.at + n]
        self.line += taken.count("\n")
        self.at += n
        return taken

    def looks_at(self, piece: str) -> bool:
        return self.text.startswith(piece, self.at)

    @property
    def is_done(self) -> bool:
        return self.at >= len(self.text)


def commands_of(text: str) -> list[list[Word]]:
    """Every command of a script as words, variables resolved in the order of the text.

    Branches and loops are not followed: the last assignment above a use counts. A variable the script does not set,
    and the output of a command, stay in the word as they are written.
    """
    script = Script(text.replace("\r\n", "\n"))
    words: list[Word] = []
    while not script.is_done:
        sign = script.text[script.at]
        if script.looks_at("\\\n"):
            script.step(2)
        elif sign == "#":
            skip_comment(script)
        elif sign in _END_OF_COMMAND:
            script.step()
            words = finish(script, words)
        elif sign in " \t()":
            script.step()
        else:
            words.append(read_word(script))
    finish(script, words)
    return script.commands


def skip_comment(script: Script) -> None:
    while not script.is_done and not script.looks_at("\n"):
        script.step()


def finish(script: Script, words: list[Word]) -> list[Word]:
    """A command is complete: what it assigns is known from here on."""
    if words:
        script.commands.append(words)
    for word in words:
        assigned = _ASSIGNMENT.fullmatch(word.text)
        if assigned is not None:
            script.variables[assigned[1]] = assigned[2]
        elif word.text not in _BEFORE_ASSIGNMENT:
            break
    return []


def read_word(script: Script) -> Word:
    line, parts = script.line, []
    while not script.is_done:
        sign = script.text[script.at]
        if sign in _END_OF_COMMAND + " \t()":
            break
        if sign == "'":
            script.step()
            parts.append(until(script, "'"))
        elif sign == '"':
            script.step()
            parts.append(read_quoted(script))
        elif script.looks_at("\\\n"):
            script.step(2)
        elif sign == "\\":
            script.step()
            parts.append(script.step())
        elif sign in "$`":
            parts.append(read_dollar(script))
        else:
            parts.append(script.step())
    return Word("".join(parts), line)


def read_quoted(script: Script) -> str:
    parts = []
    while not script.is_done and not script.looks_at('"'):
        if script.looks_at("\\\n"):
            script.step(2)
        elif script.looks_at("\\") and script.text[script.at + 1 : script.at + 2] in ('"', "\\", "$", "`"):
            script.step()
            parts.append(script.step())
        elif script.text[script.at] in "$`":
            parts.append(read_dollar(script))
        else:
            parts.append(script.step())
    script.step()
    return "".join(parts)


def until(script: Script, end: str) -> str:
    """Up to and past `end`; without one, to the end of the text."""
    found = script.text.find(end, script.at)
    taken = script.step((found if found >= 0 else len(script.text)) - script.at)
    script.step(len(end))
    return taken


def read_dollar(script: Script) -> str:
    """$NAME, ${NAME}, ${NAME:-default} and $((arithmetic)) become their value; anything else stays as written."""
    value = value_of_dollar(script)
    script.put_in += len(value)
    if script.put_in > _MOST_PUT_IN:  # a=$b$b, c=$a$a, … doubles with every line
        raise NoScriptError(f"line {script.line}: variables grow without bound; this is not a config.")
    return value


def value_of_dollar(script: Script) -> str:
    if script.looks_at("`"):
        script.step()
        return f"`{until(script, '`')}`"
    if script.looks_at("$(("):
        inner = balanced(script, "(", ")")
        value = arithmetic(inner[2:-2], script.variables)
        return f"$({inner[1:-1]})" if value is None else str(value)
    if script.looks_at("$("):
        return f"${balanced(script, '(', ')')}"
    if script.looks_at("${"):
        return expanded(balanced(script, "{", "}")[1:-1], script.variables)
    script.step()
    name = _NAME.match(script.text, script.at)
    if name is None:
        return "$"
    script.step(len(name[0]))
    return script.variables.get(name[0], f"${name[0]}")


def balanced(script: Script, opening: str, closing: str) -> str:
    """From after the dollar to the bracket that closes the first one."""
    script.step()
    start, depth = script.at, 0
    while not script.is_done:
        sign = script.step()
        depth += (sign == opening) - (sign == closing)
        if depth > _DEEPEST:
            raise NoScriptError(f"line {script.line}: nested too deeply; this is not a config.")
        if depth == 0:
            break
    return script.text[start : script.at]


def expanded(inside: str, variables: dict[str, str]) -> str:
    """What ${inside} stands for."""
    if inside in variables:
        return variables[inside]
    default = _DEFAULT.fullmatch(inside)
    if default is None:
        return f"${{{inside}}}"
    if default[1] in variables:
        return variables[default[1]]
    script = Script(default[2], variables=variables)
    parts = []
    while not script.is_done:
        sign = script.text[script.at]
        if sign in "'\"":
            script.step()
        elif sign in "$`":
            parts.append(read_dollar(script))
        else:
            parts.append(script.step())
    return "".join(parts)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def arithmetic(expression: str, variables: dict[str, str]) -> int | None:
    """The value of $((expression)) with + - * / % on whole numbers; None where it is anything else."""
    try:
        tree = ast.parse(expression.replace("$", "").replace("{", "").replace("}", "").strip(), mode="eval")
        return _number(tree.body, variables)
    except (ArithmeticError, RecursionError, MemoryError, SyntaxError, ValueError):
        return None


def _number(node: ast.expr, variables: dict[str, str]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            result = int(value)
        case ast.Name(id=name):
            result = int(variables.get(name, "unset"))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](_number(left, variables), _number(right, variables))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_number(operand, variables)
        case _:
            raise ValueError("not plain arithmetic")
    if abs(result) > _LARGEST:
        raise ValueError("too large")
    return result
