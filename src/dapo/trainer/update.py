"""One step's updates: π_old once, then mini-batches of micro-batches under one global normaliser each."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dapo.algorithms.aggregate import constant_norm, prompt_mean, sequence_mean, token_mean
from dapo.algorithms.diagnostics import ClippedTokens, clipped_tokens
from dapo.algorithms.losses import clipped_surrogate, importance_weight, kl_penalty, positive_nll
from dapo.config.schema import Config
from dapo.errors import EngineError
from dapo.models.packing import pack
from dapo.models.policy import Policy
from dapo.trainer.batch import Batch, deal_microbatches, deal_minibatches
from dapo.trainer.optimizer import Optimizer, UpdateOutcome, warmup_lr
from dapo.trainer.ragged import Ragged, pad_flat, token_mask
from dapo.trainer.value import ValueLearner, Values, estimate_advantages, explained_variance, value_share


@dataclass(slots=True)
class Learner:
    """What learns, and how far it has come."""

    policy: Policy
    optimizer: Optimizer
    reference: Policy | None = None  # frozen; only with a KL term
    value: ValueLearner | None = None  # the critic; only with GAE
    updates: int = 0  # optimizer updates since the start; the version of the weights
    bad_updates: int = 0  # skipped in a row


@dataclass(slots=True)
class StepRecord:
    """What the updates saw of each token the first time: for the rollout browser."""

    ratio: Ragged
    clip: Ragged  # −1, 0, +1


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
    """Sums and counts over the micro-batches of a step; divided once, at the end."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    largest: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            self.sums[name] += float(value.detach()) if isinstance(value, Tensor) else value

    def peak(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            self.largest[name] = max(self.largest[name], float(value))

    def ratio(self, name: str, per: str) -> float:
        return self.sums[name] / self.sums[per] if self.sums[per] else 0.0


Progress = Callable[[int, int], None]  # (updates done, updates of the step)


def update_policy(
    learner: Learner,
    batch: Batch,
    config: Config,
    *,
    step: int,
    record: StepRecord | None = None,
    progress: Progress = lambda _done, _all: None,
) -> dict[str, float]:
    """Run all updates of a step; returns its metrics. Nothing to train on means no update and no error."""
    start = time.perf_counter()
    score_old(learner, batch, config)
    values = estimate_values(learner, batch, config)
    scored = time.perf_counter()
    sums, first = Sums(), learner.updates
    lr = warmup_lr(config.train.lr, step, config.train.warmup_steps)
    deals = [
        minibatch
        for epoch in range(config.train.epochs_per_step)
        for minibatch in deal_minibatches(
            len(batch.groups), config.train.updates_per_step, seed=config.train.seed, step=step, epoch=epoch
        )
    ]
    for done, groups in enumerate(deals):
        rows = [row for row in batch.rows_of(groups) if batch.is_in_loss[row]]
        if rows:
            if values is not None:
                update_critic(learner, batch, values, rows, config, sums)
            update_once(learner, batch, rows, config, lr, sums, record)
        progress(done + 1, len(deals))
    metrics = summarise(batch, sums, lr, learner, first)
    if values is not None:
        metrics["critic/explained_variance"] = explained_variance(batch, values)
    metrics["timing.old_logp_s"] = scored - start
    metrics["timing.update_s"] = time.perf_counter() - scored
    return metrics


def score_old(learner: Learner, batch: Batch, config: Config) -> None:
    """π_old: the trainer's own log-probs of every token, once, before the first update; or the engine's (bypass)."""
    budget = config.train.tokens_per_microbatch
    for rows in deal_microbatches(batch, range(len(batch.lengths)), budget):
        with torch.no_grad():
            logp, entropy = score(learner.policy, batch, rows, config)
        batch.logp_old.put(rows, logp)
        batch.entropy.put(rows, entropy)
    batch.logp_trainer = batch.logp_old.flat
    if config.algorithm.old_logp == "bypass":
        batch.logp_old.flat = batch.logp_engine.flat.clone()


def estimate_values(learner: Learner, batch: Batch, config: Config) -> Values | None:
    """With a critic: its values, its targets, and the advantages by GAE."""
    if learner.value is None or not batch.lengths:
        return None
    logp_ref = None
    if learner.reference is not None and config.algorithm.kl.place == "reward":
        logp_ref = Ragged(batch.lengths, batch.logp_old.flat.dtype)
        for rows in deal_microbatches(batch, range(len(batch.lengths)), config.train.tokens_per_microbatch):
            with torch.no_grad():
                logp_ref.put(rows, score(learner.reference, batch, rows, config)[0])
    return estimate_advantages(learner.value.critic, batch, config, logp_ref)


def score(policy: Policy, batch: Batch, rows: Sequence[int], config: Config) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the rows' response tokens, end to end."""
    packed = pack([batch.prompts[row] for row in rows], [batch.responses[row] for row in rows], policy.device)
    logp, entropy = policy(packed, temperature=config.sampling.temperature)
    return logp, entropy


def update_once(
    learner: Learner,
    batch: Batch,
    rows: Sequence[int],
    config: Config,
    lr: float,
    sums: Sums,
    record: StepRecord | None,
) -> None:
    """One optimizer update over `rows`, in as many micro-batches as the token budget asks for."""
    totals = Totals.of(batch, rows)
    for micro in deal_microbatches(batch, rows, config.train.tokens_per_microbatch):
        loss = microbatch_loss(learner, batch, micro, totals, config, sums, record)
        loss.backward()
    outcome = learner.optimizer.step(lr)
    sums.add(updates=1, gradient_norm=outcome.gradient_norm if not outcome.is_skipped else 0.0)
    count_bad(learner, outcome, config, sums)
    learner.updates += not outcome.is_skipped


def count_bad(learner: Learner, outcome: UpdateOutcome, config: Config, sums: Sums) -> None:
    """A skipped update is counted; too many in a row, of policy or critic, stop the run."""
    if not outcome.is_skipped:
        learner.bad_updates = 0
        return
    learner.bad_updates += 1
    sums.add(skipped=1)
    if learner.bad_updates > config.train.max_bad_updates:
        raise EngineError(
            f"{learner.bad_updates} updates in a row had a gradient that is not finite.",
            remedy="The newest checkpoint is from before. Lower train.lr, or try model.dtype = float32.",
        )


def update_critic(
    learner: Learner, batch: Batch, values: Values, rows: Sequence[int], config: Config, sums: Sums
) -> None:
    """One update of the critic over the same rows, by its own optimizer at its own learning rate."""
    assert learner.value is not None, "values come from a critic"
    critic = config.algorithm.critic
    totals = Totals.of(batch, rows)
    for micro in deal_microbatches(batch, rows, config.train.tokens_per_microbatch):
        token_loss, _, mask = value_share(learner.value, batch, values, micro, clip=critic.value_clip)
        loss = mean(token_loss, mask, batch, micro, totals, config)
        loss.backward()
        sums.add(critic_loss=loss)
    outcome = learner.value.optimizer.step(critic.lr)
    sums.add(critic_updates=1, critic_gradient_norm=0.0 if outcome.is_skipped else outcome.gradient_norm)
    count_bad(learner, outcome, config, sums)


def microbatch_loss(
    learner: Learner,
    batch: Batch,
    rows: Sequence[int],
    totals: Totals,
    config: Config,
    sums: Sums,
    record: StepRecord | None,
) -> Tensor:
    """The micro-batch's share of the update's loss: shares add up to the loss of the whole update."""
    algorithm, device = config.algorithm, learner.policy.device
    lengths = [batch.lengths[row] for row in rows]
    flat, _ = score(learner.policy, batch, rows, config)
    logp = pad_flat(flat, lengths)  # [B, T]
    mask = token_mask(lengths, device)
    logp_old = batch.logp_old.padded(rows, device)
    advantage = batch.advantage.padded(rows, device)
    clip = algorithm.clip

    token_loss = clipped_surrogate(
        logp, logp_old, advantage, clip_low=clip.low, clip_high=clip.high, dual_clip=clip.dual
    )
    if algorithm.importance_cap is not None:
        weight = importance_weight(logp_old, batch.logp_engine.padded(rows, device), cap=algorithm.importance_cap)
        token_loss = token_loss * weight
        sums.add(weight=(weight * mask).sum(), weight_squared=(weight**2 * mask).sum(), weights=mask.sum())
    loss = mean(token_loss, mask, batch, rows, totals, config)
    sums.add(policy_loss=loss)
    if learner.reference is not None and algorithm.kl.place == "loss":
        with torch.no_grad():
            logp_ref = pad_flat(score(learner.reference, batch, rows, config)[0], lengths)
        kl = mean(kl_penalty(logp, logp_ref, kind=algorithm.kl.kind), mask, batch, rows, totals, config)
        loss = loss + algorithm.kl.coefficient * kl
        sums.add(kl_ref=kl)
    if algorithm.positive_nll:
        is_positive = mask & batch.is_correct[list(rows)].to(device)[:, None]
        nll = positive_nll(logp, is_positive, total_tokens=totals.positive_tokens)
        loss = loss + algorithm.positive_nll * nll
        sums.add(positive_nll=nll)
    clipped = clipped_tokens(logp, logp_old, advantage, clip_low=clip.low, clip_high=clip.high, dual_clip=clip.dual)
    observe_tokens(sums, logp.detach(), logp_old, clipped, mask)
    if record is not None:
        remember(record, rows, lengths, logp.detach() - logp_old, clipped)
    return loss


def mean(token_loss: Tensor, mask: Tensor, batch: Batch, rows: Sequence[int], totals: Totals, config: Config) -> Tensor:
    """The configured mean, over the whole update's counts."""
    match config.algorithm.mean:
        case "token":
            return token_mean(token_loss, mask, total_tokens=totals.tokens)
        case "sequence":
            return sequence_mean(token_loss, mask, total_sequences=totals.sequences)
        case "prompt":
            device = token_loss.device
            group, tokens = batch.group[list(rows)].to(device), totals.group_tokens.to(device)
            return prompt_mean(token_loss, mask, group, total_prompts=totals.prompts, group_tokens=tokens)
        case "constant":
            length = config.algorithm.mean_constant_tokens or config.limits.max_response_tokens
            return constant_norm(token_loss, mask, constant=totals.sequences * length)


def observe_tokens(sums: Sums, logp: Tensor, logp_old: Tensor, clipped: ClippedTokens, mask: Tensor) -> None:
    high = clipped.high & mask
    probability = torch.where(high, logp.exp(), 0.0)
    sums.add(
        tokens=mask.sum(),
        kl_old=torch.where(mask, logp_old - logp, 0.0).sum(),
        low=(clipped.low & mask).sum(),
        high=high.sum(),
        dual=(clipped.dual & mask).sum(),
        high_probability=probability.sum(),
    )
    sums.peak(high_probability=probability.max())


def remember(
    record: StepRecord, rows: Sequence[int], lengths: Sequence[int], log_ratio: Tensor, clipped: ClippedTokens
) -> None:
    """Ratio and clip of the first update that saw each token; later epochs do not overwrite it."""
    side = clipped.high.float() - (clipped.low | clipped.dual).float()
    for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if torch.isnan(record.ratio.row(row)[0]):
            record.ratio.row(row).copy_(log_ratio[at, :length].exp().cpu())
            record.clip.row(row).copy_(side[at, :length].cpu())


def summarise(batch: Batch, sums: Sums, lr: float, learner: Learner, start: int) -> dict[str, float]:
    """The step's metrics from its sums."""
    metrics = {
        "lr": lr,
        "updates": learner.updates - start,
        "updates_total": learner.updates,
        "policy/loss": sums.ratio("policy_loss", "updates"),
        "policy/gradient_norm": sums.ratio("gradient_norm", "updates"),
        "policy/skipped_updates": sums.sums["skipped"],
        "policy/kl_old": sums.ratio("kl_old", "tokens"),
        "clip/low": sums.ratio("low", "tokens"),
        "clip/high": sums.ratio("high", "tokens"),
        "clip/dual": sums.ratio("dual", "tokens"),
        "clip/high_probability_mean": sums.ratio("high_probability", "high"),
        "clip/high_probability_max": sums.largest["high_probability"],
    }
    if "kl_ref" in sums.sums:
        metrics["policy/kl_ref"] = sums.ratio("kl_ref", "updates")
    if "positive_nll" in sums.sums:
        metrics["policy/positive_nll"] = sums.ratio("positive_nll", "updates")
    if sums.sums["weights"]:
        squared = sums.sums["weights"] * sums.sums["weight_squared"]
        metrics["engine/effective_sample_size"] = sums.sums["weight"] ** 2 / squared
    if sums.sums["critic_updates"]:
        metrics["critic/loss"] = sums.ratio("critic_loss", "critic_updates")
        metrics["critic/gradient_norm"] = sums.ratio("critic_gradient_norm", "critic_updates")
    return metrics | score_metrics(batch)


def score_metrics(batch: Batch) -> dict[str, float]:
    """What the π_old pass says of all tokens: entropy, probability, and how far the engine's log-probs are off."""
    if not batch.lengths:
        return {}
    gap = batch.logp_trainer - batch.logp_engine.flat
    return {
        "policy/entropy": float(batch.entropy.flat.mean()),
        "policy/probability": float(batch.logp_trainer.exp().mean()),
        "engine/gap_mean": float(gap.abs().mean()),
        "engine/gap_max": float(gap.abs().max()),
        "engine/kl": float((torch.expm1(gap) - gap).mean()),
    }
