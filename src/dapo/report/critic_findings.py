"""What the critic of PPO and VAPO is worth: what it explains, and whether it learns from rewards or from itself."""

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
            f"Its values explain {explained:+.2f} of the variance of what they are to foretell; a constant explains 0.",
            f"{after_pretraining(v.run, 'try')} another algorithm.critic.lr; or do without: preset = dapo.",
            v.last_steps,
            ("critic/explained_variance", "critic/loss"),
        )
    accuracy, before, length = v.last("accuracy") or 0.0, v.middle("accuracy") or 0.0, v.last("length/mean")
    is_stuck = accuracy < v.t.entropy_excused_accuracy and accuracy - before < v.t.improving
    lam, reach = critic_lambda(v.run), critic_reach(v.run)
    if is_stuck and length is not None and length > v.t.critic_reaches * reach:
        yield Finding(
            "critic-from-itself",
            WARNING,
            "The critic learns mostly from itself",
            f"With λ = {lam:g} a reward reaches about the last {reach:.0f} of a response's {length:.0f} tokens; before "
            f"them the critic is taught by its own values. Accuracy {before:.3f} half-way, {accuracy:.3f} now.",
            f"{after_pretraining(v.run, 'set')} algorithm.gae.lam_critic = 1.0, as preset = vapo does; or do without: "
            "preset = dapo.",
            v.whole,
            ("accuracy", "critic/explained_variance", "length/truncated"),
        )


def critic_lambda(run: RunRecord) -> float:
    """λ of the critic's targets: its own where it has one."""
    own = run.key("algorithm", "gae", "lam_critic", default="none")
    return float(run.key("algorithm", "gae", "lam", default=0.95) if own == "none" else own)


def critic_reach(run: RunRecord) -> float:
    """Tokens before the end over which Σ (γλ)^l has its weight: 1 / (1 − γλ)."""
    decay = float(run.key("algorithm", "gae", "gamma", default=1.0)) * critic_lambda(run)
    return math.inf if decay >= 1 else 1 / (1 - decay)


def after_pretraining(run: RunRecord, verb: str) -> str:
    """The advice's beginning: pretraining first, where the critic started from nothing."""
    has_start = run.key("algorithm", "critic", "path", default="none") != "none"
    if has_start or run.key("algorithm", "critic", "pretrain_steps", default=0):
        return verb.capitalize()
    return f"Pretrain it (algorithm.critic.pretrain_steps = 50) and {verb}"
