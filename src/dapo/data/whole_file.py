"""Files that are either whole or absent: written aside, flushed, then put in place, never over an existing one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from dapo.errors import DataError
from dapo.files import sync


def refuse_existing(*paths: Path) -> None:
    for path in paths:
        if path.exists() or path.is_symlink():
            raise DataError(
                f"{path}: exists already.", remedy="Name another file, or remove it first; nothing is overwritten."
            )
        if not path.parent.is_dir():
            raise DataError(f"{path}: there is no folder {path.parent}.", remedy="Make the folder first.")


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, then link it into place. A failure at any point leaves nothing behind."""
    refuse_existing(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written: {error.strerror}.", remedy="Check the folder's permissions."
        ) from None
    os.close(handle)
    part = Path(name)
    try:
        write(part)
        sync(part)
        part.chmod(0o644)
        put_in_place(part, path)
    except FileExistsError:
        raise DataError(
            f"{path}: exists already.", remedy="It appeared while this was running; name another."
        ) from None
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written: {error.strerror}.", remedy="Check the space on the disk."
        ) from None
    finally:
        part.unlink(missing_ok=True)


def put_in_place(part: Path, path: Path) -> None:
    """A hard link fails if somebody made the file meanwhile, where a rename would overwrite it."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        refuse_existing(path)
        part.rename(path)
    sync(path.parent)
