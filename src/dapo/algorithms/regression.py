"""Ridge regression from sums: where a critic's head begins."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.algorithms.shapes import check_shapes

# Of the penalty, in mean squares of a feature; the first leaves the constant alone.
STRENGTHS = (math.inf, *(10.0**k for k in range(1, -7, -1)))


@dataclass(slots=True)
class RidgeSums:
    """XᵀX [F, H, H], Xᵀy [F, H] and yᵀy [F] of F folds, in float64; the last of the H features is a constant."""

    gram: Tensor
    moment: Tensor
    square: Tensor

    @classmethod
    def empty(cls, folds: int, features: int, device: torch.device | str = "cpu") -> "RidgeSums":
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(zeros(folds, features, features), zeros(folds, features), zeros(folds))

    @torch.no_grad()
    def add(self, x: Tensor, y: Tensor, fold: Tensor) -> None:
        """Tokens with their features [N, H], their targets [N] and the fold of each [N]."""
        check_shapes("N", y, fold)
        for f in range(len(self.square)):
            chosen, target = x[fold == f].to(self.gram), y[fold == f].to(self.gram)
            self.gram[f] += chosen.T @ chosen
            self.moment[f] += chosen.T @ target
            self.square[f] += target @ target


def ridge(sums: RidgeSums) -> Tensor:
    """argmin_w ‖y − Xw‖² + s·‖w‖², [H], with the s of `STRENGTHS` that predicts each fold best from the others.

    The constant's weight is not in the penalty. Nothing but the sums is needed for that: on any fold
    ‖y − Xw‖² = yᵀy − 2wᵀXᵀy + wᵀXᵀXw. Tokens of one problem belong into one fold, else s is chosen for what is
    memorized. A weaker penalty must predict better by more than rounding.
    """
    scale = float(sums.gram.sum(dim=0).diagonal().mean())
    if not scale:
        return torch.zeros_like(sums.moment[0])
    best, least = math.inf, math.inf
    for s in STRENGTHS:
        miss = sum(float(left_out_miss(sums, f, s * scale)) for f in range(len(sums.square)))
        if miss < least - 1e-9 * float(sums.square.sum()):
            best, least = s, miss
    return solve(sums.gram.sum(dim=0), sums.moment.sum(dim=0), best * scale)


def left_out_miss(sums: RidgeSums, fold: int, strength: float) -> Tensor:
    """‖y − Xw‖² of a fold, by the w of all others."""
    gram, moment = sums.gram[fold], sums.moment[fold]
    w = solve(sums.gram.sum(dim=0) - gram, sums.moment.sum(dim=0) - moment, strength)
    return sums.square[fold] - 2 * w @ moment + w @ gram @ w


def solve(gram: Tensor, moment: Tensor, strength: float) -> Tensor:
    if math.isinf(strength):  # the mean, 0 of nothing
        alone = torch.zeros_like(moment)
        alone[-1] = moment[-1] / gram[-1, -1].clamp(min=1)
        return alone
    penalty = torch.full_like(moment, strength)
    penalty[-1] = 0 if gram[-1, -1] > 0 else 1  # a mean is not shrunk, unless there is none
    w: Tensor = torch.linalg.solve(gram + penalty.diag(), moment)
    return w
