"""Files of a run that grow by lines: appended and flushed, cut back on resume; small files are replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dapo.errors import ConfigError, cannot_write


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add one JSON line, flushed to disk. What a crash tore off before it stays a line of its own."""
    line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
    try:
        with open(path, "ab+", opener=own_file) as file:
            file.write(line if ends_whole(file) else b"\n" + line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from None


def own_file(path: str, flags: int) -> int:
    """Open a file of a run; a link in its place may lead to anything of the user's."""
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
    """Whether nothing, or a whole line, stands at the end."""
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSONL file; torn ones, and those whose step is no number, are left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step") or 0, int):
                yield record


def cut_back(path: Path, last_step: int) -> None:
    """Drop lines of steps after `last_step`, and what a crash tore."""
    if path.exists():
        kept = [record for record in read_lines(path) if (record.get("step") or 0) <= last_step]
        replace_file(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))


def replace_file(path: Path, text: str) -> None:
    """Write aside, flush, rename: a reader sees the old file or the new one, never half of one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.unlink(missing_ok=True)
        with aside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise cannot_write(path, error) from None


def sync(path: Path) -> None:
    """Flush a file, or what a folder holds by name, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
