"""The parts of a sharded checkpoint that need no second process: balancing, waiting, failing by name, no pickle."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dapo.checkpoints import sharded
from dapo.checkpoints.load import newest_intact
from dapo.checkpoints.sharded import Background, RankPart, read_slices, write_part
from dapo.distributed.balance import balanced
from dapo.distributed.shards import Sharding, on_host
from dapo.distributed.world import World, one_rank
from dapo.errors import DiskError
from dapo.learner.learner import layers_of
from dapo.models.load import checkpoint_tensors, save_all_but_weights, save_policy
from tiny_models import tiny_policy


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 99), max_size=20), st.integers(1, 7))
def test_every_tensor_is_one_ranks_and_none_has_a_tensor_too_many(sizes: dict[str, int], n_ranks: int):
    parts = balanced(sizes, n_ranks)
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    loads = [sum(sizes[name] for name in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def part_of(policy: Any, slices: dict[str, torch.Tensor]) -> RankPart:
    weights = dict(checkpoint_tensors(policy))
    return RankPart(
        slices, weights, {"n": torch.tensor(3)}, {"k": 1}, lambda folder: save_all_but_weights(policy, folder)
    )


def sharded_slices(world: Any, policy: Any) -> dict[str, torch.Tensor]:
    made = Sharding(world, "cpu", policy.dtype).copy_of(policy, layers_of, shared=[policy.tokenizer])
    return {f"master.{name}": on_host(weight.to_local(), weight) for name, weight in made.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_what_is_read_back_is_what_was_saved_and_nothing_is_pickled(tmp_path: Path, family: str):
    policy = tiny_policy(family)
    with one_rank("cpu") as world:
        slices = sharded_slices(world, policy)
        policy.base.register_buffer("correction", torch.ones(3))  # as some routers have: no parameter, but saved
        background = Background(world)
        background.save(tmp_path, "step-000001", part_of(policy, slices), keep=1)
        background.wait()
    folder, skipped = newest_intact(tmp_path)
    assert folder == tmp_path / "step-000001"
    assert not skipped
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    got = read_slices(folder, lambda _key: None)
    assert got.keys() == slices.keys()
    for name, weight in policy.named_parameters():
        torch.testing.assert_close(got[f"master.{name}"], weight, rtol=0, atol=0)
    # The model's folder is the one that a run of one process writes, but for the number of its files.
    save_policy(policy, tmp_path / "whole")
    names = {path.name for path in (tmp_path / "whole").iterdir()} - {"model.safetensors"}
    for name in names - {"config.json"}:
        assert (folder / "model" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    one = load_file(tmp_path / "whole" / "model.safetensors")
    many = load_file(folder / "model" / "model-00001-of-00001.safetensors")
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_a_second_save_waits_for_the_first_and_training_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    policy, gate, begun = tiny_policy("llama"), threading.Event(), []
    write_part = sharded.write_part

    def slow(root: Path, name: str, *arguments: Any, **named: Any) -> None:
        begun.append(name)
        assert gate.wait(30)
        write_part(root, name, *arguments, **named)

    monkeypatch.setattr(sharded, "write_part", slow)
    with one_rank("cpu") as world:
        background = Background(world)
        part = part_of(policy, sharded_slices(world, policy))
        background.save(tmp_path, "step-000001", part, keep=5)  # returns while it is written
        assert not (tmp_path / "step-000001").exists()
        second = threading.Thread(target=lambda: background.save(tmp_path, "step-000002", part, keep=5))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert begun == ["step-000001"]
        gate.set()
        second.join(30)
        background.wait()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000001", "step-000002"]


def test_the_best_of_sharded_checkpoints_is_kept_too(tmp_path: Path):
    policy = tiny_policy("llama")
    with one_rank("cpu") as world:
        background, slices = Background(world), sharded_slices(world, policy)
        for step in (1, 2, 3):
            background.save(tmp_path, f"step-{step:06d}", part_of(policy, slices), keep=1, best="step-000001")
        background.wait()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000001", "step-000003"]


class Threads(World):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, size: int, said: dict[int, Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.said, self.barrier_ = rank, size, said, barrier

    def gather(self, value: Any) -> list[Any]:
        self.said[self.rank] = value
        self.barrier_.wait(10)
        everything = [self.said[rank] for rank in range(self.size)]
        self.barrier_.wait(10)
        return everything


def test_one_rank_of_three_that_cannot_write_its_weights_stops_all_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(tensors: Any, path: Path, **named: Any) -> None:
        if path.name.startswith("model-00002"):
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, **named)

    monkeypatch.setattr(sharded, "save_file", full)
    monkeypatch.setattr(sharded, "write_slices", lambda *_: [])
    said: dict[int, Any] = {}
    barrier, errors = threading.Barrier(3), list[BaseException]()
    part = RankPart({}, {"w": torch.ones(2)}, {}, {}, lambda _folder: None)

    def rank(number: int) -> None:
        try:
            write_part(tmp_path, "step-000001", part, Threads(number, 3, said, barrier), keep=1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [type(error) for error in errors] == [DiskError] * 3
    assert all("No space left" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    root = tmp_path / "read-only"
    root.mkdir(mode=0o500)
    fails_by_name(root)


def test_a_place_that_is_no_folder_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    fails_by_name(tmp_path / "file")


def fails_by_name(root: Path) -> None:
    policy = tiny_policy("llama")
    with one_rank("cpu") as world:
        background = Background(world)
        background.save(root, "step-000001", part_of(policy, sharded_slices(world, policy)), keep=5)
        with pytest.raises(DiskError, match=r"step-000001: cannot be written"):
            background.wait()
        background.wait()  # said once
