"""Find the newest intact checkpoint of a run, and read it. Nothing here can execute what a file holds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from dapo.checkpoints.manifest import check_manifest
from dapo.checkpoints.save import STATE_JSON, STATE_TENSORS, in_order, step_of
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
    state: dict[str, Any] = json.loads((folder / STATE_JSON).read_text(encoding="utf-8"))
    return state


def read_checkpoint(folder: Path) -> Checkpoint:
    """An intact checkpoint, whole."""
    return Checkpoint(folder, step_of(folder), load_file(folder / STATE_TENSORS), read_state(folder))
