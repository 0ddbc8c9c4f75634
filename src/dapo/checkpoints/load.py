"""Find the newest intact checkpoint of a run, and read it. Nothing here can execute what a file holds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from dapo.checkpoints.manifest import check_manifest
from dapo.checkpoints.save import STATE_JSON, STATE_TENSORS
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


def newest_checkpoint(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """(the newest one that is intact, messages about newer ones that were skipped)."""
    skipped: list[str] = []
    for folder in sorted(root.glob("step-*"), reverse=True):
        try:
            return read_checkpoint(folder), skipped
        except CheckpointError as error:
            skipped.append(f"checkpoint skipped: {error.message}")
    return None, skipped


def read_checkpoint(folder: Path) -> Checkpoint:
    step = check_manifest(folder)
    state = json.loads((folder / STATE_JSON).read_text(encoding="utf-8"))
    return Checkpoint(folder, step, load_file(folder / STATE_TENSORS), state)
