"""What the critic of PPO and VAPO is worth, and how much is left to it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dapo.report.findings import WARNING, Finding, Visit
from dapo.report.load import RunRecord


def critic(v: Visit) -> Iterator[Finding]:
    explained = v.last("critic/explained_variance")
    if explained is None:
        return
    if explained < v.t.critic_explained:
        yield Finding(
            "critic-worse-than-none",
            WARNING,
            "The critic is worse than none",
            f"Its values explain {explained:+.2f} of the variance of what came out; a constant explains 0.",
            f"{after_pretraining(v.run, 'try')} another algorithm.critic.lr; or do without: preset = dapo.",
            v.last_steps,
            ("critic/explained_variance", "critic/loss"),
        )
    progress, length = v.progress, v.last("length/mean")
    if not v.is_stuck or progress is None or not progress.is_accuracy or length is None:
        return
    alpha, discount, reach = alpha_of(v.run), gamma_of(v.run), reward_reach(v.run, length)
    # VAPO's λ grows with the length and always has a short reach: only where it has gained nothing from the start.
    has_gained = alpha is not None and progress.now >= (v.first("accuracy") or 0.0) + v.t.improving
    if length > v.t.reward_reaches * reach and not has_gained:
        key, value = ("lam", lam_of(v.run)) if alpha is None else ("length_adaptive_alpha", alpha)
        longer = [f"algorithm.gae.{key} = 1.0"] if value < 1 else []
        longer += [f"algorithm.gae.gamma = 1.0 (now {discount:g})"] if discount < 1 else []
        yield Finding(
            "short-reach",
            WARNING,
            "The reward reaches only the end of a response",
            f"By algorithm.gae.{key} = {value:g} about the last {reach:.0f} of a response's {length:.0f} tokens "
            f"hear of its reward, the others of what the critic makes of it; {progress}.",
            f"Try {' and '.join(longer)}; or do without a critic: preset = dapo.",
            v.whole,
            ("accuracy", "length/truncated", "critic/explained_variance"),
        )


def lam_of(run: RunRecord) -> float:
    return float(run.key("algorithm", "gae", "lam", default=0.95))


def alpha_of(run: RunRecord) -> float | None:
    """Of VAPO's λ = 1 − 1/(α·length); None where one λ stands for all lengths."""
    alpha = run.key("algorithm", "gae", "length_adaptive_alpha", default="none")
    return None if alpha == "none" else float(alpha)


def gamma_of(run: RunRecord) -> float:
    return float(run.key("algorithm", "gae", "gamma", default=1.0))


def reward_reach(run: RunRecord, length: float) -> float:
    """Tokens of a response over which Σ (γλ)^l has its weight: 1 / (1 − γλ)."""
    alpha = alpha_of(run)
    lam = lam_of(run) if alpha is None else 1 - 1 / max(1.0, alpha * length)
    decay = gamma_of(run) * lam
    return math.inf if decay >= 1 else 1 / (1 - decay)


def after_pretraining(run: RunRecord, verb: str) -> str:
    """The advice's beginning: pretraining first, where the critic started from nothing."""
    has_start = run.key("algorithm", "critic", "path", default="none") != "none"
    if has_start or run.key("algorithm", "critic", "pretrain_steps", default=0):
        return verb.capitalize()
    return f"Pretrain it (algorithm.critic.pretrain_steps = 50) and {verb}"
