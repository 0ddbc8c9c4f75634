"""From TOML files and `--set a.b=value` to one frozen Config."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from dapo.commands import dapo_command
from dapo.config.checks import check_combinations, unused_keys
from dapo.config.keys import NAMED_TABLES, explain_validation, refuse_old_value, refuse_unknown
from dapo.config.machine import gpu_memory_gib
from dapo.config.own_verifier import with_own_verifier
from dapo.config.schema import PRESET_KEYS, Config
from dapo.config.sources import TABLES, flat_value, is_table, refuse_mixing
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
        config = Config.model_validate(as_tuples(unflatten(with_own_verifier(keys))))
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


def suggest(name: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return (f"Did you mean {close[0]}? " if close else "") + f"There are: {', '.join(choices)}."


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))
