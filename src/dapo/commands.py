"""Text for a terminal, whatever the names of the files are: commands that can be pasted, and nothing it acts on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

# What a terminal would act on, hide or cannot write; bidirectional marks too.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")


def visible(text: str) -> str:
    """A text of somebody's as a terminal may be given it: what it would act on or hide is named instead."""
    return CONTROL.sub(lambda match: f"⟨U+{ord(match.group()):04X}⟩", text)


def dapo_command(*words: object) -> str:
    """`dapo` with these words, each quoted where a shell would read it otherwise. FILE and DIR are the reader's."""
    return shlex.join(["dapo", *map(str, words)])


def set_options(keys: Mapping[str, object]) -> list[str]:
    """These keys as words for `dapo_command`."""
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def name_run(text: str, folder: object) -> str:
    """A message that speaks of RUN, with the run it is about."""
    return re.sub(r"\bRUN\b", lambda _: shlex.quote(str(folder)), text)
