"""How long an update takes and how much memory it needs at its peak."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dapo.bench.setting import TrainSetting


@dataclass(frozen=True, slots=True)
class Result:
    seconds: float  # per update: forward, backward and optimizer
    peak_gib: float
    settings: str


def timed(setting: TrainSetting, update: Callable[[], None]) -> tuple[float, float]:
    """(seconds per update, peak GiB), after two updates that fill caches and compile kernels."""
    import torch

    is_cuda = setting.device == "cuda"
    for _ in range(2 if is_cuda else 1):
        update()
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(setting.repeats):
        update()
    if is_cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / setting.repeats
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0


def measured(setting: TrainSetting, update: Callable[[], None], settings: str) -> Result | None:
    """None where it does not fit."""
    import torch

    try:
        return Result(*timed(setting, update), settings)
    except torch.OutOfMemoryError:
        return None


def free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
