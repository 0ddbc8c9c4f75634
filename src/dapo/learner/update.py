"""One step's updates: π_old once, then mini-batches of micro-batches under one global normaliser each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo.algorithms.aggregate import constant_norm, prompt_mean, sequence_mean, token_mean
from dapo.algorithms.diagnostics import ClippedTokens, clipped_tokens
from dapo.algorithms.losses import clipped_surrogate, importance_weight, kl_penalty, policy_ratio, positive_nll
from dapo.config.schema import Config
from dapo.errors import EngineError
from dapo.learner.batch import Batch, deal_minibatches
from dapo.learner.critic import Values, explained_variance_of, value_losses
from dapo.learner.dealing import own_rows, share_rows
from dapo.learner.learner import Learner
from dapo.learner.memory import Event, fit_activations, within_memory
from dapo.learner.optimizer import UpdateOutcome, lr_share
from dapo.learner.ragged import Ragged
from dapo.learner.scoring import (
    advantages_by_gae,
    first_update_scores_old,
    keep_old,
    old_policy_stats,
    score,
    score_old,
)
from dapo.learner.sums import Sums, Totals, observe_tokens, summarise

Progress = Callable[[int, int], None]  # (updates done, updates of the step)


@dataclass(slots=True)
class StepRecord:
    """What the updates saw of each token the first time: for the rollout browser."""

    ratio: Ragged
    clip: Ragged  # −1, 0, +1


def update_policy(
    learner: Learner,
    batch: Batch,
    config: Config,
    *,
    step: int,
    record: StepRecord | None = None,
    progress: Progress = lambda _done, _all: None,
    event: Event = lambda _kind, _message: None,
) -> dict[str, float]:
    """Run all updates of a step; returns its metrics. Nothing to train on means no update and no error."""
    start = time.perf_counter()
    deals = [
        [row for row in batch.rows_of(groups) if batch.is_in_loss[row]]
        for epoch in range(config.train.epochs_per_step)
        for groups in deal_minibatches(
            len(batch.groups), config.train.updates_per_step, seed=config.train.seed, step=step, epoch=epoch
        )
    ]
    if config.train.gradient_checkpointing == "auto" and batch.lengths:
        fit_activations(learner, batch, config)
    first_rows = next((rows for rows in deals if rows), []) if first_update_scores_old(learner, config) else []
    score_old(learner, batch, config, deals=deals, skip=first_rows, event=event)
    values = advantages_by_gae(learner, batch, config, event, deals=deals)
    scored = time.perf_counter()
    sums, first = Sums(), learner.updates
    share = lr_share(config.train, step)
    lr, critic_lr = share * config.train.lr, share * config.critic_lr
    for done, rows in enumerate(deals):
        if rows:
            if values is not None:
                update_critic(learner, batch, values, rows, config, critic_lr, sums, event)
            update_once(learner, batch, rows, config, lr, sums, record, is_old=rows is first_rows, event=event)
            first_rows = []
        progress(done + 1, len(deals))
    if record is not None:
        share_record(learner, batch, deals, record)
    metrics = summarise(batch, sums.across(learner.world), lr, learner, first)
    if values is not None:
        in_loss = [row for row in range(len(batch.lengths)) if batch.is_in_loss[row]]
        metrics["critic/explained_variance"] = explained_variance_of(values, in_loss)
    batch.packs.clear()
    metrics["timing.old_logp_s"] = scored - start
    metrics["timing.update_s"] = time.perf_counter() - scored
    return metrics


def share_record(learner: Learner, batch: Batch, deals: Sequence[Sequence[int]], record: StepRecord) -> None:
    """What each rank has seen of a row's first update, for the rank that writes it down."""
    left = set(range(len(batch.lengths)))
    for deal in deals:
        rows = [row for row in deal if row in left]
        left -= set(rows)
        own = own_rows(batch, deal, learner.world)
        share_rows(learner.world, (record.ratio, record.clip), rows, own)


def update_once(
    learner: Learner,
    batch: Batch,
    rows: Sequence[int],
    config: Config,
    lr: float,
    sums: Sums,
    record: StepRecord | None,
    *,
    is_old: bool,
    event: Event,
) -> None:
    """One optimizer update over `rows`, in as many micro-batches as the token budget asks for.

    `is_old`: the weights still are π_old and nobody has scored these rows; the update does it on its way.
    """
    totals = Totals.of(batch, rows)

    def accumulate(budget: int) -> Sums:
        seen = Sums()
        micros = learner.microbatches(batch, rows, budget)
        for micro in micros:
            learner.set_gradient_sync(is_last=micro is micros[-1])
            said, noted = (Sums(), None) if micro.is_dummy else (seen, record)
            loss = microbatch_loss(learner, batch, micro.rows, totals, config, said, noted, is_old=is_old)
            (0 * loss if micro.is_dummy else loss).backward()
        return seen

    seen = within_memory(learner, batch, rows, config, accumulate, event, undo=learner.optimizer.zero_grad)
    if is_old:
        share_rows(learner.world, old_policy_stats(batch), rows, own_rows(batch, rows, learner.world))
    outcome = learner.optimizer.step(lr)
    if not outcome.is_skipped:  # what a skipped update saw says nothing of those that ran
        sums.merge(seen)
    if learner.world.is_first:  # counted once: sums are over the ranks
        if not outcome.is_skipped:
            sums.add(updates=1, gradient_norm=outcome.gradient_norm)
        sums.add(skipped=float(outcome.is_skipped))
    learner.bad_updates = count_bad(learner.bad_updates, outcome, config, of="the policy", lr="train.lr")
    learner.updates += not outcome.is_skipped


def count_bad(before: int, outcome: UpdateOutcome, config: Config, *, of: str, lr: str) -> int:
    """Updates skipped in a row; too many stop the run. Policy and critic each have their own count."""
    if not outcome.is_skipped:
        return 0
    if before + 1 > config.train.max_bad_updates:
        raise EngineError(
            f"{before + 1} updates in a row of {of} had a gradient that is not finite.",
            remedy=f"The newest checkpoint is from before. Lower {lr}, or try model.dtype = float32.",
        )
    return before + 1


def update_critic(
    learner: Learner,
    batch: Batch,
    values: Values,
    rows: Sequence[int],
    config: Config,
    lr: float,
    sums: Sums,
    event: Event,
) -> None:
    """One update of the critic over the same rows, by its own optimizer at its own learning rate."""
    assert learner.critic is not None, "values come from a critic"
    critic = learner.critic
    totals = Totals.of(batch, rows)

    def accumulate(budget: int) -> Sums:
        seen = Sums()
        for micro in learner.microbatches(batch, rows, budget):
            token_loss = value_losses(critic, batch, values, micro.rows, clip=config.algorithm.critic.value_clip)
            loss = aggregate_loss(token_loss, batch, micro.rows, totals, config)
            (0 * loss if micro.is_dummy else loss).backward()
            if not micro.is_dummy:
                seen.add(critic_loss=loss)
        return seen

    seen = within_memory(learner, batch, rows, config, accumulate, event, undo=critic.optimizer.zero_grad)
    outcome = critic.optimizer.step(lr)
    if not outcome.is_skipped:
        sums.merge(seen)
    if learner.world.is_first:
        if not outcome.is_skipped:
            sums.add(critic_updates=1, critic_gradient_norm=outcome.gradient_norm)
        sums.add(skipped=float(outcome.is_skipped))
    critic.bad_updates = count_bad(critic.bad_updates, outcome, config, of="the critic", lr="algorithm.critic.lr")


def microbatch_loss(
    learner: Learner,
    batch: Batch,
    rows: Sequence[int],
    totals: Totals,
    config: Config,
    sums: Sums,
    record: StepRecord | None,
    *,
    is_old: bool = False,
) -> Tensor:
    """The micro-batch's share of the update's loss: shares add up to the loss of the whole update.

    Everything is [N], all response tokens end to end: a padded [B, T] would be as long as its longest row.
    """
    algorithm, device = config.algorithm, learner.policy.device
    logp, entropy = score(learner.policy, batch, rows, config, with_entropy=is_old)
    if is_old:
        keep_old(batch, config, rows, logp, entropy)
    logp_old = batch.logp_old.joined(rows, device)
    advantage = batch.advantage.joined(rows, device)
    clip = algorithm.clip

    token_loss = clipped_surrogate(
        logp, logp_old, advantage, clip_low=clip.low, clip_high=clip.high, dual_clip=clip.dual
    )
    if algorithm.correction.cap is not None:
        engine = batch.logp_engine.joined(rows, device)
        weight = importance_weight(logp_old, engine, cap=algorithm.correction.cap)
        token_loss = token_loss * weight
        sums.add(weight=weight.sum(), weight_squared=(weight**2).sum(), weights=weight.numel())
    loss = aggregate_loss(token_loss, batch, rows, totals, config)
    sums.add(policy_loss=loss)
    if learner.reference is not None and algorithm.kl.place == "loss":
        with torch.no_grad():
            logp_ref, _ = score(learner.reference, batch, rows, config, with_entropy=False)
        kl = aggregate_loss(kl_penalty(logp, logp_ref, kind=algorithm.kl.kind), batch, rows, totals, config)
        loss = loss + algorithm.kl.coefficient * kl
        sums.add(kl_ref=kl)
    if algorithm.positive_nll:
        is_positive = per_token(batch.is_correct, batch, rows).to(device)
        nll = positive_nll(logp, is_positive, total_tokens=totals.positive_tokens)
        loss = loss + algorithm.positive_nll * nll
        sums.add(positive_nll=nll)
    clipped = clipped_tokens(logp, logp_old, advantage, clip_low=clip.low, clip_high=clip.high, dual_clip=clip.dual)
    observe_tokens(sums, logp.detach(), logp_old, clipped)
    if record is not None:
        remember(record, rows, policy_ratio(logp.detach(), logp_old), clipped)
    return loss


def per_token(values: Tensor, batch: Batch, rows: Sequence[int]) -> Tensor:
    """[B] one value per row of the batch -> [N] for every token of the chosen rows."""
    chosen = torch.tensor(list(rows))
    return torch.repeat_interleave(values[chosen], torch.tensor([batch.lengths[row] for row in rows]))


def aggregate_loss(token_loss: Tensor, batch: Batch, rows: Sequence[int], totals: Totals, config: Config) -> Tensor:
    """The configured mean of losses [N], over the whole update's counts."""
    device = token_loss.device
    match config.algorithm.loss_aggregation:
        case "token":
            return token_mean(token_loss, total_tokens=totals.tokens)
        case "sequence":
            row = per_token(torch.arange(len(batch.lengths)), batch, rows).to(device)
            lengths = torch.tensor(batch.lengths, device=device)
            return sequence_mean(token_loss, row, row_tokens=lengths, total_sequences=totals.sequences)
        case "prompt":
            group, group_tokens = per_token(batch.group, batch, rows).to(device), totals.group_tokens.to(device)
            return prompt_mean(token_loss, group, group_tokens=group_tokens, total_prompts=totals.prompts)
        case "constant":
            length = config.algorithm.loss_constant_tokens or config.limits.max_response_tokens
            return constant_norm(token_loss, constant=totals.sequences * length)


def remember(record: StepRecord, rows: Sequence[int], ratio: Tensor, clipped: ClippedTokens) -> None:
    """Ratio and clip of the first update that saw each token; later epochs do not overwrite it."""
    side = clipped.high.float() - (clipped.low | clipped.dual).float()
    is_new = [bool(torch.isnan(record.ratio.row(row)[0])) for row in rows]
    lengths = [record.ratio.lengths[row] for row in rows]
    ratios, sides = (x.cpu().split(lengths) for x in (ratio, side))
    for row, new, ratio, clip in zip(rows, is_new, ratios, sides, strict=True):
        if new:
            record.ratio.row(row).copy_(ratio)
            record.clip.row(row).copy_(clip)
