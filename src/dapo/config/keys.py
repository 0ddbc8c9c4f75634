"""The schema's keys: which there are, and what is said of one that is unknown or has a value that it cannot have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dapo.config import renamed
from dapo.config.schema import Config, EvalSetConfig, RewardPart, SourceConfig
from dapo.config.sources import NAME, TABLES, as_typed, in_schema
from dapo.errors import ConfigError

NAMED_TABLES = ("data.fields", "rewards.parts")
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): '"none"'}


@cache
def known_keys() -> dict[str, FieldInfo]:
    """Every key of the schema -> its field. Those of a table's sources are under the name NAME."""
    of_sources = (*_fields(SourceConfig, f"data.train.{NAME}."), *_fields(EvalSetConfig, f"data.eval.{NAME}."))
    return dict((*_fields(Config, ""), *of_sources))


def _fields(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def refuse_old_value(key: str, value: Any) -> None:
    for (name, old), now in renamed.VALUES.items():
        if (name, old) == (key, value):
            raise ConfigError(f"{key} = {value}: has another name now.", remedy=f"Use {key} = {now}.")


def refuse_unknown(keys: Iterable[str], where: str) -> None:
    sections = {key.rsplit(".", depth)[0] for key in known_keys() for depth in (1, 2) if "." in key}
    for key in keys:
        if in_schema(key) in known_keys():
            continue
        if key in sections:
            raise ConfigError(f"{key}: is a section, not a value.", remedy=f"Set one of its keys: {_keys_of(key)}.")
        if table := next((name for name in NAMED_TABLES if key.startswith(f"{name}.")), None):
            raise ConfigError(f"{key}: {table} is set as a whole.", remedy=f"Write --set '{table}={{NAME = ...}}'.")
        place = "" if where == "--set" else f" (in {where})"
        if instead := renamed.KEYS.get(key) or renamed.REPLACED.get(key):
            raise ConfigError(f"{key}: has another name now{place}.", remedy=f"Use {instead}.")
        raise ConfigError(f"{key}: no such key{place}. {did_you_mean(key)}".rstrip(), remedy=_keys_hint(key))


def _keys_of(section: str) -> str:
    return ", ".join(key for key in known_keys() if key.startswith(f"{section}."))


def _keys_hint(key: str) -> str:
    section = in_schema(key).rpartition(".")[0]
    known = as_typed(_keys_of(section), key)
    return f"Keys of [{as_typed(section, key)}]: {known}." if known else "`dapo explain quickstart` lists all."


def did_you_mean(key: str) -> str:
    close = difflib.get_close_matches(in_schema(key), known_keys(), n=1, cutoff=0.6)
    if not close:  # right name, wrong section
        same_name = (known for known in known_keys() if known.rpartition(".")[2] == key.rpartition(".")[2])
        close = sorted(same_name, key=len)[:1]
    return as_typed(f"Did you mean {close[0]}?", key) if close else ""


def explain_validation(error: ValidationError) -> ConfigError:
    """The first error: key, value, reason, and the field's description."""
    first = error.errors(include_url=False)[0]
    parts = [str(part) for part in first["loc"]]
    if ".".join(parts[:2]) in TABLES:
        del parts[2:3]  # plain, or a table
    key = ".".join(parts)
    if key.startswith("rewards.parts."):
        return explain_part(key, first)
    while in_schema(key) not in known_keys() and "." in key:  # positions inside a tuple, branches of an optional
        key = key.rpartition(".")[0]
    field = known_keys().get(in_schema(key))
    remedy = field.description or "" if field is not None else ""
    if first["type"] == "missing":
        return ConfigError(f"{key}: missing.", remedy=remedy or f"Set one of: {_keys_of(key)}.")
    value = first["input"]
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else value
    return ConfigError(f"{key} = {shown}: {_why(first, field)}", remedy=remedy)


def explain_part(key: str, first: Mapping[str, Any]) -> ConfigError:
    """An error within one part of the reward; a name may hold dots."""
    known = ", ".join(RewardPart.model_fields)
    part, _, own = key.rpartition(".")
    field = RewardPart.model_fields.get(own)
    if first["type"] == "extra_forbidden":
        return ConfigError(f"{key}: no such key.", remedy=f"Keys of {part}: {known}.")
    if field is None:
        return ConfigError(
            f"{key} = {first['input']!r}: must be a table with {known}.",
            remedy=f'Write {key.partition(".parts.")[2]} = {{ function = "pkg.mod:function", weight = 0.2 }} in '
            "[rewards.parts].",
        )
    if first["type"] == "missing":
        return ConfigError(f"{key}: missing.", remedy=field.description or "")
    return ConfigError(f"{key} = {first['input']}: {_why(first, field)}", remedy=field.description or "")


def _why(first: Mapping[str, Any], field: FieldInfo | None) -> str:
    context = first.get("ctx", {})
    match first["type"]:
        case "greater_than_equal":
            return f"must be at least {context['ge']}."
        case "greater_than":
            return f"must be greater than {context['gt']}."
        case "less_than_equal":
            return f"must be at most {context['le']}."
        case "less_than":
            return f"must be less than {context['lt']}."
        case "literal_error":
            return f"must be one of {context['expected']}."
        case "finite_number":
            return "must be a finite number."
        case "too_short":
            return "is empty."
        case _ if field is not None:
            return f"must be {_type_in_words(field.annotation)}."
        case _:
            return f"{first['msg']}."


def _type_in_words(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_in_words(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return " or ".join(_type_in_words(inner) for inner in get_args(annotation))
    if origin is tuple:
        return f"a list of {WORDS.get(get_args(annotation)[0], 'values')}s".replace("a number", "number").replace(
            "a string", "string"
        )
    if origin is dict:
        return "a table of names"
    return WORDS.get(annotation, str(annotation))
