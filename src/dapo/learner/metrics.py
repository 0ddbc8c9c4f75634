"""The metrics of a step's updates, from sums over its micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from dapo.algorithms.diagnostics import (
    ClippedTokens,
    clipped_high_probability,
    effective_sample_size,
    mean_probability,
    trainer_engine_gap,
)
from dapo.algorithms.losses import importance_weight, kl_penalty
from dapo.config.schema import Config
from dapo.learner.batch import Batch
from dapo.learner.step import Step
from dapo.learner.sums import Sums


def observe_tokens(sums: Sums, logp: Tensor, logp_old: Tensor, clipped: ClippedTokens) -> None:
    """Add up what an update did to its tokens, [N] each."""
    probability = clipped_high_probability(logp, clipped)
    sums.add(
        tokens=logp.numel(),
        kl_old=kl_penalty(logp_old, logp, kind="k1").sum(),  # the tokens were drawn from π_old
        low=clipped.low.sum(),
        high=clipped.high.sum(),
        dual=clipped.dual.sum(),
        high_probability=probability.sum(),
    )
    sums.peak(high_probability=probability.max())


def summarise(step: Step, updates_before: int) -> dict[str, float]:
    """The step's metrics from the sums of all ranks. Where every update was skipped, none are about updates."""
    learner, sums = step.learner, step.sums.across(step.learner.world)
    metrics = {
        "lr": step.lr,
        "updates": learner.updates - updates_before,
        "updates_total": learner.updates,
        "policy/loss": sums.ratio("policy_loss", "updates"),
        "policy/grad_norm": sums.ratio("gradient_norm", "updates"),
        "policy/skipped_updates": sums.total("skipped"),
        "policy/kl_old": sums.ratio("kl_old", "tokens"),
        "clip/low": sums.ratio("low", "tokens"),
        "clip/high": sums.ratio("high", "tokens"),
        "clip/dual": sums.ratio("dual", "tokens"),
        "clip/high_probability_mean": sums.ratio("high_probability", "high"),
        "clip/high_probability_max": float(sums.largest.get("high_probability", torch.zeros(()))),
    }
    scales = scale_metrics(step, sums)
    if sums.total("skipped") + sums.total("scale_skips") and not sums.total("updates"):
        kept = ("lr", "updates", "updates_total", "policy/skipped_updates")
        return {name: metrics[name] for name in kept} | scales | score_metrics(step.batch, step.config)
    if "kl_ref" in sums.sums:
        metrics["policy/kl_ref"] = sums.ratio("kl_ref", "updates")
    if "positive_nll" in sums.sums:
        metrics["policy/positive_nll"] = sums.ratio("positive_nll", "updates")
    if sums.total("critic_updates"):
        metrics["critic/loss"] = sums.ratio("critic_loss", "critic_updates")
        metrics["critic/grad_norm"] = sums.ratio("critic_gradient_norm", "critic_updates")
    return metrics | scales | score_metrics(step.batch, step.config)


def scale_metrics(step: Step, sums: Sums) -> dict[str, float]:
    """Of float16: the loss scales after the step, and what the search for them cost."""
    critic, scale = step.learner.critic, step.learner.optimizer.loss_scale
    if scale is None:
        return {}
    metrics = {"update/loss_scale": scale.value, "update/scale_skips": sums.total("scale_skips")}
    if critic is not None and critic.optimizer.loss_scale is not None:
        metrics["update/critic_loss_scale"] = critic.optimizer.loss_scale.value
    return metrics


def score_metrics(batch: Batch, config: Config) -> dict[str, float]:
    """Of the π_old pass over all tokens: entropy, probability, the gap to the engine's log-probs, importance weights.

    The weights are measured without a correction too: then they are the ratios themselves, and what one would do.
    """
    if not sum(batch.lengths):
        return {}
    both = batch.logp_trainer.flat, batch.logp_engine.flat
    gap = trainer_engine_gap(*both)
    weight = importance_weight(*both, batch.lengths, **config.algorithm.correction.weights).double()
    kl = {}
    if batch.logp_ref is not None:
        kl["policy/kl_ref"] = float(kl_penalty(batch.logp_trainer.flat, batch.logp_ref.flat, kind="k1").mean())
    return kl | {
        "policy/entropy": float(batch.entropy.flat.mean()),
        "policy/probability": float(mean_probability(batch.logp_trainer.flat)),
        "engine/gap_mean": float(gap.mean),
        "engine/gap_max": float(gap.max),
        "engine/kl": float(gap.kl),
        "engine/effective_sample_size": effective_sample_size(
            float(weight.sum()), float((weight**2).sum()), n=weight.numel()
        ),
        "engine/masked": float((weight == 0).double().mean()),
    }
