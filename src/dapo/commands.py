"""Commands that a message suggests: as they can be pasted into a shell, whatever the names of the files are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping


def dapo_command(*words: object) -> str:
    """`dapo` with these words, each quoted where a shell would read it otherwise. FILE and DIR are the reader's."""
    return shlex.join(["dapo", *map(str, words)])


def set_options(keys: Mapping[str, object]) -> list[str]:
    """These keys as words for `dapo_command`."""
    return [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def name_run(text: str, folder: object) -> str:
    """A message that speaks of RUN, with the run it is about."""
    return re.sub(r"\bRUN\b", lambda _: shlex.quote(str(folder)), text)
