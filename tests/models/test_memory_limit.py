"""`model.gpu_memory_gib`: what a process may take of a GPU, and what it then plans with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from command_line import dapo
from dapo.config import load_recipe
from dapo.config.machine import CONTEXT_BYTES, GIB
from dapo.errors import ConfigError, EngineError
from dapo.models.device import device_memory, limit_memory


class Card:
    """A GPU of 140 GiB as torch sees it, of which other processes hold 30."""

    total, others, reserved, allocated, fraction = 140 * GIB, 30 * GIB, 6 * GIB, 4 * GIB, 1.0

    def mem_get_info(self, _device: object = None) -> tuple[int, int]:
        return self.total - self.others - self.reserved, self.total

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.fraction = fraction


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    card = Card()
    monkeypatch.setattr(torch.cuda, "mem_get_info", card.mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: card.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: card.allocated)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", card.set_per_process_memory_fraction)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: card.fraction)
    return card


def test_a_limit_leaves_room_for_what_cuda_keeps_itself(card: Card):
    limit_memory(24, "cuda")
    assert card.fraction * card.total == pytest.approx(24 * GIB - CONTEXT_BYTES)


def test_what_is_planned_with_is_what_the_limit_leaves(card: Card):
    here = torch.device("cuda")
    assert device_memory(here) == ((140 - 30 - 4) * GIB, 140 * GIB)  # the allocator's spare blocks are free too
    card.fraction = 24 / 140
    assert device_memory(here) == ((24 - 4) * GIB, 24 * GIB)
    card.others = 128 * GIB  # a limit promises nothing
    assert device_memory(here) == ((140 - 128 - 4) * GIB, 24 * GIB)


def test_a_limit_that_means_nothing_is_refused(card: Card):
    with pytest.raises(EngineError, match=r"model\.gpu_memory_gib = 141: this GPU has 140\.0 GiB"):
        limit_memory(141, "cuda")
    with pytest.raises(EngineError, match=r"model\.gpu_memory_gib = 8: .* on the cpu"):
        limit_memory(8, "cpu")
    limit_memory(None, "cpu")
    assert card.fraction == 1
    with pytest.raises(ConfigError, match=r"model\.gpu_memory_gib: has no effect here"):
        load_recipe("quickstart", ["model.device=cpu", "model.gpu_memory_gib=8"])


def test_fit_and_explain_plan_for_the_limit(tmp_path: Path):
    nothing = ["--set", f"data.train={tmp_path / 'none.jsonl'}"]  # --fit comes before the data
    fitted = dapo("train", "gsm8k-coder-1.5b-h200", "--fit", "h200", "--set", "model.gpu_memory_gib=24", *nothing)
    assert " of 24 GiB without KV cache" in fitted.stdout
    explained = dapo("explain", "gsm8k-1.5b-24gb", "--gpu", "h200", "--set", "model.gpu_memory_gib=24")
    assert " of 24 GiB" in explained.stdout
