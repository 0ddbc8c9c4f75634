"""Dynamic loss scale of float16: gradients too small for its range are trained on, too large ones lower the scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
RISES_AFTER = 400  # updates in a row; a rise that was too much costs one of them


@dataclass(slots=True)
class LossScale:
    """The factor of the loss in the backward pass: always a power of two, so that dividing by it is exact.

    A gradient that is not finite skips its update and halves the scale; `RISES_AFTER` good updates in a row double it.
    """

    value: float = FIRST
    good: int = 0  # updates in a row since the scale last changed

    def lower(self) -> bool:
        """After a gradient that is not finite. False where the scale cannot be the reason: it is at its least."""
        self.good = 0
        if self.value <= LEAST:
            return False
        self.value /= 2
        return True

    def count(self) -> None:
        """After an update."""
        self.good += 1
        if self.good == RISES_AFTER:
            self.value, self.good = min(2 * self.value, MOST), 0

    def tensors(self) -> dict[str, Tensor]:
        return {
            "loss_scale.value": torch.tensor(self.value, dtype=torch.float64),
            "loss_scale.good": torch.tensor(self.good),
        }

    def load(self, saved: dict[str, Tensor]) -> None:
        """What `tensors` gave; a checkpoint from before has none, and the search begins anew."""
        if "loss_scale.value" not in saved:
            return
        value, good = float(saved["loss_scale.value"]), int(saved["loss_scale.good"])
        if not (LEAST <= value <= MOST and math.frexp(value)[0] == 0.5 and 0 <= good < RISES_AFTER):
            raise ValueError(f"a loss scale of {value:g} after {good} updates: none that a run can have")
        self.value, self.good = value, good


def scale_for(dtype: torch.dtype) -> LossScale | None:
    """Only float16 needs one: the others have the exponents of float32, or more."""
    return LossScale() if dtype == torch.float16 else None
