"""Only one process at a time trains a run: two would write the same files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from dapo.commands import dapo_command
from dapo.errors import ConfigError
from dapo.files import refuse_links
from dapo.waiting.heartbeat import FOLDER as HEARTBEAT

WRITTEN = ("checkpoints", "rollouts", "rollouts/dropped", "tensorboard", "wandb", HEARTBEAT)  # folders that a run fills
_claimed: dict[Path, int] = {}  # folder -> its open handle; a process may resume its own run


def claim(folder: Path) -> None:
    """Lock the folder until `release` or the end of this process. Links in it are refused."""
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
    except OSError:  # a file system without locks
        os.close(handle)
        return
    _claimed[key] = handle


def release(folder: Path) -> None:
    handle = _claimed.pop(folder.resolve(), None)
    if handle is not None:
        os.close(handle)
