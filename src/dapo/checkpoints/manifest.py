"""What a checkpoint holds: every file with its size and SHA-256. Without a true manifest it is not a checkpoint."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dapo.errors import CheckpointError, refuse_newer
from dapo.files import sha256_of

MANIFEST = "MANIFEST.json"
FORMAT = 1  # of a checkpoint: its files, and what state.json holds


def described(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def manifest_of(folder: Path, step: int, known: Mapping[str, Any] | None = None) -> str:
    """The manifest of all files there; `known` are those that another rank has described already."""
    known = known or {}
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if unseen := sorted(known.keys() - paths.keys()):
        raise FileNotFoundError(errno.ENOENT, f"{unseen[0]} was written by another rank and is not to be seen here")
    files = {name: known.get(name) or described(path) for name, path in paths.items() if path.name != MANIFEST}
    return json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1)


def check_manifest(folder: Path) -> int:
    """The step of an intact checkpoint. CheckpointError names a file that is corrupt, missing, changed or added;
    FormatError says that a newer version of dapo wrote the checkpoint, which then is no reason to use an older one.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        format_, files, step = int(manifest.get("format", 0)), dict(manifest["files"]), int(manifest["step"])
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: has no {MANIFEST}: writing it never finished.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}.") from None
    refuse_newer(path, format_, FORMAT)
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {MANIFEST}
    for name in sorted(files.keys() ^ present):
        raise CheckpointError(f"{folder / name}: {'is missing' if name in files else 'is not in the manifest'}.")
    for name, known in files.items():
        file = folder / name
        try:
            is_same = file.stat().st_size == known["bytes"] and sha256_of(file) == known["sha256"]
        except (OSError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file}: cannot be compared with the manifest: {error}.") from None
        if not is_same:
            raise CheckpointError(f"{file}: differs from the manifest: torn or changed after it was written.")
    return step
