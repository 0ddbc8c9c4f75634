"""Whether Triton kernels can run here: on a CUDA device, or on a CPU by Triton's interpreter (for tests)."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache


@cache
def has_triton() -> bool:
    """Triton is installed. It is imported only where a kernel is wanted."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """TRITON_INTERPRET=1 was set before the kernels were defined: they run in Python, slowly, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def runs_triton(device_type: str) -> bool:
    """What picks a kernel over its plain version: a CUDA device and Triton. A CPU never takes it by itself."""
    return device_type == "cuda" and has_triton()


if __name__ == "__main__":  # the Makefile asks: exit 0 where Triton is there
    sys.exit(not has_triton())
