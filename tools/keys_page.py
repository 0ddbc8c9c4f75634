"""Writes docs/keys.md: every key of a recipe, from the schema.   python tools/keys_page.py > docs/keys.md"""

import re
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dapo.config.schema import PRESET_KEYS, Config, EvalSetConfig, SourceConfig

HEAD = """# Keys of a recipe

A recipe is a TOML file with these sections; on the command line use `--set section.key=value`. Presets may set keys
marked †. A dash instead of a default: the key must be set (a preset sets most of them). `none` unsets an optional key.
The keys of a recipe: `dapo explain RECIPE`. This page is made from `src/dapo/config/schema.py`.
"""


def page() -> str:
    return "\n".join([HEAD, *section_lines(Config, "")])


def section_lines(section: type[BaseModel], prefix: str) -> list[str]:
    """A heading, the section's sentence and a table; sections inside it follow."""
    own, inner = [], []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            inner += section_lines(kind, f"{prefix}{name}.")
        else:
            own.append(row(f"{prefix}{name}", field))
    if prefix == "data.":
        inner += [*section_lines(SourceConfig, "data.train.NAME."), *section_lines(EvalSetConfig, "data.eval.NAME.")]
    title = f"## `{prefix.rstrip('.')}`" if prefix else "## The recipe itself"
    table = ["| key | default | meaning |", "|---|---|---|", *own, ""] if own else []
    return [title, "", (section.__doc__ or "").strip(), "", *table, *inner]


def row(key: str, field: FieldInfo) -> str:
    mark = " †" if key.startswith(PRESET_KEYS) else ""
    meaning = (field.description or "").replace("|", "\\|")
    return f"| `{key}`{mark} | {default(field)} | {meaning}{choices(field)} |"


def default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "–"
    value: Any = field.default
    if value is None:
        return "`none`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | dict):
        return f"`{list(value) if isinstance(value, tuple) else value}`"
    return f"`{value}`"


def choices(field: FieldInfo) -> str:
    """The values a key may have, unless its default and its description name them all."""
    kinds = [field.annotation, *get_args(field.annotation)]
    words = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    named = {str(field.default), *re.findall(r"[\w-]+", field.description or "")}
    return f" One of {', '.join(f'`{word}`' for word in words)}." if set(words) - named else ""


if __name__ == "__main__":
    print(page(), end="")
