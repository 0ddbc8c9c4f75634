"""Only one process at a time trains a run: two would write the same files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from dapo.commands import dapo_command
from dapo.errors import ConfigError
from dapo.files import refuse_links

WRITTEN = ("checkpoints", "rollouts", "rollouts/dropped", "tensorboard", "wandb")  # folders that a run fills
_claimed: dict[Path, int] = {}  # folder -> its open handle; a process may go on with a run of its own


def claim(folder: Path) -> None:
    """Hold the folder until `release`, or until this process ends, however it ends. What it holds must be its own."""
    refuse_links(folder, *WRITTEN)
    key = folder.resolve()
    if key in _claimed:
        return
    handle = os.open(key, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"{folder}: another process is training this run.",
            remedy=f"Watch it: {dapo_command('watch', folder)}\nOr end that process, and resume the run then.",
        ) from None
    except OSError:  # a file system without locks: as before
        os.close(handle)
        return
    _claimed[key] = handle


def release(folder: Path) -> None:
    handle = _claimed.pop(folder.resolve(), None)
    if handle is not None:
        os.close(handle)
