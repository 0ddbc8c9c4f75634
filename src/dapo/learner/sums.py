"""Sums over the micro-batches of a step: denominators counted before, observations divided once at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dapo.algorithms.diagnostics import (
    ClippedTokens,
    clipped_high_probability,
    effective_sample_size,
    mean_probability,
    trainer_engine_gap,
)
from dapo.algorithms.losses import kl_penalty
from dapo.distributed.world import World
from dapo.learner.batch import Batch
from dapo.learner.learner import Learner


@dataclass(slots=True)
class Totals:
    """The denominators of one update, counted before its micro-batch loop: all micro-batches divide by the same."""

    tokens: int
    sequences: int
    prompts: int
    group_tokens: Tensor  # [P]
    positive_tokens: int

    @classmethod
    def of(cls, batch: Batch, rows: Sequence[int]) -> Totals:
        tokens = torch.zeros(len(batch.groups), dtype=torch.long)
        for row in rows:
            tokens[batch.group[row]] += batch.lengths[row]
        return cls(
            tokens=sum(batch.lengths[row] for row in rows),
            sequences=len(rows),
            prompts=int((tokens > 0).sum()),
            group_tokens=tokens,
            positive_tokens=sum(batch.lengths[row] for row in rows if batch.is_correct[row]),
        )


@dataclass(slots=True)
class Sums:
    """Sums and counts over the micro-batches of a step; divided once, at the end.

    They stay where the micro-batches are, in float64: reading one would make the host wait for the device.
    """

    sums: dict[str, Tensor | float] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            exact = value.detach().double() if isinstance(value, Tensor) else float(value)
            self.sums[name] = self.sums[name] + exact if name in self.sums else exact

    def peak(self, **values: Tensor) -> None:
        for name, value in values.items():
            exact = value.detach().double()
            self.largest[name] = torch.maximum(self.largest[name], exact) if name in self.largest else exact

    def total(self, name: str) -> float:
        return float(self.sums.get(name, 0.0))

    def ratio(self, name: str, per: str) -> float:
        return self.total(name) / self.total(per) if self.total(per) else 0.0

    def merge(self, other: Sums) -> None:
        self.add(**other.sums)
        self.peak(**other.largest)

    def across(self, world: World) -> Sums:
        """Sums over the ranks, largest of the ranks', on the host."""
        own = self.read()
        if world.size == 1:
            return own
        made = Sums()
        peaks = {name: float(value) for name, value in own.largest.items()}
        for sums, largest in world.gather([own.sums, peaks]):
            made.add(**sums)
            made.peak(**{name: torch.tensor(value, dtype=torch.float64) for name, value in largest.items()})
        return made

    def read(self) -> Sums:
        """All of them on the host, fetched together."""
        names = [name for name, value in self.sums.items() if isinstance(value, Tensor)]
        values = [torch.as_tensor(value) for value in (*(self.sums[name] for name in names), *self.largest.values())]
        fetched = torch.stack(values).cpu() if values else torch.empty(0)
        sums = dict(zip(names, fetched[: len(names)].tolist(), strict=True))
        return Sums(self.sums | sums, dict(zip(self.largest, fetched[len(names) :].unbind(), strict=True)))


def observe_tokens(sums: Sums, logp: Tensor, logp_old: Tensor, clipped: ClippedTokens) -> None:
    """[N] each: what the updates did to the tokens, as sums."""
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


def summarise(batch: Batch, sums: Sums, lr: float, learner: Learner, start: int) -> dict[str, float]:
    """The step's metrics from its sums. Where every update was skipped, there is nothing to say of updates."""
    metrics = {
        "lr": lr,
        "updates": learner.updates - start,
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
    if sums.total("skipped") and not sums.total("updates"):
        said = ("lr", "updates", "updates_total", "policy/skipped_updates")
        return {name: metrics[name] for name in said} | score_metrics(batch)
    if "kl_ref" in sums.sums:
        metrics["policy/kl_ref"] = sums.ratio("kl_ref", "updates")
    if "positive_nll" in sums.sums:
        metrics["policy/positive_nll"] = sums.ratio("positive_nll", "updates")
    if sums.total("weights"):
        metrics["engine/effective_sample_size"] = effective_sample_size(
            sums.total("weight"), sums.total("weight_squared"), n=sums.total("weights")
        )
    if sums.total("critic_updates"):
        metrics["critic/loss"] = sums.ratio("critic_loss", "critic_updates")
        metrics["critic/grad_norm"] = sums.ratio("critic_gradient_norm", "critic_updates")
    return metrics | score_metrics(batch)


def score_metrics(batch: Batch) -> dict[str, float]:
    """What the π_old pass says of all tokens: entropy, probability, and how far the engine's log-probs are off."""
    if not sum(batch.lengths):
        return {}
    gap = trainer_engine_gap(batch.logp_trainer.flat, batch.logp_engine.flat)
    return {
        "policy/entropy": float(batch.entropy.flat.mean()),
        "policy/probability": float(mean_probability(batch.logp_trainer.flat)),
        "engine/gap_mean": float(gap.mean),
        "engine/gap_max": float(gap.max),
        "engine/kl": float(gap.kl),
    }
