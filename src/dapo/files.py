"""Atomic writes of files and folders, hashes, and files that grow by lines: flushed, and truncated on resume."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dapo.errors import ConfigError, cannot_write
from dapo.waiting.registry import waiting

LONG_WRITE = 4.0  # times the limit of other waits: a checkpoint is large, and a disk may be slow
UNFINISHED = ".tmp"  # how the names of files and folders end that are still being written


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add one JSON line, flushed to disk. A line that a crash truncated before it stays a line of its own."""
    line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
    try:
        with waiting(lambda: f"file {path}"), open(path, "ab+", opener=own_file) as file:
            file.write(line if ends_whole(file) else b"\n" + line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from None


def own_file(path: str, flags: int) -> int:
    """Open a file of a run. Links are not followed: they may lead to any file of the user's."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def refuse_links(folder: Path, *names: str) -> None:
    """ConfigError where a folder that is to be written below a run's is a link. The run's own may be one."""
    for name in names:
        if (folder / name).is_symlink():
            raise ConfigError(
                f"{folder / name}: is a link, and nothing is written through links in the folder of a run.",
                remedy="Remove the link. To keep a run on another disk, link or name its whole folder.",
            )


def ends_whole(file: BinaryIO) -> bool:
    """Whether the file is empty or ends with a whole line."""
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file; truncated ones, and those whose step is not a number, are left out."""
    if not path.exists():
        return
    with waiting(lambda: f"file {path}"):
        file = path.open(encoding="utf-8", errors="replace")
    with file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step") or 0, int):
                yield record


def cut_back(path: Path, last_step: int) -> None:
    """Drop the lines of steps after `last_step`, and those that a crash truncated."""
    if path.exists():
        kept = [record for record in read_lines(path) if (record.get("step") or 0) <= last_step]
        replace_file(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))


def replace_file(path: Path, text: str) -> None:
    """Write a small file of a run; DiskError where that fails."""
    try:
        with written_aside(path) as aside:
            aside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise cannot_write(path, error) from None


@contextmanager
def written_aside(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield a new name beside `path` to write to; then flush that file and rename it to `path`.

    A reader sees the old file or the new one, never half of one, and a failure leaves nothing behind. Without
    `overwrite` a file that exists, or that somebody makes meanwhile, is kept: FileExistsError.
    """
    aside = name_aside(path)
    try:
        with waiting(lambda: f"file {path}", patience=LONG_WRITE):
            aside.unlink(missing_ok=True)  # a link in its place may lead anywhere
            yield aside
            sync(aside)
            if overwrite:
                aside.replace(path)
            else:
                link(aside, path)
            sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def folder_written_aside(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """The same for a folder: yield a new empty one beside `path`; then flush all of it and rename it to `path`.

    Without `overwrite` a folder that holds anything is kept: OSError.
    """
    aside = name_aside(path)
    try:
        with waiting(lambda: f"folder {path}", patience=LONG_WRITE):
            aside.mkdir(parents=True)
            yield aside
            put_folder(aside, path, overwrite=overwrite)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def put_folder(aside: Path, path: Path, *, overwrite: bool = True) -> None:
    """Flush a finished folder to disk, then rename it to `path`."""
    for file in (*sorted(aside.rglob("*")), aside):
        sync(file)
    if overwrite:
        remove_folder(path)
    aside.replace(path)
    sync(path.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder, if it is there; of a link only the link, never what it leads to."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def name_aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")


def link(aside: Path, path: Path) -> None:
    """A hard link fails where `path` exists; a rename would replace it."""
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        aside.rename(path)


def sha256_of(path: Path) -> str:
    with waiting(lambda: f"file {path}", patience=LONG_WRITE), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or what a folder holds by name, to disk."""
    with waiting(lambda: f"file {path}"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
