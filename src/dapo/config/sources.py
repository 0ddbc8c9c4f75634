"""The problem sets that a config names, one by one, each with the settings that hold for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dapo.config.own_verifier import own_verifier
from dapo.config.schema import Config, EvalSetConfig, SourceConfig
from dapo.errors import ConfigError

TABLES = ("data.train", "data.eval")  # a plain value, or sources by name
NAME = "NAME"  # stands for a source's name in the keys of the schema
SOURCE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
OF_A_SOURCE = re.compile(rf"({'|'.join(map(re.escape, TABLES))})\.([^.]*)(\..*)?")


@dataclass(frozen=True, slots=True)
class Source:
    """A problem set with what holds for it: its own settings, else those of the config."""

    key: str  # what messages call it: data.train, data.eval, data.train.NAME
    name: str  # in a table; the path where there is none
    path: str
    template: str
    chat_template: bool
    system_prompt: str
    verifier: str
    environment: str = ""
    weight: float = 1.0


def environment_key(source: Source, config: Config) -> str:
    """The key that says a source's environment."""
    is_shared = source.environment == (config.data.environment or "")
    return "data.environment" if is_shared else f"{source.key}.environment"


def is_mixture(config: Config) -> bool:
    """Whether data.train is a table; its problems then carry the names of their sources."""
    return isinstance(config.data.train, dict)


def train_sources(config: Config) -> list[Source]:
    """The sources of data.train in the order of the table; a string is one source."""
    train = config.data.train
    if isinstance(train, str):
        return [source_of(config, "data.train", train, EvalSetConfig(path=train))]
    return [source_of(config, f"data.train.{name}", name, with_verifier(name, own)) for name, own in train.items()]


def eval_sources(config: Config) -> list[Source]:
    sets = config.data.eval
    if isinstance(sets, dict):
        return [source_of(config, f"data.eval.{name}", name, with_verifier(name, own)) for name, own in sets.items()]
    return [source_of(config, "data.eval", path, EvalSetConfig(path=path)) for path in sets]


def with_verifier(name: str, own: EvalSetConfig) -> EvalSetConfig:
    """A source of a table that brings its verifier, as a task of reasoning-gym does, has it unless it names another."""
    return own.model_copy(update={"verifier": own.verifier or own_verifier(own.path or name)})


def source_of(config: Config, key: str, name: str, own: EvalSetConfig) -> Source:
    return Source(
        key=key,
        name=name,
        path=own.path or name,
        template=own.template or config.data.template,
        chat_template=config.data.chat_template,
        system_prompt=own.system_prompt or "",
        verifier=own.verifier or config.rewards.verifier,
        environment=own.environment or config.data.environment or "",
        weight=own.weight if isinstance(own, SourceConfig) else 1.0,
    )


def shares(sources: list[Source]) -> dict[str, float]:
    """Of the prompts submitted, by source."""
    total = sum(source.weight for source in sources)
    return {source.name: source.weight / total for source in sources}


def train_in_words(config: Config) -> str:
    """data.train for a reader: the string, or each source with its share."""
    sources = train_sources(config)
    if not is_mixture(config):
        return sources[0].path
    return ", ".join(f"{name} {share:.0%}" for name, share in shares(sources).items())


# ------------------------------------------------------------------ keys of a table


def in_schema(key: str) -> str:
    """`data.train.gsm8k.weight` as the schema has it: data.train.NAME.weight. Every other key as it is."""
    found = OF_A_SOURCE.fullmatch(key)
    return f"{found[1]}.{NAME}{found[3] or ''}" if found else key


def as_typed(text: str, key: str) -> str:
    """A text about the schema's keys with the source's own name, which `key` has."""
    found = OF_A_SOURCE.fullmatch(key)
    return text.replace(f".{NAME}", f".{found[2]}") if found else text


def is_table(key: str) -> bool:
    """Whether a table under this key is one of sources, or one source."""
    found = OF_A_SOURCE.fullmatch(key)
    return key in TABLES or bool(found and not found[3])


def flat_value(key: str, value: Any) -> dict[str, Any]:
    """A key with its value as flat keys: of a table of sources, or of one source, those of the schema."""
    if key in TABLES and isinstance(value, Mapping):
        flat = {inner: x for name, own in value.items() for inner, x in flat_source(key, name, own).items()}
        return flat or {key: {}}
    if not (found := OF_A_SOURCE.fullmatch(key)):
        return {key: value}
    table, name, field = found.groups()
    return flat_source(table, name, {field[1:]: value} if field else value)


def flat_source(table: str, name: str, own: Any) -> dict[str, Any]:
    """One without keys of its own is told by its path, which is its name."""
    if not SOURCE_NAME.fullmatch(name):
        raise ConfigError(
            f"{table}.{name!r}: a source's name has letters, digits, - and _ only, at most 64.",
            remedy=f'Name it in short, and name the file or set by path: NAME = {{path = "{name}"}}.',
        )
    if not isinstance(own, Mapping):
        raise ConfigError(
            f"{table}.{name} = {own!r}: a source is a table.",
            remedy=f'Write {name} = {{path = "…", weight = 1.0}}, or {name} = {{}} where the name says it all.',
        )
    return {f"{table}.{name}.{field}": value for field, value in (own or {"path": name}).items()}


def refuse_mixing(keys: Mapping[str, Any], key: str) -> None:
    """ConfigError where a source is to be set in what is no table."""
    found = OF_A_SOURCE.fullmatch(key)
    if found and found[1] in keys:
        raise ConfigError(
            f"{key}: {found[1]} = {keys[found[1]]!r} is no table of sources.",
            remedy=f"Name them all: {found[1]}={{A={{}}, B={{weight=2}}}}.",
        )
