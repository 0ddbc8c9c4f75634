"""What this machine has, without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess

GIB = 1024**3
# Of a GPU, that CUDA and its libraries keep outside of torch's allocator: 0.8 to 0.93 GiB on an H200.
CONTEXT_BYTES = 19 * GIB // 20

# Usable memory of each GPU type, in GiB.
CARDS_GIB = {
    "t4": 15.0,
    "rtx3060": 12.0,
    "rtx3090": 24.0,
    "rtx4090": 24.0,
    "rtx5090": 31.0,
    "l40s": 45.0,
    "a100-40gb": 39.0,
    "a100": 79.0,
    "h20": 95.0,
    "h100": 79.0,
    "h200": 139.0,
    "b200": 178.0,
}


def gpu_memory_gib() -> list[float]:
    """Memory of each NVIDIA card; empty without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    asked = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
    except (subprocess.SubprocessError, OSError):  # a driver that does not answer counts as no GPU
        return []
    return [float(line) / 1024 for line in answer.splitlines() if line.strip().replace(".", "").isdigit()]


def system_memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
