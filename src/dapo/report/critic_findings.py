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
            f"Its values explain {explained:+.2f} of the variance of their targets; a constant explains 0.",
            f"{after_pretraining(v.run, 'try')} another algorithm.critic.lr; or do without: preset = dapo.",
            v.last_steps,
            ("critic/explained_variance", "critic/loss"),
        )
    length = v.last("length/mean")
    reach = reward_reach(v.run, length or 0.0)
    if v.is_stuck and length is not None and length > v.t.reward_reaches * reach:
        is_adaptive = adaptive_alpha(v.run) is not None
        key = "algorithm.gae.length_adaptive_alpha" if is_adaptive else "algorithm.gae.lam"
        yield Finding(
            "short-reach",
            WARNING,
            "The reward reaches only the end of a response",
            f"By {key} about the last {reach:.0f} of a response's {length:.0f} tokens hear of its reward, the others "
            f"of what the critic makes of it; {v.progress}.",
            f"Set {key} = 1.0; or do without a critic: preset = dapo.",
            v.whole,
            ("accuracy", "length/truncated", "critic/explained_variance"),
        )


def adaptive_alpha(run: RunRecord) -> float | None:
    alpha = run.key("algorithm", "gae", "length_adaptive_alpha", default="none")
    return None if alpha == "none" else float(alpha)


def reward_reach(run: RunRecord, length: float) -> float:
    """Tokens over which Σ λ^l has its weight, 1 / (1 − λ). Beyond, only differences of the critic's values are left."""
    alpha = adaptive_alpha(run)
    if alpha is not None:
        return max(alpha * length, 1.0)
    lam = float(run.key("algorithm", "gae", "lam", default=0.95))
    return math.inf if lam >= 1 else 1 / (1 - lam)


def after_pretraining(run: RunRecord, verb: str) -> str:
    """The advice's beginning: pretraining first, where the critic started from nothing."""
    has_start = run.key("algorithm", "critic", "path", default="none") != "none"
    if has_start or run.key("algorithm", "critic", "pretrain_steps", default=0):
        return verb.capitalize()
    return f"Pretrain it (algorithm.critic.pretrain_steps = 50) and {verb}"
