"""reasoning-gym's tasks: their parameters by name and type, their entries. For processes of their own only.

Some of its generators draw from the order of sets, one from the state of `random`: a process that makes entries runs
with PYTHONHASHSEED = 0 and is seeded. Nothing else imports the package: it brings numpy, sympy and matplotlib.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import enum
import functools
import hashlib
import random
import types
import typing
from collections.abc import Sequence
from typing import Any

from dapo.errors import DataError
from dapo.rewards.gym.names import GymName

NOT_ALONE = ("composite",)  # is made of other tasks, which one name cannot give
OWN_SCORER = ("countdown", "puzzle24")  # arithmetic, which we read ourselves
BY_TEXT = ("game_of_life_halting",)  # compared with the reference: their own scorers take any text for right


def registered() -> dict[str, tuple[type, type]]:
    """Every task: its data set and its config, by name."""
    from reasoning_gym.factory import DATASETS

    return {name: DATASETS[name] for name in sorted(DATASETS) if name not in NOT_ALONE}


@functools.lru_cache(maxsize=64)
def _made(task: str, parameters: tuple[tuple[str, str], ...], size: int, seed: int, shown: str) -> Any:
    tasks = registered()
    if task not in tasks:
        raise DataError(f"{shown}: reasoning-gym has no task {task!r}.", remedy=nearest(task, tasks))
    data_set, kind = tasks[task]
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in ("seed", "size")}
    values = {}
    for name, text in parameters:
        if name not in fields:
            raise DataError(f"{shown}: {task} has no parameter {name!r}.", remedy=nearest(name, fields))
        try:
            values[name] = read(text, hints[name], default_of(fields[name]))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{shown}: {name} = {text!r}: {error}.", remedy=f"Its default is {default_of(fields[name])!r}."
            ) from None
    random.seed(seed)
    try:
        config = kind(**values, seed=seed, size=size)
        if hasattr(config, "validate"):
            config.validate()
        return data_set(config)
    except (AssertionError, ValueError, TypeError) as error:
        given = ", ".join(f"{name}={text}" for name, text in parameters) or f"size={size}"
        raise DataError(
            f"{shown}: {given}: {task} refuses it: {error or type(error).__name__}.",
            remedy=f"Its parameters: {described(task)}.",
        ) from None


def dataset(name: GymName, *, shown: str = "") -> Any:
    """The task's data set; DataError for a task, a parameter or a value that it does not know."""
    ordered = tuple(sorted(name.parameters.items()))
    return _made(name.task, ordered, name.n_drawn, name.seed, shown or name.canonical)


def read(text: str, kind: Any, default: object) -> object:
    """A parameter's value from its text, by its type; ValueError says what the type wants."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if text == "none":
            return None
        return read(text, next(one for one in inside if one is not type(None)), default)
    if origin is typing.Literal:
        return one_of(text, {str(choice): choice for choice in inside})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return one_of(text, {str(member.value): member for member in kind})
    if origin in (list, tuple, Sequence) or kind in (list, tuple):
        of = inside[0] if inside else str
        if typing.get_origin(of) is not None:
            raise TypeError("a list of lists cannot be given in a name")
        parts = [read(part, of, None) for part in text.split(",")]
        return parts if origin is list else tuple(parts)
    if kind is bool:
        return one_of(text, {"true": True, "false": False})
    if kind in (datetime.date, datetime.time):
        return kind.fromisoformat(text)
    if kind is int:
        return whole_number(text)
    if kind is float:
        return number(text)
    if kind is str:
        return text
    raise TypeError(f"a {getattr(kind, '__name__', kind)} cannot be given in a name; it was {default!r}")


def one_of(text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise ValueError(f"is not one of {', '.join(choices)}")
    return choices[text]


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("is not a whole number") from None


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("is not a finite number")
    return value


def default_of(field: dataclasses.Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def described(task: str) -> str:
    """Its parameters with their defaults, in one line."""
    fields = [field for field in dataclasses.fields(registered()[task][1]) if field.name not in ("seed", "size")]
    return ", ".join(f"{field.name}={shown_value(default_of(field))}" for field in fields)


def shown_value(value: object) -> str:
    """As one would write it in a name, long ones shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return str(value.value)
    text = ",".join(map(shown_value, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def nearest(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    listed = ", ".join(known) if len(known) <= 30 else f"{len(known)} tasks; `dapo data gym` lists them"
    return (f"Did you mean {' or '.join(close)}? " if close else "") + f"There are: {listed}."


def digest(entry: dict[str, Any]) -> str:
    """What tells whether an entry that is made again is the same."""
    return hashlib.sha256(f"{entry['question']}\0{entry['answer']}".encode()).hexdigest()[:16]


def facts(task: str, entry: dict[str, Any]) -> dict[str, object]:
    """What our own scorer of a task needs of its entry."""
    if task not in OWN_SCORER:
        return {}
    metadata = entry["metadata"]
    return {"numbers": list(metadata["numbers"]), "target": int(metadata.get("target", 24))}
