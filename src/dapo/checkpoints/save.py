"""Write a checkpoint so that a crash at any moment leaves the old one or the new one, never half of one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dapo.checkpoints.manifest import MANIFEST, manifest_of
from dapo.errors import cannot_write, is_about_disk
from dapo.files import UNFINISHED, folder_written_aside, remove_folder

STATE_TENSORS = "state.safetensors"
STATE_JSON = "state.json"
ADAPTER = "adapter"  # folder of the model: the LoRA adapter alone, which the model holds merged
NAME = re.compile(r"(step|value)-[0-9]{6,}")


def name_of(step: int, value_steps: int | None = None) -> str:
    """Of the checkpoint after a step; before the first one, of a checkpoint within value pretraining."""
    return f"step-{step:06d}" if value_steps is None else f"value-{value_steps:06d}"


def step_of(folder: Path) -> int:
    """Steps done; value pretraining comes before the first."""
    return 0 if folder.name.startswith("value-") else int(folder.name.removeprefix("step-"))


def in_order(root: Path) -> list[Path]:
    """All checkpoints of a run, oldest first. Other folders, such as a user's copy, are neither read nor deleted."""
    named = [path for path in root.glob("*-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=lambda path: (path.name.startswith("step-"), int(path.name.partition("-")[2])))


def save_checkpoint(
    root: Path,
    name: str,
    *,
    write_model: Callable[[Path], None],
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep: int,
    best: str | None = None,
) -> Path:
    """`root`/`name`/{model/, state.safetensors, state.json, MANIFEST.json}; then `remove_older`."""
    final = root / name
    try:
        remove_unfinished(root)
        with folder_written_aside(final) as aside:
            write_model(aside / "model")
            whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            save_file(whole, aside / STATE_TENSORS)
            (aside / STATE_JSON).write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
            (aside / MANIFEST).write_text(manifest_of(aside, step_of(final)), encoding="utf-8")
        remove_older(final, keep=keep, best=best)
    except Exception as error:  # for a full disk safetensors, torch and Python each have an error of their own
        if is_about_disk(error):
            raise cannot_write(final, error) from None
        raise
    return final


def remove_unfinished(root: Path) -> None:
    """Delete what a crash left of checkpoints: a run writes one at a time."""
    for path in root.glob(f".*{UNFINISHED}"):
        remove_folder(path)


def remove_older(newest: Path, *, keep: int, best: str | None = None) -> None:
    """Delete all but the newest `keep`, and but the one that is named `best`."""
    for old in in_order(newest.parent)[:-keep]:
        if old != newest and old.name != best:
            shutil.rmtree(old)
