"""New files of the user's: whole or absent, and never over an existing one."""

from __future__ import annotations

import filecmp
import tempfile
from collections.abc import Callable
from pathlib import Path

from dapo.errors import DataError
from dapo.files import written_aside


def refuse_existing(*paths: Path) -> None:
    for path in paths:
        if path.exists() or path.is_symlink():
            raise DataError(
                f"{path}: exists already.", remedy="Name another file, or remove it first; nothing is overwritten."
            )
        if not path.parent.is_dir():
            raise DataError(f"{path}: there is no folder {path.parent}.", remedy="Make the folder first.")


def holds_already(path: Path, write: Callable[[Path], None]) -> bool:
    """Whether the file is what `write` would make of it."""
    if not path.is_file():
        return False
    with tempfile.TemporaryDirectory() as folder:
        aside = Path(folder) / path.name
        write(aside)
        try:
            return filecmp.cmp(aside, path, shallow=False)
        except OSError:  # a file that cannot be read
            return False


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a file beside `path`, then put it in place. A failure at any point leaves nothing behind."""
    refuse_existing(path)
    try:
        with written_aside(path, overwrite=False) as aside:
            write(aside)
    except FileExistsError:
        raise DataError(
            f"{path}: exists already.", remedy="It appeared while this was running; name another."
        ) from None
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written: {error.strerror}.",
            remedy="Check the folder's permissions and the space on the disk.",
        ) from None
