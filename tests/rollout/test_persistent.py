"""A decode step in one launch computes what the plain operations do; `emulated/` runs its CUDA source on a CPU."""

import copy
import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dapo.models.policy import Policy
from dapo.rollout.local.decoder import PagedDecoder
from dapo.rollout.local.persistent import step
from dapo.rollout.local.persistent.step import Arguments, PersistentStep, Sizes
from tiny_models import tiny_policy

HERE = Path(__file__).with_name("emulated")
SOURCES = step.SOURCE.parent


class Emulated:
    """In place of `driver.Kernel`. Implements its `launch`."""

    def __init__(self, folder: Path, sizes: Sizes, is_early: bool) -> None:
        path = folder / f"{abs(hash((sizes, is_early)))}.so"
        flags = [
            "-std=gnu11",
            "-O1",
            "-shared",
            "-fPIC",
            "-fno-strict-aliasing",
            "-Wall",
            "-Wno-unused-function",
            "-Werror",
        ]
        command = ["gcc", *flags, "-I", SOURCES, *sizes.macros, "-o", path, HERE / "run.c", "-lm"]
        subprocess.run(command, check=True, timeout=120)
        self.run, self.is_early = ctypes.CDLL(str(path)).run, is_early

    def launch(self, blocks: int, threads: int, shared_bytes: int, arguments: Arguments) -> None:
        del blocks, threads
        assert self.run(ctypes.byref(arguments), shared_bytes, int(self.is_early)) == 0, "its blocks wait for ever"


def plain_logits(decoder: PagedDecoder, n: int, longest: int) -> Tensor:
    return decoder._logits(n, longest)


@pytest.mark.parametrize(
    ("kind", "n", "blocks", "early"), [("qwen2", 5, 3, True), ("qwen3", 8, 2, False), ("llama", 11, 5, False)]
)
@torch.no_grad()
def test_logits_and_cache(tmp_path: Path, kind: str, n: int, blocks: int, early: bool):
    torch.manual_seed(0)
    policy = tiny_policy(
        kind,
        hidden_size=192,
        intermediate_size=384,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        num_hidden_layers=2,
    ).to(torch.bfloat16)
    for name, p in policy.named_parameters():
        if "norm" in name or "bias" in name:
            p.add_(torch.randn_like(p) * 0.2)
        else:
            p.mul_(3)
    fast, plain, true = (decoder(p) for p in (policy, policy, copy.deepcopy(policy).float()))
    fast.cache.data.normal_()
    plain.cache.data.copy_(fast.cache.data)
    true.cache.data.copy_(fast.cache.data)
    pages = torch.randperm(199)[: n * 17].view(n, 17).int() + 1
    lengths = torch.tensor([1, 200, 16, 17, 259, 33, 34, 120, 64, 65, 5])[:n]
    for one in (fast, plain, true):
        one.rows.table[:n, :17] = pages
        one.rows.length[:n] = lengths.int()
        one.rows.stop[2] = 1
        one.rows.token[:n] = torch.arange(n).int() + 3
    want, near = true._logits(n, 260), plain._logits(n, 260)
    few = PersistentStep(fast, n_blocks=blocks)
    sizes = replace(few.sizes, ROWS=-(-n // 8) * 8, TILES=3 if n > 8 else 4, STAGES=5)
    few.kernels[sizes.ROWS] = Emulated(tmp_path, sizes, early), sizes
    alive = torch.arange(n) != 2
    for _ in range(2):  # the second launch finds the counters of the first
        got = few.logits(n)
        assert (got - want)[alive].norm() <= 1.3 * (near - want)[alive].norm(), (
            (got - want)[alive].norm(),
            (near - want)[alive].norm(),
        )
    cells = [x.cache.data[:, :, 1:].float() for x in (fast, plain, true)]
    assert (cells[0] - cells[2]).norm() <= 1.3 * (cells[1] - cells[2]).norm()
    print((got - want)[alive].norm(), (near - want)[alive].norm(), want.norm())


def decoder(policy: Policy) -> PagedDecoder:
    return PagedDecoder(policy, n_rows=16, max_tokens=400, n_pages=200, page_tokens=16, tokens_per_tick=1, ops="plain")
