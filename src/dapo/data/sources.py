"""What a source string means: a file, a known name, a hub data set, a task of reasoning-gym, or a Python callable."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dapo.config.hub import why_offline
from dapo.data.gym.source import check_name, gym_rows
from dapo.data.names import KNOWN, ROOT_VARIABLE, Use, local_file, local_root
from dapo.data.rows import SUFFIXES, Rows, cached_sha256, check_file, exists, first_line, read_rows
from dapo.data.schemas import asked
from dapo.errors import DataError
from dapo.processes import search_working_folder
from dapo.rewards.gym.names import PREFIX as GYM
from dapo.types import Problem

CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
HUB = re.compile(r"(?P<path>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<split>[\w.\[\]%:]+))?")


@dataclass(frozen=True, slots=True)
class DataSource:
    """A source ready to be read. `where` is what messages call it; `sha256` is of the file, empty for the others."""

    name: str
    where: str
    rows: Callable[[], Rows]
    sha256: str = ""
    note: str = ""


def find_source(text: str, *, use: Use = "train", root: str | Path | None = None) -> DataSource:
    """Resolve what the user typed. `use` ("train" or "eval") picks the split of a known name that has both."""
    name, _, split = text.partition(":")
    if name in KNOWN:
        return known_source(name, split, use=use, root=local_root(root))
    if text.startswith(GYM):
        full, note = check_name(text, use=use)
        return DataSource(text, text, lambda: gym_rows(full, text), note=note)
    path = Path(text)
    if path.suffix.lower() in SUFFIXES or exists(path) or text.startswith(("/", "./", "../", "~")):
        return file_source(path.expanduser(), name=path.stem)
    if CALLABLE.fullmatch(text):
        check_module(text)
        return DataSource(text, text, lambda: callable_rows(text))
    if match := HUB.fullmatch(text):
        where, revision = match["path"], match["revision"]
        split = match["split"] or ("train" if use == "train" else "test")
        note = "" if revision else f"{where} is not pinned to a revision: add @COMMIT to make the run repeatable"
        return DataSource(where, text, lambda: hub_rows(where, config=None, split=split, revision=revision), note=note)
    near = difflib.get_close_matches(text, KNOWN, n=1)
    others = f"Known names: {', '.join(KNOWN)}; else a file, org/name, gym:TASK or pkg.mod:function."
    raise DataError(
        f"{text}: no such file, and not a known problem set.", remedy=f"Did you mean {near[0]}?" if near else others
    )


def file_of(text: str, *, use: Use) -> Path | None:
    """The file of this machine that `find_source` would read; None where there is none, and for every other source."""
    name, _, split = text.partition(":")
    root = local_root(None) if name in KNOWN else None
    if root is not None:
        return local_file(name, split or KNOWN[name].split(use), root)
    path = Path(os.path.expanduser(text))
    return path if name not in KNOWN and os.path.isfile(path) else None


def file_source(path: Path, *, name: str, note: str = "") -> DataSource:
    check_file(path)  # before it is hashed
    return DataSource(name, str(path), lambda: read_rows(path), sha256=cached_sha256(path), note=note)


def known_source(name: str, split: str, *, use: Use, root: Path | None) -> DataSource:
    known = KNOWN[name]
    if split and split not in known.files:
        raise DataError(f"{name}:{split}: no such split.", remedy=f"{name} has {', '.join(known.files)}.")
    split = split or known.split(use)
    path = local_file(name, split, root) if root is not None else None
    if path is not None:
        return file_source(path, name=name, note=f"{name} is {path}")
    note = f"{name} is {known.hub}, split {split}, at {known.revision[:7]}"
    looked = f"{name} is not in {root}. " if root is not None else ""

    def rows() -> Rows:
        return hub_rows(known.hub, config=known.config, split=split, revision=known.revision, looked=looked)

    return DataSource(name, name, rows, note=note)


def hub_rows(path: str, *, config: str | None, split: str, revision: str | None, looked: str = "") -> Rows:
    """Rows of a hub data set, or of a local folder in the hub's layout. Only data files are read, never a script."""
    offline = "" if Path(path).exists() else why_offline()
    import datasets

    try:
        table = datasets.load_dataset(path, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        is_missing = isinstance(error, ConnectionError)  # anything else is about what the cache holds
        why = offline if offline and is_missing else first_line(error)
        raise DataError(
            f"{path}: split {split} could not be loaded from the hub: {why}.",
            remedy=f"{looked}Without a network, set {ROOT_VARIABLE} to a folder that holds the file, or name the file.",
        ) from None
    number = 0
    for batch in table.with_format("arrow").iter(4096):
        for row in batch.to_pylist():
            number += 1
            yield number, row


def check_module(text: str) -> None:
    """DataError where the module of `pkg.mod:function` is not there; it is not imported. The working folder counts."""
    name = text.split(":")[0]
    search_working_folder()
    try:
        is_there = name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, SyntaxError) as error:  # of a package above it
        raise cannot_import(text, first_line(error)) from None
    if not is_there:
        raise cannot_import(text, f"No module named {name!r}")


def cannot_import(text: str, why: str) -> DataError:
    return DataError(
        f"{text}: cannot be imported: {why}.",
        remedy="Write it as package.module:function; the working folder is searched too.",
    )


def callable_rows(text: str) -> Rows:
    """What the user's function yields: problems or dicts."""
    module_name, function_name = text.split(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise cannot_import(text, first_line(error)) from None
    return numbered(text, function)


def numbered(text: str, function: Callable[[], Iterator[object]]) -> Rows:
    number = 0
    try:
        for number, item in enumerate(function(), start=1):
            yield number, as_columns(text, number, item)
    except DataError:
        raise
    except Exception as error:  # the user's code may raise anything; the row is what they need to know
        raise DataError(
            f"{text}: row {number + 1}: raised {type(error).__name__}: {first_line(error)}.",
            remedy="Fix the function.",
        ) from error


def as_columns(text: str, number: int, item: object) -> dict[str, object]:
    if isinstance(item, Problem):
        return {"id": item.id, **asked(item), "answer": item.answer, "source": item.source, **item.meta}
    if isinstance(item, dict):
        return item
    raise DataError(
        f"{text}: row {number}: yielded a {type(item).__name__}.",
        remedy="Yield dapo.types.Problem or dicts with columns.",
    )
