"""A function or class of a notebook's cell as a module of its own, so that worker processes can import it.

Workers are new processes: a fork would take a GPU's context and other threads' locks along, and a pickle may run
anything. So the source of the cell is written to a file, with what it uses of other cells: imports, functions, classes
and plain values. `dapo resume` finds that file in the run's folder, and whoever reads the run sees what was rewarded.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import symtable
import sys
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from dapo.errors import ConfigError

HEADER = '"""What a run uses of its notebook: written by dapo.train, imported by its workers."""\n\n'
FUTURE = "from __future__ import annotations\n\n"
MAX_VALUE_CHARS = 100_000  # of a plain value that a cell uses; more belongs into a file

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def is_in_cell(own: object) -> bool:
    """Whether it is a function or class of an interactive session, at its top level: no file of it can be imported."""
    if not isinstance(own, FunctionType | type) or not own.__qualname__.isidentifier():
        return False
    return own.__module__ == "__main__" and getattr(sys.modules["__main__"], "__file__", None) is None


def module_of(key: str, own: Any) -> str:
    """The text of a module that defines it as the notebook does; ConfigError about `key` names what cannot be taken."""
    cells = Cells(key, vars(sys.modules["__main__"]))
    cells.take(own.__name__, own)
    parts = ["".join(sorted(cells.imports)), "".join(cells.values), "\n\n".join(cells.definitions)]
    return HEADER + FUTURE + "\n".join(part for part in parts if part)


class Cells:
    """What has been taken of a notebook's names so far."""

    def __init__(self, key: str, names: dict[str, Any]) -> None:
        self.key, self.names = key, names
        self.imports: set[str] = set()
        self.values: list[str] = []
        self.definitions: list[str] = []
        self._seen: set[str] = set()

    def take(self, name: str, value: Any) -> None:
        """Take a name and, before it, everything its definition uses."""
        if name in self._seen:
            return
        self._seen.add(name)
        try:
            self.take_new(name, value)
        except ConfigError:  # where it is only annotated it may be left out, and elsewhere be needed
            self._seen.discard(name)
            raise

    def take_new(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType):
            self.imports.add(f"import {value.__name__} as {name}\n")
        elif getattr(value, "__module__", None) == "__main__" and isinstance(value, FunctionType | type):
            self.define(name, value)
        elif (place := importable(value)) is not None:
            self.imports.add(f"from {place[0]} import {place[1]} as {name}\n")
        elif (text := plain_text(value)) is not None:
            self.values.append(f"{name} = {text}\n")
        else:
            raise self.refused(f"uses {name}, a {type(value).__name__} of the notebook", "Make it inside the function")

    def define(self, name: str, value: Any) -> None:
        node, source = definition_of(value) or (None, "")
        if node is None:
            raise self.refused(f"the source of {name} cannot be found", "Define it in a cell of its own")
        if node.name != name:
            raise self.refused(f"{name} is another name of {node.name}", "Use the name it was defined with")
        for used, is_needed in used_names(node, source).items():
            if used in self.names and used != name:
                try:
                    self.take(used, self.names[used])
                except ConfigError:
                    if is_needed:
                        raise
        self.definitions.append(source)

    def refused(self, why: str, remedy: str) -> ConfigError:
        return ConfigError(
            f"{self.key}: {why}, which worker processes cannot be given.",
            remedy=f"{remedy}, or write the function into a module and import it.",
        )


def definition_of(value: FunctionType | type) -> tuple[Definition, str] | None:
    """The statement that defined it and its text, from the cell as it was run."""
    for code in codes_of(value):
        lines = linecache.getlines(code.co_filename)
        try:
            tree = ast.parse("".join(lines))
        except (SyntaxError, ValueError):
            continue
        for node in tree.body:
            if isinstance(node, Definition) and first_line(node) <= code.co_firstlineno <= (node.end_lineno or 0):
                return node, textwrap.dedent("".join(lines[first_line(node) - 1 : node.end_lineno])).rstrip() + "\n"
    return None


def codes_of(value: FunctionType | type) -> Iterator[CodeType]:
    """Code objects that know their cell: a function's own, a class's methods'."""
    if isinstance(value, FunctionType):
        yield inspect.unwrap(value).__code__
        return
    for member in vars(value).values():
        function = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", member)))
        if isinstance(function, FunctionType) and function.__qualname__.startswith(f"{value.__qualname__}."):
            yield function.__code__


def first_line(node: Definition) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def used_names(node: Definition, source: str) -> dict[str, bool]:
    """Global names that a definition reads, in order; False for those of annotations alone, which nobody evaluates."""
    table = symtable.symtable(source, "<cell>", "exec")
    read = {
        symbol.get_name()
        for scope in scopes(table)
        for symbol in scope.get_symbols()
        if symbol.is_referenced() and (scope is table or symbol.is_global())
    }
    notes = {id(name) for one in ast.walk(node) for note in annotations_of(one) for name in ast.walk(note)}
    used: dict[str, bool] = {}
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and one.id in read:
            used[one.id] = used.get(one.id, False) or id(one) not in notes
    return used


def scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for inner in table.get_children():
        yield from scopes(inner)


def annotations_of(node: ast.AST) -> list[ast.expr]:
    found = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    return [note for note in found if isinstance(note, ast.expr)]


def importable(value: Any) -> tuple[str, str] | None:
    """Module and name under which any process finds it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if not isinstance(module, str) or not isinstance(name, str) or not name.isidentifier():
        return None
    found = getattr(sys.modules.get(module), name, None)
    return (module, name) if found is value and module != "__main__" else None


def plain_text(value: Any) -> str | None:
    """A plain value as Python writes it, where that makes the same one again."""
    try:
        text = repr(value)
        is_same = len(text) <= MAX_VALUE_CHARS and ast.literal_eval(text) == value
    except Exception:  # a value of the notebook's may have any repr
        return None
    return text if is_same else None
