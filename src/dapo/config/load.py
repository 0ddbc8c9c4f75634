"""From TOML files and `--set a.b=value` to one frozen Config; pydantic's errors in our words."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dapo.commands import dapo_command
from dapo.config import renamed
from dapo.config.checks import check_combinations, unused_keys
from dapo.config.machine import gpu_memory_gib
from dapo.config.schema import PRESET_KEYS, Config, EvalSetConfig, RewardPart, SourceConfig
from dapo.config.sources import NAME, TABLES, as_typed, flat_value, in_schema, is_table, refuse_mixing
from dapo.config.toml_text import parse_toml, refuse_newer_run
from dapo.errors import ConfigError

HERE = Path(__file__).parent
PRESETS = HERE / "presets"
RECIPES = HERE / "recipes"

Tree = dict[str, Any]
NOT_IN_VALUES = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A config, where each of its keys came from, and which of the recipe's keys have no effect."""

    name: str
    config: Config
    origin: Mapping[str, str]  # key -> "preset" | "recipe" | "--set", or the key that it follows; else: default
    unused: Mapping[str, str]  # key -> what it would need


def load_recipe(recipe: str, overrides: Iterable[str] = ()) -> Resolved:
    """Resolve `recipe` (a shipped name or a TOML file): its preset, then its own keys, then each `a.b=value`."""
    path = find_recipe(recipe)
    own = read_toml(path)
    changes = [parse_override(text) for text in overrides]
    preset = preset_name(own, changes, path)
    layers = [
        ("preset", flatten(read_preset(preset))),
        ("recipe", flatten(own)),
        ("--set", dict(changes)),
    ]
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for layer, keys in layers:
        flat = flatten(keys)
        refuse_unknown(flat, path.name if layer == "recipe" else layer)
        for key, value in flat.items():
            refuse_old_value(key, value)
        merged = with_changes(merged, keys)
        origin = {key: layer if key in flat else origin[key] for key in merged}
    if needs_correction(merged):
        merged[CORRECTION], origin[CORRECTION] = VLLM_CORRECTION, "rollout.engine"
    return resolve(path.stem, merged, origin)


CORRECTION, VLLM_CORRECTION = "algorithm.correction.cap", 2.0


def needs_correction(keys: Mapping[str, Any]) -> bool:
    """vLLM's kernels are not the trainer's: truncated importance sampling is on unless the key is set.

    Not where the engine's log-probs are π_old: then there is nothing to correct.
    """
    is_bypass = keys.get("algorithm.old_logp") == "bypass"
    return keys.get("rollout.engine") == "vllm" and CORRECTION not in keys and not is_bypass


def resolve(name: str, keys: Mapping[str, Any], origin: Mapping[str, str]) -> Resolved:
    """Validate flat keys into a Config, alone and together."""
    refuse_control_characters(keys)
    try:
        config = Config.model_validate(as_tuples(unflatten(keys)))
    except ValidationError as error:
        raise explain_validation(error) from None
    check_combinations(config)
    return Resolved(name, config, dict(origin), unused_keys(config, dict(origin)))


def refuse_control_characters(keys: Mapping[str, Any]) -> None:
    """Refuse control characters: values reach terminals, file names and the model card."""
    for key, value in keys.items():
        if NOT_IN_VALUES.search(str(value) if isinstance(value, str) else " ".join(texts_in(value))):
            raise ConfigError(f"{key}: contains a line break or a control character.", remedy="Remove it.")


def texts_in(value: Any) -> list[str]:
    """All strings of a list or a table, its keys too."""
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in texts_in(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in texts_in(part)]
    return [value] if isinstance(value, str) else []


def read_preset(name: str) -> Tree:
    """An algorithm preset by name; it may set algorithm keys only."""
    if name not in preset_names():  # a name, never a path that leads elsewhere
        raise ConfigError(f"preset = {name!r}: no such preset.", remedy=suggest(name, preset_names()))
    path = PRESETS / f"{name}.toml"
    tree = read_toml(path)
    for key in flatten(tree):
        if not key.startswith(PRESET_KEYS):
            raise ConfigError(f"{path.name}: {key} is not an algorithm key.", remedy="Put it into a recipe.")
    return tree


def find_recipe(recipe: str) -> Path:
    """The file of a recipe given by shipped name or by path."""
    path = Path(recipe)
    if is_run(recipe):
        raise ConfigError(
            f"{recipe}: is a run folder, not a recipe.",
            remedy=f"Resume the run: {dapo_command('resume', recipe)}\n"
            f"Its recipe, for a new run: {dapo_command('train', path / 'config.toml')}",
        )
    if path.suffix == ".toml" or "/" in recipe:
        if os.path.isdir(path):
            raise ConfigError(f"{recipe}: is a folder, not a recipe.", remedy="Name a TOML file.")
        if not os.path.isfile(path):
            raise ConfigError(f"{recipe}: no such file.", remedy=suggest(path.stem, recipe_names()))
        return path
    shipped = RECIPES / f"{recipe}.toml"
    if os.path.isfile(shipped):
        return shipped
    if recipe in preset_names():
        raise ConfigError(
            f"{recipe}: is a preset (an algorithm), not a recipe (model, data and sizes).",
            remedy=f"For this machine: {dapo_command('explain', nearest_recipe(), '--set', f'preset={recipe}')}",
        )
    raise ConfigError(f"{recipe}: no such recipe.", remedy=suggest(recipe, recipe_names()))


def is_run(name: str) -> bool:
    """Whether it is a run folder; a shipped recipe or preset of that name comes first.

    Asked of os.path, for which a folder that one may not enter, or a name too long for a file, is just not there.
    """
    return os.path.isfile(Path(name) / "config.toml") and name not in (*recipe_names(), *preset_names())


def load_recipe_or_run(name: str, overrides: Iterable[str]) -> Resolved:
    """A recipe; of a run's folder the config it runs by, under the folder's name."""
    if not is_run(name):
        return load_recipe(name, overrides)
    folder = Path(name)
    return replace(load_recipe(str(folder / "config.toml"), overrides), name=folder.resolve().name)


def nearest_recipe() -> str:
    """The shipped recipe that fits this machine's largest GPU; without one, the quickstart."""
    largest = max(gpu_memory_gib(), default=0.0)
    fitting = [
        name for name, needed in RECIPE_CARD_GB.items() if needed <= largest * 1.1
    ]  # a "24 GB" card shows 22–24 GiB
    return fitting[-1] if fitting else "quickstart"


# The card each single-GPU recipe is made for, ascending; the recipe's name says it.
RECIPE_CARD_GB = {"gsm8k-0.5b-lora-8gb": 8, "gsm8k-1.5b-24gb": 24, "math-1.5b-80gb": 80}


def preset_name(own: Tree, changes: list[tuple[str, Any]], path: Path) -> str:
    """The preset a recipe starts from; `--set preset=…` wins."""
    chosen = dict(changes).get("preset", own.get("preset", "dapo"))
    if not isinstance(chosen, str):
        raise ConfigError(f"preset = {chosen!r} in {path.name}: must be a name.", remedy=suggest("", preset_names()))
    return chosen


def read_toml(path: Path) -> Tree:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a byte order mark first
        refuse_newer_run(path, text)
        return parse_toml(text)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except ValueError as error:
        raise not_toml(str(path), text, error) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None


def not_toml(where: str, text: str, error: ValueError) -> ConfigError:
    """What is wrong with a text that is no TOML. The parser has several words for a name that is there twice."""
    place = re.search(r"line (\d+)", str(error))
    if place and re.match("Cannot (overwrite|declare|mutate)|Duplicate", str(error)):
        line = text.splitlines()[int(place[1]) - 1].strip()
        return ConfigError(
            f"{where}: {line[:80]!r} names what is there already ({error}).",
            remedy="Remove one of the two, or rename it: two sources need two names.",
        )
    return ConfigError(f"{where}: not valid TOML: {error}.", remedy="Fix the line; strings need quotes.")


def parse_override(text: str) -> tuple[str, Any]:
    """`a.b=value` -> ("a.b", value). The value is parsed as TOML; if that fails, it is a plain string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: no key and value.", remedy="Write --set section.key=value.")
    try:
        parsed = parse_toml(f"value = {value}")
    except ValueError as error:
        if value.strip().startswith("{"):
            raise not_toml(f"--set {key.strip()}", value, error) from None
        return key.strip(), value.strip()
    if len(parsed) > 1:
        raise ConfigError(f"--set {key.strip()}: contains several lines.", remedy="Write one --set for each key.")
    return key.strip(), parsed["value"]


def to_toml(config: Config) -> str:
    """The whole config as TOML; reading it back gives an equal config."""
    return tomli_w.dumps(_none_as_word(config.model_dump(mode="json")))


def _none_as_word(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _none_as_word(inner) for key, inner in value.items()}
    return "none" if value is None else value


# ------------------------------------------------------------------ keys


NAMED_TABLES = ("data.fields", "rewards.parts")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}. A table of the user's own names is a value, data.train perhaps one of sources."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in NAMED_TABLES and not is_table(key):
            flat |= flatten(value, f"{key}.")
        else:
            flat |= flat_value(key, value)
    return flat


def with_changes(keys: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys with what is typed on top: `data.train` replaces all its sources, a key of a source changes that."""
    result = dict(keys)
    for key, value in changes.items():
        if key in TABLES:
            result = {other: kept for other, kept in result.items() if not f"{other}.".startswith(f"{key}.")}
        refuse_mixing(result, key)
        result |= flatten({key: value})
    return result


def unflatten(flat: Mapping[str, Any]) -> Tree:
    tree: Tree = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return tree


def as_tuples(value: Any) -> Any:
    """TOML arrays are lists; the schema's sequences are tuples."""
    if isinstance(value, dict):
        return {key: as_tuples(inner) for key, inner in value.items()}
    return tuple(as_tuples(inner) for inner in value) if isinstance(value, list) else value


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


def suggest(name: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return (f"Did you mean {close[0]}? " if close else "") + f"There are: {', '.join(choices)}."


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


# ------------------------------------------------------------------ pydantic's errors in our words


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


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): '"none"'}


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
