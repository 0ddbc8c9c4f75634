"""Find the newest intact checkpoint of a run, and read it. Nothing here can execute what a file holds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dapo.checkpoints.manifest import check_manifest
from dapo.checkpoints.save import STATE_JSON, STATE_TENSORS, in_order, step_of
from dapo.checkpoints.state import check_state, no_state
from dapo.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"


def newest_intact(root: Path) -> tuple[Path | None, list[str]]:
    """Where the newest intact one is: its files are checked against the manifest, none of its state is loaded."""
    skipped: list[str] = []
    for folder in reversed(in_order(root)):
        try:
            check_manifest(folder)
        except CheckpointError as error:
            skipped.append(f"checkpoint skipped: {error.message}")
        else:
            return folder, skipped
    return None, skipped


def read_state(folder: Path) -> dict[str, Any]:
    """The part of a checkpoint that is JSON."""
    path = folder / STATE_JSON
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise no_state(path, f"{type(error).__name__}: {str(error)[:200]}") from None
    return check_state(path, state)


def read_checkpoint(folder: Path) -> Checkpoint:
    """An intact checkpoint, whole."""
    try:
        tensors = load_file(folder / STATE_TENSORS)
    except (OSError, SafetensorError) as error:
        raise no_state(folder / STATE_TENSORS, str(error)) from None
    return Checkpoint(folder, step_of(folder), tensors, read_state(folder))
