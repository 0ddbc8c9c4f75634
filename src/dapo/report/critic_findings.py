"""What the critic of PPO and VAPO is worth, and how much is left to it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dapo.report.findings import WARNING, Finding, Visit
from dapo.report.load import RunRecord


def critic(v: Visit) -> Iterator[Finding]:
    explained = v.last("critic/explained_variance")
    if not v.has_trend or explained is None:
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
    progress, length, reach = v.progress, v.last("length/mean"), reward_reach(v.run)
    is_stuck = v.is_stuck and progress is not None and progress.is_accuracy
    if is_stuck and length is not None and length > v.t.reward_reaches * reach:
        discount = gamma_of(v.run)
        also = f" and algorithm.gae.gamma = 1.0 (now {discount:g})" if discount < 1 else ""
        yield Finding(
            "short-reach",
            WARNING,
            "The reward reaches only the end of a response",
            f"By algorithm.gae.lam = {lam_of(v.run):g} about the last {reach:.0f} of a response's {length:.0f} tokens "
            f"hear of its reward, the others of what the critic makes of it; {progress}.",
            f"Try algorithm.gae.lam = 1.0{also}; or do without a critic: preset = dapo.",
            v.whole,
            ("accuracy", "length/truncated", "critic/explained_variance"),
        )


def lam_of(run: RunRecord) -> float:
    return float(run.key("algorithm", "gae", "lam", default=0.95))


def gamma_of(run: RunRecord) -> float:
    return float(run.key("algorithm", "gae", "gamma", default=1.0))


def reward_reach(run: RunRecord) -> float:
    """Tokens over which Σ (γλ)^l has its weight, 1 / (1 − γλ). VAPO's λ, which adapts to the length, is left alone."""
    decay = gamma_of(run) * lam_of(run)
    is_adaptive = run.key("algorithm", "gae", "length_adaptive_alpha", default="none") != "none"
    return math.inf if is_adaptive or decay >= 1 else 1 / (1 - decay)


def after_pretraining(run: RunRecord, verb: str) -> str:
    """The advice's beginning: pretraining first, where the critic started from nothing."""
    has_start = run.key("algorithm", "critic", "path", default="none") != "none"
    if has_start or run.key("algorithm", "critic", "pretrain_steps", default=0):
        return verb.capitalize()
    return f"Pretrain it (algorithm.critic.pretrain_steps = 50) and {verb}"
