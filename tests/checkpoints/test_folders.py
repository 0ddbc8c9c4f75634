"""Which folders are checkpoints, which go when newer ones come, and what a manifest that is no manifest does."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo.checkpoints.load import newest_intact
from dapo.checkpoints.manifest import MANIFEST, described
from dapo.checkpoints.save import in_order, name_of, remove_older, save_checkpoint


def save(root: Path, *steps: int, keep: int = 99) -> None:
    for step in steps:
        save_checkpoint(
            root, name_of(step), write_model=Path.mkdir, tensors={"x": torch.ones(2)}, state={"n": step}, keep=keep
        )


def names(root: Path) -> list[str]:
    return [path.name for path in in_order(root)]


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path):
    save(tmp_path, 1_000_000, 999_999, 2)
    (tmp_path / "step-000002").rename(tmp_path / name_of(0, 20))  # within value pretraining, before the first step
    assert names(tmp_path) == ["value-000020", "step-999999", "step-1000000"]


def test_whatever_their_numbers_value_pretraining_comes_before_the_first_step(tmp_path: Path):
    save(tmp_path, 9, 2)
    (tmp_path / "step-000009").rename(tmp_path / name_of(0, 9))
    assert names(tmp_path) == ["value-000009", "step-000002"]


def test_the_one_just_written_stays_where_later_ones_are_left_of_another_time(tmp_path: Path):
    """A damaged checkpoint is skipped, and the run goes on from the one before it: the next has a smaller number."""
    save(tmp_path, 2, 8, 9)
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == [name_of(3), name_of(9)]


@pytest.mark.parametrize(
    "copy", ["step-000002.bak", "step-000001-keep", "step-000009 (copy)", "step-best", "value-old"]
)
def test_a_copy_under_another_name_is_neither_read_nor_deleted(tmp_path: Path, copy: str):
    save(tmp_path, 1)
    (tmp_path / "step-000001").rename(tmp_path / copy)
    save(tmp_path, 2)
    assert newest_intact(tmp_path) == (tmp_path / "step-000002", [])
    save(tmp_path, 3, 4, keep=1)
    assert names(tmp_path) == ["step-000004"]
    assert (tmp_path / copy / MANIFEST).exists()


@pytest.mark.parametrize("entry", [None, 3, "abc", [], {}, {"bytes": None}, {"bytes": 18}])
def test_a_manifest_with_a_broken_entry_is_skipped_by_name(tmp_path: Path, entry: Any):
    save(tmp_path, 1, 2)
    path = tmp_path / "step-000002" / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"]["state.json"] = entry
    path.write_text(json.dumps(manifest))
    newest, skipped = newest_intact(tmp_path)
    assert newest == tmp_path / "step-000001"
    assert len(skipped) == 1
    assert "step-000002/state.json" in skipped[0]


@pytest.mark.parametrize("n_bytes", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 2**21 + 1])
def test_border_a_files_digest_is_of_all_its_bytes(tmp_path: Path, n_bytes: int):
    """It is read a mebibyte at a time."""
    content = (b"0123456789abcdef" * (n_bytes // 16 + 1))[:n_bytes]
    (tmp_path / "file").write_bytes(content)
    assert described(tmp_path / "file") == {"bytes": n_bytes, "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
def test_border_the_newest_checkpoints_are_kept(tmp_path: Path, keep: int):
    save(tmp_path, 1, 2, 3, keep=keep)
    assert names(tmp_path) == [name_of(step) for step in (1, 2, 3)][-keep:]


@pytest.mark.parametrize("best", [1, 2, 3, 9])
def test_border_the_best_one_is_kept_beside_the_newest(tmp_path: Path, best: int):
    """Once, where it is one of these; a name that is not there keeps nothing."""
    save(tmp_path, 1, 2, 3)
    remove_older(tmp_path / name_of(3), keep=1, best=name_of(best))
    assert names(tmp_path) == [name_of(step) for step in sorted({best, 3} & {1, 2, 3})]


def test_what_a_crash_left_of_a_checkpoint_goes_with_the_next_one(tmp_path: Path):
    (tmp_path / ".step-000001.0a1b2c3d.tmp" / "model").mkdir(parents=True)
    save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
