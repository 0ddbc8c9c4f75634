"""The policy losses as their papers write them, for one response, and worked values: tests and reference share them.

Nothing here is shared with `dapo.algorithms`. A new loss needs its formula and its worked values here; what every loss
must do is in `tests/paper/test_policy_losses.py`, whole steps with it in `tests/reference`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Response:
    """log π_θ, log π_old and Â of a response's tokens, [T] each, and the bounds of the config."""

    logp: Tensor
    logp_old: Tensor
    advantage: Tensor
    low: float | None
    high: float
    dual: float | None = None

    def bounded(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(max=1 + self.high) if self.low is None else ratio.clamp(1 - self.low, 1 + self.high)

    def pessimistic(self, ratio: Tensor) -> Tensor:
        """PPO's objective of a ratio: min(r Â, clip(r) Â), with the dual clip (arXiv:1912.09729) where there is one."""
        gain = torch.minimum(ratio * self.advantage, self.bounded(ratio) * self.advantage)
        return gain if self.dual is None else torch.where(self.advantage < 0, gain.clamp(min=self.floor), gain)

    @property
    def floor(self) -> Tensor:
        return (self.dual or 0.0) * self.advantage


def ratio_of(logp: Tensor, other: Tensor) -> Tensor:
    return torch.exp((logp - other).clamp(-20, 20))


def clip(o: Response) -> Tensor:
    """DAPO eq. 10."""
    return -o.pessimistic(ratio_of(o.logp, o.logp_old))


def cispo(o: Response) -> Tensor:
    """MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5."""
    return -(o.bounded(ratio_of(o.logp.detach(), o.logp_old)) * o.advantage * o.logp)


def gspo(o: Response) -> Tensor:
    """GSPO (arXiv:2507.18071), eq. 5 and 7: s is the |o|-th root of the ratio of the whole response's probabilities."""
    s = ratio_of(o.logp.sum() / len(o.logp), o.logp_old.sum() / len(o.logp))
    return -o.pessimistic(s.repeat(len(o.logp)))


def gspo_token(o: Response) -> Tensor:
    """GSPO eq. 13 and 14: the response's ratio as a number, the token's gradient."""
    s = ratio_of(o.logp.mean(), o.logp_old.mean()).detach()
    return -o.pessimistic(s * torch.exp(o.logp) / torch.exp(o.logp).detach())


def reinforce(o: Response) -> Tensor:
    """Williams (1992), with a baseline."""
    return -(o.advantage * o.logp)


FORMULAS: dict[str, Callable[[Response], Tensor]] = {
    "clip": clip,
    "cispo": cispo,
    "gspo": gspo,
    "gspo-token": gspo_token,
    "reinforce": reinforce,
}


@dataclass(frozen=True)
class Worked:
    """π_θ and π_old of a response's tokens, one Â; the loss of each token, and the gradient of their sum by log π_θ."""

    p: list[float]
    q: list[float]
    advantage: float
    loss: list[float]
    gradient: list[float]
    bounds: dict[str, Any] = field(default_factory=lambda: {"clip_low": 0.2, "clip_high": 0.28})


UNBOUNDED = {"clip_low": None, "clip_high": 4.0}
ROOT = math.sqrt(2)
WORKED: dict[str, list[Worked]] = {
    "clip": [
        Worked([0.3], [0.2], 2.0, [-2.56], [0.0]),  # r = 1.5 above 1.28: −1.28 · 2, no gradient
        Worked(
            [0.3, 0.1], [0.2, 0.2], -1.0, [1.5, 0.8], [1.5, 0.0]
        ),  # wrong: a risen token is pushed down, a low one not
    ],
    "cispo": [
        Worked([0.3], [0.2], 2.0, [-2.56 * math.log(0.3)], [-2.56]),  # the weight is 1.28, and the gradient stays
        Worked([0.1], [0.4], -1.0, [0.25 * math.log(0.1)], [0.25], UNBOUNDED),  # r = 1/4 is its own weight
        Worked([0.1], [0.4], -1.0, [0.8 * math.log(0.1)], [0.8]),  # with a lower bound: 0.8
        Worked([0.7], [0.1], 1.0, [-5 * math.log(0.7)], [-5.0], UNBOUNDED),  # r = 7: TRL's ε_high of 5 is 1 + 4
    ],
    "gspo": [
        Worked([0.4, 0.1], [0.2, 0.1], 1.0, [-1.28, -1.28], [0.0, 0.0]),  # s = √(2 · 1) above 1.28
        Worked([0.4, 0.1], [0.2, 0.1], -1.0, [ROOT, ROOT], [ROOT, ROOT]),  # two losses, s/2 of each for each token
        Worked([0.4, 0.1], [0.2, 0.2], 3.0, [-3.0, -3.0], [-3.0, -3.0]),  # ratios 2 and 1/2: s = 1, nothing is clipped
    ],
    "gspo-token": [
        Worked([0.4, 0.1], [0.2, 0.1], 1.0, [-1.28, -1.28], [0.0, 0.0]),
        Worked([0.4, 0.1], [0.2, 0.1], -1.0, [ROOT, ROOT], [ROOT, ROOT]),  # one Â: the same as GSPO
    ],
    "reinforce": [
        Worked(
            [0.3, 0.1], [0.2, 0.4], 2.0, [-2 * math.log(0.3), -2 * math.log(0.1)], [-2.0, -2.0]
        ),  # whatever π_old is
    ],
}
