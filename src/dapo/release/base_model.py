"""The base model of a run: its name and licence, read from its own files; nothing is downloaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dapo.config.hub import is_hub_name, model_file
from dapo.config.model_shapes import BUNDLED

NAME = re.compile(r"[A-Za-z0-9][\w.+/-]{0,199}")
CARD_CHARS = 1 << 16  # of a card that are read; the front matter is at its start


@dataclass(frozen=True, slots=True)
class BaseModel:
    """`hub_name` is of the base itself, or of the model its card names as its base. Empty: not known."""

    path: str
    in_words: str
    hub_name: str = ""
    licence: str = ""
    licence_from: str = ""
    has_own_terms: bool = False  # none of the hub's list of licences: `license: other` with a name
    has_card: bool = False

    @property
    def licence_in_words(self) -> str:
        if self.licence:
            return f"{self.licence} ({self.licence_from})"
        why = "its card names none" if self.has_card else "no card of it was found on the machine that exported"
        return f"unknown: {why}; look it up before you publish"


def base_model_of(path: str, revision: str | None) -> BaseModel:
    """The model that `model.path` names, with the licence from the card in its folder or in the hub's cache."""
    if path == BUNDLED:
        return BaseModel(path, "the toy model that ships with dapo", "", "apache-2.0", "dapo's own licence")
    file = model_file(path, "README.md", revision=revision)
    card = front_matter_of(file)
    own_terms, licence = only_text(card.get("license_name")), only_text(card.get("license"))
    licence = own_terms or ("" if licence in ("unknown", "other") else licence)
    if is_hub_name(path):
        in_words, hub_name = f"`{path}`{f' at `{revision}`' if revision else ''} of the hub", path
    else:
        hub_name = only_text(card.get("base_model"))
        made_from = f", made from `{hub_name}`" if hub_name else "; what it was made from is unknown"
        in_words = f"the local folder `{Path(path).name}`{made_from}"
    return BaseModel(path, in_words, hub_name, licence, "as its own card says", bool(own_terms), file is not None)


def front_matter_of(card: Path | None) -> dict[str, Any]:
    """The YAML at the head of a model card; empty where there is none that can be read."""
    if card is None:
        return {}
    try:
        with card.open(encoding="utf-8") as file:
            text = file.read(CARD_CHARS)
        if not text.startswith("---\n"):
            return {}
        found = yaml.safe_load(text[4:].partition("\n---")[0])
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def only_text(value: object) -> str:
    """The first of one or several names; what is no name may not get into a card of ours."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) and NAME.fullmatch(first) else ""
