"""What another framework's config says, by key and line, and what became of it: carried over, lost, or different."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from dapo.errors import ConfigError

_SECRET = re.compile(r"api_?key|token$|secret|password|^use_wandb$|wandb\.key$", re.IGNORECASE)
_UNSET = {"", "null", "None", "~"}
_LONGEST_SHOWN = 60
LARGEST = 1e15  # whole numbers stay whole up to here


@dataclass(frozen=True, slots=True)
class Setting:
    """One key as it is spelled there, its value (text from a script, typed from YAML or Python), and its line."""

    key: str
    value: Any
    line: int

    def __str__(self) -> str:
        return f"{self.key} = {shown(self.key, self.value)} (line {self.line})"


@dataclass(frozen=True, slots=True)
class Value:
    """A value with where it comes from: a setting, or the other framework's default."""

    value: Any
    origin: str
    is_given: bool


class Weight(IntEnum):
    """How much an experiment changes where a setting is not carried over."""

    TASK = 0  # what the model is asked, or rewarded for
    TRAINING = 1  # how it is trained; or not known, which may be anything
    MINOR = 2  # nothing that is learned: names, logs, memory, speed


@dataclass(frozen=True, slots=True)
class Remark:
    """What a reader must know about one setting."""

    setting: str
    why: str
    weight: Weight = Weight.TRAINING


def shown(key: str, value: object) -> str:
    """A value on one line, shortened where it is long; a secret is not repeated."""
    if _SECRET.search(key):
        return "…"
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


class Settings:
    """Another framework's settings. Reading one ticks it off; those that were never read are listed at the end."""

    def __init__(self, file: str, peer: str, settings: Iterable[Setting]) -> None:
        self.file, self.peer = file, peer
        self.by_key = {setting.key: setting for setting in settings}  # the last one wins, as with the peers
        self.asked: set[str] = set()

    def find(self, *keys: str) -> Setting | None:
        """The first of these spellings that is set to something."""
        self.asked.update(keys)
        found = (self.by_key[key] for key in keys if key in self.by_key)
        return next((setting for setting in found if not is_unset(setting.value)), None)

    def rest(self) -> Iterator[Setting]:
        return (setting for key, setting in self.by_key.items() if key not in self.asked)

    def integer(self, *keys: str, default: int | None = None) -> Value:
        return self._value(keys, default, self._integer)

    def count(self, *keys: str, default: int | None = None) -> Value:
        """A whole number of things of which there must be one at least."""
        return self._value(keys, default, self._count)

    def real(self, *keys: str, default: float | None = None) -> Value:
        return self._value(keys, default, self._real)

    def flag(self, *keys: str, default: bool | None = None) -> Value:
        return self._value(keys, default, self._flag)

    def text(self, *keys: str, default: str | None = None) -> Value:
        return self._value(keys, default, lambda setting: unquoted(str(setting.value)))

    def choice(self, *keys: str, known: Collection[str], what: str, default: str) -> Value:
        """One of the words we can translate; another one is refused, not replaced."""
        found = self.text(*keys, default=default)
        setting = self.find(*keys)
        if setting is not None and found.value not in known:
            raise self.refuse(setting, f"no such {what} here.", f"There are {', '.join(known)}.")
        return found

    def texts(self, *keys: str) -> Value:
        return self._value(keys, [], lambda setting: as_list(setting.value))

    def reals(self, *keys: str, count: int | None = None) -> Value:
        """A list of numbers, of `count` where that is fixed."""

        def convert(setting: Setting) -> list[float]:
            words = [word for listed in as_list(setting.value) for word in str(listed).split(",")]
            if count is not None and len(words) != count:
                raise self.refuse(setting, f"must be {count} numbers.", "Fix the line.")
            return [self._real(Setting(setting.key, word, setting.line)) for word in words]

        return self._value(keys, None, convert)

    def refuse(self, setting: Setting, why: str, remedy: str) -> ConfigError:
        value = shown(setting.key, setting.value)
        return ConfigError(f"{self.file}, line {setting.line}: {setting.key} = {value}: {why}", remedy=remedy)

    def _value(self, keys: tuple[str, ...], default: Any, convert: Any) -> Value:
        setting = self.find(*keys)
        if setting is None:
            return Value(default, f"{keys[0]} ({self.peer}'s default)", is_given=False)
        return Value(convert(setting), str(setting), is_given=True)

    def _integer(self, setting: Setting) -> int:
        number = self._real(setting)
        if number != int(number):
            raise self.refuse(setting, "must be a whole number.", "Fix the line.")
        return int(number)

    def _count(self, setting: Setting) -> int:
        number = self._integer(setting)
        if number < 1:
            raise self.refuse(setting, "must be at least 1.", "Fix the line.")
        return number

    def real_of(self, setting: Setting, part: str) -> float:
        """The number in a part of a setting's value."""
        return self._real(Setting(setting.key, part, setting.line))

    def _real(self, setting: Setting) -> float:
        value = setting.value
        is_typed = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            number = float(value if is_typed else unquoted(str(value)))
        except (ValueError, OverflowError):  # Python's whole numbers go beyond any float
            raise self._unread(setting, "a number") from None
        if math.isnan(number):
            raise self._unread(setting, "a number")
        if abs(number) > LARGEST:
            raise self.refuse(setting, f"must be a number up to {LARGEST:g}.", "Fix the line.")
        return number

    def _flag(self, setting: Setting) -> bool:
        if isinstance(setting.value, bool):
            return setting.value
        word = unquoted(str(setting.value)).lower()
        if word in ("true", "1", "yes", "on"):
            return True
        if word in ("false", "0", "no", "off"):
            return False
        raise self._unread(setting, "true or false")

    def _unread(self, setting: Setting, wanted: str) -> ConfigError:
        unset = re.search(r"\$\{?(\w+)|\$\(|`", str(setting.value))
        if unset is None:
            return self.refuse(setting, f"must be {wanted}.", "Fix the line.")
        if unset[1] is None:
            return self.refuse(setting, "is computed by a command, and nothing is run here.", "Write the value in.")
        return self.refuse(
            setting,
            f"{unset[1]} is set nowhere in the file, and the environment is not looked at.",
            f"Write {unset[1]}=VALUE above it, or the value itself.",
        )


def is_unset(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.strip() in _UNSET)


def unquoted(text: str) -> str:
    """Hydra takes quotes inside a shell word: key='"a b"'."""
    text = text.strip()
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def as_list(value: object) -> list[str]:
    """['a', 'b'], "['a','b']", "a b" or "a" as a list of words."""
    if isinstance(value, list | tuple):
        return [str(inner) for inner in value]
    text = unquoted(str(value)).strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1].replace(",", " ")
    return [unquoted(word) for word in text.split()]


@dataclass
class Translation:
    """The recipe so far: our keys with their origin, and what could not be carried over as it was."""

    peer: str
    keys: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    missing: list[Remark] = field(default_factory=list)  # not carried over
    differs: list[Remark] = field(default_factory=list)  # carried over, but it does not mean quite the same

    def put(self, key: str, value: Any, origin: str) -> None:
        self.keys[key], self.origin[key] = value, origin

    def take(self, key: str, found: Value, value: Any = None) -> None:
        """Our key from the other framework's value (or from what was made of it), where there is one."""
        if found.value is not None:
            self.put(key, found.value if value is None else value, found.origin)

    def take_given(self, key: str, found: Value, value: Any = None) -> None:
        """As `take`, but the other framework's default stays out: ours is as good."""
        if found.is_given:
            self.take(key, found, value)

    @property
    def responses_per_step(self) -> int:
        return int(self.keys["sampling.prompts_per_step"] * self.keys["sampling.responses_per_prompt"])

    def has_none(self, setting: object, why: str, weight: Weight = Weight.TRAINING) -> None:
        self.missing.append(Remark(str(setting), why, weight))

    def means_other(self, setting: object, why: str) -> None:
        self.differs.append(Remark(str(setting), why))

    def lists(self) -> list[tuple[str, list[Remark]]]:
        """What is said of the translation under its headings, what changes the experiment most first."""
        ranked = sorted(self.missing, key=lambda remark: remark.weight)
        changing = [remark for remark in ranked if remark.weight < Weight.MINOR]
        all_lists = [
            ("Not carried over, and it changes the experiment", changing),
            ("Means something else here", self.differs),
            ("Not carried over, without effect on what is learned", ranked[len(changing) :]),
        ]
        return [(title, remarks) for title, remarks in all_lists if remarks]
