"""One thread per test process: two cores run two of them, and sums are the same every time."""

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():  # read when a kernel is defined, so before any of ours is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
