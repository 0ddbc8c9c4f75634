"""Emergent behaviour: phrases by which a response checks, doubts or restarts itself, and revised values."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dapo.config.toml_text import parse_toml
from dapo.errors import ConfigError

SHIPPED = Path(__file__).with_name("phrases.toml")
BY_PHRASE = ("check", "doubt", "restart")
KINDS = (*BY_PHRASE, "revised")
MEANINGS = {
    "check": "says that it checks its work",
    "doubt": "doubts what it has written",
    "restart": "starts over or tries another way",
    "revised": "states a value again and changes it",
}

# `12*7 = 84` and later `12*7 = 86`; `x = 3` and later `x = 4`; `Answer: 7` and later `Answer: 5`.
EQUATION = re.compile(r"([\w+\-*/^().]{1,40})\s{0,2}=\s{0,2}(-?\d[\d,.]{0,30})(?![\d+\-*/^(])")
ANSWER = re.compile(r"answer(?: is)?\s{0,2}[:=]?\s{0,2}\$?(-?\d[\d,.]{0,30})", re.IGNORECASE)
LABELS = re.compile(r"the final answer is|final answer|answer is|answer|\\boxed", re.IGNORECASE)
ANSWER_ONLY_CHARACTERS = 2


@dataclass(frozen=True, slots=True)
class Phrases:
    """The phrases of each kind, each with a word whose absence rules the phrase out cheaply."""

    phrases: dict[str, list[tuple[str, re.Pattern[str]]]]
    name: str  # of the list they came from

    def of(self, text: str) -> list[str]:
        """Which kinds this response shows."""
        lower = text.lower()
        found = [
            kind
            for kind, phrases in self.phrases.items()
            if any(word in lower and pattern.search(text) for word, pattern in phrases)
        ]
        return [*found, "revised"] if is_revised(text) else found


def load_phrases(path: Path = SHIPPED) -> Phrases:
    try:
        raw = path.read_bytes()
        languages = parse_toml(raw.decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--phrases {path}: no such file.", remedy=f"Copy {SHIPPED} and edit it.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.", remedy=f"Copy {SHIPPED} and edit it.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.", remedy=f"Copy {SHIPPED} and edit it.") from None
    wanted: dict[str, list[str]] = {kind: [] for kind in BY_PHRASE}
    for language, kinds in languages.items():
        for kind, phrases in kinds.items() if isinstance(kinds, dict) else [("", [])]:
            if kind not in wanted or not isinstance(phrases, list):
                raise ConfigError(
                    f"{path}: {language}.{kind}: no such kind of behaviour.",
                    remedy=f"Use lists named {', '.join(BY_PHRASE)}.",
                )
            wanted[kind] += [str(phrase) for phrase in phrases]
    compiled = {kind: [(key_word(phrase), pattern(phrase)) for phrase in phrases] for kind, phrases in wanted.items()}
    return Phrases(compiled, hashlib.sha256(raw).hexdigest()[:12])


def key_word(phrase: str) -> str:
    """The longest word, in lower case: a cheap test that most responses fail."""
    return max(phrase.lower().split(), key=len, default="")


def pattern(phrase: str) -> re.Pattern[str]:
    return re.compile(bounded(phrase), re.IGNORECASE)


def bounded(phrase: str) -> str:
    """Letters at the ends of a phrase must end a word there; Chinese has no mark for that."""
    left = r"(?<![A-Za-zÀ-ÿ])" if re.match(r"[A-Za-zÀ-ÿ]", phrase) else ""
    right = r"(?![a-zà-ÿ])" if re.search(r"[A-Za-zÀ-ÿ]$", phrase) else ""
    body = r"\s+".join(re.escape(word) for word in phrase.split())
    return f"{left}{body}{f'(?-i:{right})' if right else ''}"


def is_revised(text: str) -> bool:
    """Does the same expression, or the answer, get one value and later another?"""
    stated: dict[str, str] = {}
    for match in EQUATION.finditer(text):
        name, value = match.group(1), plain(match.group(2))
        if any(c.isalnum() for c in name) and stated.setdefault(name, value) != value:
            return True
    return len({plain(value) for value in ANSWER.findall(text)}) > 1


def plain(number: str) -> str:
    return number.replace(",", "").rstrip(".")


def is_answer_only(text: str, extracted: str | None) -> bool:
    """Nothing but the answer and its label: no reasoning."""
    if extracted is None:
        return False
    rest = LABELS.sub(" ", text)
    if extracted:
        rest = rest.replace(extracted, " ")
    working = (character for character in rest if character.isalnum())
    return len(list(islice(working, ANSWER_ONLY_CHARACTERS + 1))) <= ANSWER_ONLY_CHARACTERS
