"""Findings about the critic of PPO and VAPO: does it predict returns, and how much depends on it?"""

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
            "negative-explained-variance",
            WARNING,
            "The critic predicts returns worse than a constant",
            f"Explained variance {explained:+.2f}; predicting the mean return would give 0.",
            f"{after_pretraining(v.run, 'try')} another algorithm.critic.lr; or train without a critic: preset = dapo.",
            v.last_steps,
            ("critic/explained_variance", "critic/loss"),
        )
    gae, length = gae_of(v.run), v.last("length/mean")
    if length is not None and is_short(gae, length):
        alpha = gae.length_adaptive_alpha
        by = f"lam = {gae.lam:g}" if alpha is None else f"length_adaptive_alpha = {alpha:g}"
        yield Finding(
            "short-gae-horizon",
            WARNING,
            "The effective GAE horizon is short",
            f"With algorithm.gae.{by} the reward reaches about the last {horizon(gae, length):.0f} of "
            f"{length:.0f} tokens; the others learn from the critic's values alone"
            + (f"; {v.progress}." if v.is_stuck and v.progress is not None else "."),
            f"Try {longer(gae)}; or train without a critic: preset = dapo.",
            v.whole,
            ("accuracy", "length/truncated", "critic/explained_variance"),
        )


def gae_of(run: RunRecord) -> GaeConfig:
    """The run's GAE settings; the defaults where they are not valid."""
    keys = {key: run.key("algorithm", "gae", key) for key in GaeConfig.model_fields}
    try:
        return GaeConfig(**{key: value for key, value in keys.items() if value is not None})
    except ValidationError:
        return GaeConfig()


def after_pretraining(run: RunRecord, verb: str) -> str:
    """The beginning of the remedy: value pretraining first, unless the critic had some."""
    has_start = run.key("algorithm", "critic", "path", default="none") != "none"
    if has_start or run.key("algorithm", "critic", "pretrain_responses", default=0):
        return verb.capitalize()
    return f"Pretrain it (algorithm.critic.pretrain_responses = 4096) and {verb}"
