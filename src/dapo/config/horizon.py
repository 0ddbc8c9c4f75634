"""The effective GAE horizon: how far a reward reaches back into a response, and when that is too little."""

from __future__ import annotations

import math

from dapo.config.schema import GaeConfig

ENOUGH_TOKENS, SHORT_FRACTION = 400.0, 0.2


def horizon(gae: GaeConfig, length: float) -> float:
    """Σ_t (γλ)^t = 1 / (1 − γλ): the tokens before the end that the reward reaches; the others depend on V alone."""
    lam = gae.lam
    if gae.length_adaptive_alpha is not None:
        lam = 1 - 1 / max(gae.length_adaptive_alpha * length, gae.length_adaptive_floor)
    return 1 / (1 - gae.gamma * lam) if gae.gamma * lam < 1 else math.inf


def is_short(gae: GaeConfig, length: float) -> bool:
    """Whether the horizon is below a fifth of a response of `length` tokens, and below 400 tokens.

    With λ = 0.95, 20 tokens, and with VAPO's λ, 15, a model of 1.5 B got worse on responses of 300: docs/results.md.
    From 400 on, which is 8,000 tokens at α = 0.05, VAPO's λ is known to work.
    """
    return horizon(gae, length) < min(ENOUGH_TOKENS, SHORT_FRACTION * length)


def longer(gae: GaeConfig) -> str:
    """The settings that lengthen the horizon."""
    is_adaptive = gae.length_adaptive_alpha is not None
    key = f"length_adaptive_floor = {ENOUGH_TOKENS:g}" if is_adaptive else "lam = 1.0"
    is_lam_short = gae.length_adaptive_floor < ENOUGH_TOKENS if is_adaptive else gae.lam < 1
    steps = [f"algorithm.gae.{key}"] if is_lam_short else []
    steps += [f"algorithm.gae.gamma = 1.0 (now {gae.gamma:g})"] if gae.gamma < 1 else []
    return " and ".join(steps)
