"""TOML from untrusted files: everything that cannot be parsed is one kind of error."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from dapo.errors import refuse_newer

RUN_FORMAT = 1  # of config.toml, and of the JSON lines that a run writes beside it
FORMAT_LINE = re.compile(r"# dapo run, format (\d{1,9})\b")
MOST_LEVELS = 50  # of tables and lists within each other; a config has four


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text, or ValueError with the reason."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError(f"nested more than {MOST_LEVELS} levels deep") from None
    except ValueError:  # Python refuses integers of more than a few thousand digits
        raise ValueError("a number has thousands of digits") from None
    if is_deeper(tree, MOST_LEVELS):  # tomllib does not limit the nesting of dotted keys
        raise ValueError(f"nested more than {MOST_LEVELS} levels deep")
    return tree


def with_run_format(text: str) -> str:
    """The config that a run writes: its first line versions it, and the files of lines beside it."""
    return f"# dapo run, format {RUN_FORMAT}: config.toml and the .jsonl files beside it\n{text}"


def refuse_newer_run(path: object, text: str) -> None:
    """FormatError where a newer version of dapo wrote this config.toml. One without a format is the oldest."""
    if found := FORMAT_LINE.match(text):
        refuse_newer(path, int(found[1]), RUN_FORMAT)


def is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(is_deeper(part, levels - 1) for part in inner)
