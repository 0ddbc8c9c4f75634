"""Triton beside the CPU build of torch: installed by the Makefile, run by its interpreter, chosen on CUDA only."""

import sys

import pytest
import torch
from torch.testing import assert_close

from dapo.models.triton_support import has_triton, is_interpreted, runs_triton

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton has wheels for Linux only")


def test_the_interpreter_runs_a_kernel_on_cpu_tensors():
    assert has_triton(), "make installs triton==3.6.0 beside torch; remove .venv/.installed and run make test"
    if not is_interpreted():
        pytest.skip("a CUDA device runs the kernels themselves")
    import triton
    import triton.language as tl

    @triton.jit
    def add_one(x, y, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0).to(tl.float32) + 1, mask=i < n)

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.arange(10, dtype=dtype)
        y = torch.empty_like(x)
        add_one[(3,)](x, y, 10, BLOCK=4)
        assert_close(y, x + 1)


def test_a_cpu_takes_the_plain_version():
    assert not runs_triton("cpu")
    assert runs_triton("cuda") == has_triton()
