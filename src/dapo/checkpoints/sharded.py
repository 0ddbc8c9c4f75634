"""Checkpoints of sharded runs: every rank writes its part, in the background, while training continues.

`torch.distributed.checkpoint` stores slices in safetensors files whose headers say where each slice belongs (its own
default is a pickled index, which is never used here), and any number of ranks reads back just its own slices. The
model's whole tensors are split over the ranks, as the several files of one Hugging Face folder.
"""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from dapo.checkpoints.manifest import MANIFEST, described, manifest_of
from dapo.checkpoints.save import STATE_JSON, STATE_TENSORS, remove_older, remove_unfinished, step_of
from dapo.distributed.shards import host_mesh, local
from dapo.distributed.world import World
from dapo.errors import DiskError, cannot_write, is_about_disk
from dapo.files import LONG_WRITE, UNFINISHED, put_folder, sync
from dapo.waiting.registry import waiting

SLICES = "slices"  # folder of what is sharded
INDEX = "model.safetensors.index.json"
LEAVE_S = 120.0  # a peer that is gone ends the save at once, by its closed connection
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank writes: copies on the host, which training does not change."""

    slices: Mapping[str, Tensor]  # this rank's, each knowing its place in the whole
    weights: Mapping[str, Tensor]  # this rank's part of the model, as whole tensors
    tensors: Mapping[str, Tensor]  # of the first rank: what is not sharded
    state: Mapping[str, Any]  # of the first rank
    write_model: Callable[[Path], None]  # by the first rank: everything of the model but its weights


class Background:
    """One save at a time, in the background of training. Its error is raised by the next save, or at the end."""

    def __init__(self, world: World) -> None:
        self.world = world.new_group()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # A thread starts on the first GPU, and a look at a stream there would take memory of another rank's card.
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def save(self, root: Path, name: str, part: RankPart, *, keep: int, best: str | None = None) -> None:
        """Returns at once; waits for the save before, if that is still being written."""
        self.wait()

        def write() -> None:
            try:
                if self._gpu is not None:
                    torch.cuda.set_device(self._gpu)
                with waiting(lambda: f"folder {root / name}", patience=LONG_WRITE):
                    write_part(root, name, part, self.world, keep=keep, best=best)
            except BaseException as error:  # raised again by the thread that trains
                self._error = error

        self._thread = threading.Thread(target=write, name=f"checkpoint {name}", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """At the end of a run that failed: let what is being written come to its end, if the other ranks are there."""
        if self._thread is not None:
            self._thread.join(LEAVE_S)

    def wait(self) -> None:
        if self._thread is not None:
            with waiting(f"the {self._thread.name}, which is written in the background", patience=LONG_WRITE):
                self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def write_part(root: Path, name: str, part: RankPart, world: World, *, keep: int, best: str | None = None) -> None:
    """This rank's share of the work on one checkpoint; when it returns, the checkpoint is there."""
    # One name for all ranks, not a drawn one.
    final, aside = root / name, root / f".{name}{UNFINISHED}"

    def prepare() -> None:
        if world.is_first:
            remove_unfinished(root)
            (aside / "model").mkdir(parents=True)
            (aside / SLICES).mkdir()

    def write() -> dict[str, Any]:
        slices = write_slices(aside / SLICES, part.slices, world)  # together: what fails there fails on all ranks
        weights = write_weights(aside / "model", part.weights, world)
        own = [*slices, *weights]
        for path in own:
            sync(path)
        return {
            "files": {path.relative_to(aside).as_posix(): described(path) for path in own},
            "weights": {name: path.name for path in weights for name in part.weights},
            "bytes": sum(tensor.nbytes for tensor in part.weights.values()),
        }

    def finish() -> None:
        if world.is_first:
            part.write_model(aside / "model")
            write_index(aside / "model" / INDEX, parts)
            files = {file: entry for part in parts for file, entry in part["files"].items()}
            save_file(dict(part.tensors), aside / STATE_TENSORS)
            (aside / STATE_JSON).write_text(json.dumps(part.state, ensure_ascii=False), encoding="utf-8")
            (aside / MANIFEST).write_text(manifest_of(aside, step_of(final), known=files), encoding="utf-8")
            put_folder(aside, final)
            remove_older(final, keep=keep, best=best)

    try:
        together(world, final, prepare)
        parts = together(world, final, write)
        together(world, final, finish)
    except DiskError:
        if world.is_first:
            shutil.rmtree(aside, ignore_errors=True)  # room for what is tried next
        raise


def together(world: World, final: Path, work: Callable[[], T]) -> list[T]:
    """work() on every rank; returns the results of all. Where one rank cannot write, all raise DiskError.

    Inside work() ranks do not communicate, or all of them fail alike; an error of one rank is exchanged here.
    """
    done, failure = None, None
    try:
        done = work()
    except (Exception, CheckpointException) as error:
        cause = next((cause for cause in causes(error) if is_about_disk(cause)), None)
        if cause is None:
            raise RuntimeError(f"writing {final}: {error}") from error
        failed = cannot_write(final, cause)
        failure = [failed.message, failed.remedy]
    answers = world.gather([done, failure])
    for _, failure in answers:
        if failure is not None:
            raise DiskError(failure[0], remedy=failure[1])
    return [done for done, _ in answers]


def causes(error: BaseException) -> list[Exception]:
    """An error of torch.distributed.checkpoint holds those of the ranks; it is no Exception itself."""
    held = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return [cause for cause in held if isinstance(cause, Exception)]


def write_slices(folder: Path, slices: Mapping[str, Tensor], world: World) -> list[Path]:
    held = {key: part for key, part in slices.items() if local(part).numel()}  # a rank may have no row of a short one
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save(held, storage_writer=writer, process_group=getattr(world, "group", None))
    return sorted(folder.glob(f"shard-{world.rank + 1:05d}-*"))


def write_weights(folder: Path, weights: Mapping[str, Tensor], world: World) -> list[Path]:
    """This rank's file of the model, if it has any of it."""
    file = folder / f"model-{world.rank + 1:05d}-of-{world.size:05d}.safetensors"
    if weights:
        save_file(dict(weights), file, metadata={"format": "pt"})
    return [file] if weights else []


def write_index(path: Path, parts: Sequence[Mapping[str, Any]]) -> None:
    """Which file of the model holds which tensor."""
    placed = {name: file for part in parts for name, file in part["weights"].items()}
    index = {"metadata": {"total_size": sum(part["bytes"] for part in parts)}, "weight_map": placed}
    path.write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")


# ------------------------------------------------------------------ reading


def has_slices(folder: Path) -> bool:
    return (folder / SLICES).is_dir()


def read_slices(folder: Path, like: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """What of the stored tensors this process has, by key.

    `like(key)` is a tensor that is sharded as the stored one shall be; a whole one, or None, asks for all of it.
    """
    reader = HuggingFaceStorageReader(str(folder / SLICES))
    wanted: dict[str, Tensor] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        wanted[key] = empty_part(stored.size, stored.properties.dtype, like(key))  # type: ignore[union-attr]
    held: dict[str, Any] = {key: part for key, part in wanted.items() if local(part).numel()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this process reads by itself is what is meant
        load(held, storage_reader=reader, no_dist=True)
    return {key: local(part) for key, part in wanted.items()}


def empty_part(size: torch.Size, dtype: torch.dtype, like: Tensor | None) -> Tensor:
    if not isinstance(like, DTensor):
        return torch.empty(size, dtype=dtype)
    part = torch.empty(local(like).shape, dtype=dtype)
    mesh = host_mesh(like.device_mesh)
    return DTensor.from_local(part, mesh, like.placements, run_check=False, shape=size, stride=like.stride())
