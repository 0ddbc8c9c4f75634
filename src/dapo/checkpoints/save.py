"""Write a checkpoint so that a crash at any moment leaves the old one or the new one, never half of one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dapo.checkpoints.manifest import MANIFEST, make_manifest

STATE_TENSORS = "state.safetensors"
STATE_JSON = "state.json"


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def save_checkpoint(
    root: Path,
    step: int,
    *,
    write_model: Callable[[Path], None],
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """`root`/step-000120/{model/, state.safetensors, state.json, MANIFEST.json}; then older ones beyond `keep` go."""
    final = folder_of(root, step)
    aside = root / f".{final.name}.tmp"
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    write_model(aside / "model")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, aside / STATE_TENSORS)
    (aside / STATE_JSON).write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
    (aside / MANIFEST).write_text(make_manifest(aside, step), encoding="utf-8")
    for path in sorted(aside.rglob("*")):
        sync(path)
    sync(aside)
    if final.exists():
        shutil.rmtree(final)
    aside.replace(final)
    sync(root)
    for old in sorted(root.glob("step-*"))[:-keep]:
        if old != final:
            shutil.rmtree(old)
    return final


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
