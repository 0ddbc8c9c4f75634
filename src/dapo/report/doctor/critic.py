"""What the critic of PPO and VAPO is worth, and how much is left to it."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from dapo.config.horizon import horizon, is_short, longer
from dapo.config.schema import GaeConfig
from dapo.report.doctor.findings import WARNING, Finding, Visit
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
    gae, length = gae_of(v.run), v.last("length/mean")
    if length is not None and is_short(gae, length):
        alpha = gae.length_adaptive_alpha
        by = f"lam = {gae.lam:g}" if alpha is None else f"length_adaptive_alpha = {alpha:g}"
        yield Finding(
            "short-reach",
            WARNING,
            "The reward reaches only the end of a response",
            f"By algorithm.gae.{by} about the last {horizon(gae, length):.0f} of a response's {length:.0f} tokens "
            f"hear of its reward, the others of what the critic makes of it"
            + (f"; {v.progress}." if v.is_stuck and v.progress is not None else "."),
            f"Try {longer(gae)}; or do without a critic: preset = dapo.",
            v.whole,
            ("accuracy", "length/truncated", "critic/explained_variance"),
        )


def gae_of(run: RunRecord) -> GaeConfig:
    """The run's settings, as far as they are what they should be."""
    keys = {key: run.key("algorithm", "gae", key) for key in GaeConfig.model_fields}
    try:
        return GaeConfig(**{key: value for key, value in keys.items() if value is not None})
    except ValidationError:
        return GaeConfig()


def after_pretraining(run: RunRecord, verb: str) -> str:
    """The advice's beginning: pretraining first, where the critic started from nothing."""
    has_start = run.key("algorithm", "critic", "path", default="none") != "none"
    if has_start or run.key("algorithm", "critic", "pretrain_responses", default=0):
        return verb.capitalize()
    return f"Pretrain it (algorithm.critic.pretrain_responses = 4096) and {verb}"
