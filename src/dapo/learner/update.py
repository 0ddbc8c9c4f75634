"""One step's updates: π_old once, then an update per mini-batch, whose micro-batches share one denominator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dapo.algorithms.aggregate import constant_norm, prompt_mean, sequence_mean, token_mean
from dapo.algorithms.diagnostics import ClippedTokens, clipped_tokens
from dapo.algorithms.losses import (
    clipping_ratio,
    importance_weight,
    kl_penalty,
    policy_loss,
    policy_ratio,
    positive_nll,
)
from dapo.config.schema import Config
from dapo.errors import TrainingError
from dapo.learner.batch import Batch, split_into_updates
from dapo.learner.critic import CriticLearner, explained_variance_of, value_losses
from dapo.learner.forward_passes import (
    add_distillation,
    advantages_by_gae,
    compute_old_logp,
    compute_reference_logp,
    first_update_computes_old_logp,
    keep_old,
    old_policy_stats,
    token_logps,
)
from dapo.learner.learner import Learner
from dapo.learner.memory import fit_activations, within_memory
from dapo.learner.metrics import observe_tokens, summarise
from dapo.learner.microbatches import Micro, all_reduce_rows, own_rows
from dapo.learner.optimizer import UpdateOutcome, lr_factor
from dapo.learner.step import Event, Step, StepRecord
from dapo.learner.sums import Sums, Totals
from dapo.models.device import sent
from dapo.models.dropout import dropping
from dapo.waiting.registry import report_progress

OnUpdate = Callable[[int, int], None]  # (updates done, updates of the step)


def update_policy(
    learner: Learner,
    batch: Batch,
    config: Config,
    *,
    step: int,
    record: StepRecord | None = None,
    progress: OnUpdate = lambda _done, _all: None,
    event: Event = lambda _kind, _message: None,
) -> dict[str, float]:
    """Run all updates of a step; returns its metrics. Nothing to train on means no update and no error."""
    update_rows = split_into_updates(batch, config, step=step, epochs=config.train.epochs_per_step)
    factor = lr_factor(config.train, step)
    lr, critic_lr = factor * config.train.lr, factor * config.critic_lr
    return run_updates(Step(learner, batch, config, update_rows, lr, critic_lr, event, record), progress)


def run_updates(step: Step, progress: OnUpdate) -> dict[str, float]:
    """Compute the batch's log-probs and values, then update critic and policy on the rows of each update."""
    start, updates_before = time.perf_counter(), step.learner.updates
    fit_activations(step)
    # Rows whose π_old the first update computes in its own forward pass.
    left_to_update = (
        next((rows for rows in step.update_rows if rows), []) if first_update_computes_old_logp(step) else []
    )
    compute_old_logp(step, skip=left_to_update)
    step.batch.logp_old.arrive()  # so that its time does not count as that of what follows
    compute_reference_logp(step)
    step.values = advantages_by_gae(step)
    add_distillation(step)
    passed = time.perf_counter()
    for done, rows in enumerate(step.update_rows):
        if rows:
            if step.values is not None:
                update_critic(step, rows)
            update_once(step, rows, computes_old_logp=rows is left_to_update)
            left_to_update = []
        progress(done + 1, len(step.update_rows))
    if step.record is not None:
        gather_record(step, step.record)
    metrics = summarise(step, updates_before)
    if step.values is not None:
        metrics["critic/explained_variance"] = explained_variance_of(step.values, step.batch.loss_rows())
    step.batch.packs.clear()
    metrics["timing.old_logp_s"] = passed - start
    metrics["timing.update_s"] = time.perf_counter() - passed
    return metrics


def gather_record(step: Step, record: StepRecord) -> None:
    """Gather the records of all ranks: a row's record is on the rank that computed its first update."""
    left = set(step.rows)
    for trained in step.update_rows:
        rows = [row for row in trained if row in left]
        left -= set(rows)
        own = own_rows(step.batch, trained, step.learner.world)
        all_reduce_rows(step.learner.world, (record.ratio, record.clip), rows, own)


def update_once(step: Step, rows: Sequence[int], *, computes_old_logp: bool) -> None:
    """One optimizer update of the policy over `rows`.

    `computes_old_logp`: the weights still are π_old, and the update's forward pass computes it for these rows.
    """
    learner, batch = step.learner, step.batch
    totals = Totals.of(batch, rows)

    def loss_of(micro: Micro, sums: Sums) -> Tensor:
        return microbatch_loss(step, micro, totals, sums, computes_old_logp=computes_old_logp)

    with dropping(learner.policy.draw, seed=step.config.train.seed, update=learner.updates):
        outcome = optimize(step, rows, learner, loss_of)
    if computes_old_logp:
        all_reduce_rows(learner.world, old_policy_stats(batch), rows, own_rows(batch, rows, learner.world))
    learner.updates += not outcome.is_skipped


def update_critic(step: Step, rows: Sequence[int]) -> None:
    """One update of the critic over the same rows, by its own optimizer at its own learning rate."""
    critic, values = step.learner.critic, step.values
    assert critic is not None, "values come from a critic"
    assert values is not None, "the critic has given its values"
    totals = Totals.of(step.batch, rows)

    def loss_of(micro: Micro, sums: Sums) -> Tensor:
        token_loss = value_losses(critic, step.batch, values, micro.rows, clip=step.config.algorithm.critic.value_clip)
        loss = aggregate_loss(step, token_loss, micro.rows, totals)
        sums.add(critic_loss=loss)
        return loss

    optimize(step, rows, critic, loss_of)


def optimize(
    step: Step, rows: Sequence[int], part: Learner | CriticLearner, loss_of: Callable[[Micro, Sums], Tensor]
) -> UpdateOutcome:
    """One optimizer update of policy or critic, in as many micro-batches as the token budget requires."""
    learner, is_critic = step.learner, isinstance(part, CriticLearner)

    def accumulate(budget: int) -> Sums:
        seen = Sums()
        micros = learner.microbatches(step.batch, rows, budget)
        for micro in micros:
            if not is_critic:
                learner.set_gradient_sync(is_last=micro is micros[-1])
            loss = loss_of(micro, Sums() if micro.is_dummy else seen)
            # A dummy keeps ranks with fewer micro-batches in step with the others' collectives.
            (0 * loss if micro.is_dummy else part.optimizer.scaled(loss)).backward()
            report_progress()
        return seen

    seen = within_memory(step, rows, accumulate, undo=part.optimizer.zero_grad)
    outcome = part.optimizer.step(step.critic_lr if is_critic else step.lr)
    if not outcome.is_skipped:  # the sums of a skipped update would distort those of the others
        step.sums.merge(seen)
    if learner.world.is_first:  # counted once: the ranks' sums are added up
        prefix = "critic_" if is_critic else ""
        if not outcome.is_skipped:
            step.sums.add(**{f"{prefix}updates": 1, f"{prefix}gradient_norm": outcome.gradient_norm})
        step.sums.add(skipped=float(outcome.is_bad), scale_skips=float(outcome.is_skipped and not outcome.is_bad))
    if outcome.is_bad or not outcome.is_skipped:  # a skip by the loss scaler does not count
        part.bad_updates = part.bad_updates + 1 if outcome.is_bad else 0
    if part.bad_updates > step.config.train.max_bad_updates:
        name, lr = ("critic", "algorithm.critic.lr") if is_critic else ("policy", "train.lr")
        raise TrainingError(
            f"{part.bad_updates} updates in a row of the {name} had non-finite gradients and were skipped.",
            remedy=f"Start a new run from the last checkpoint (model.path) with a lower {lr} or model.dtype = float32.",
        )
    return outcome


def microbatch_loss(step: Step, micro: Micro, totals: Totals, sums: Sums, *, computes_old_logp: bool = False) -> Tensor:
    """The micro-batch's part of the update's loss: parts add up to the loss of the whole update.

    Everything is [N], all response tokens end to end: a padded [B, T] would be as long as its longest row.
    """
    learner, batch, algorithm, rows = step.learner, step.batch, step.config.algorithm, micro.rows
    device, clip = learner.policy.device, algorithm.clip
    lengths = [batch.lengths[row] for row in rows]
    has_bonus = algorithm.entropy_coefficient > 0
    logp, entropy = token_logps(
        learner.policy, step, rows, with_entropy=computes_old_logp or has_bonus, entropy_gradient=has_bonus
    )
    logp_old = keep_old(step, rows, logp, entropy) if computes_old_logp else batch.logp_old.joined(rows, device)
    advantage = batch.advantage.joined(rows, device)

    token_loss = policy_loss(
        algorithm.loss,
        logp,
        logp_old,
        advantage,
        lengths,
        clip_low=clip.low,
        clip_high=clip.high,
        dual_clip=clip.dual,
    )
    if algorithm.correction.cap is not None:
        engine = batch.logp_engine.joined(rows, device)
        token_loss = token_loss * importance_weight(logp_old, engine, lengths, **algorithm.correction.weights)
    loss = aggregate_loss(step, token_loss, rows, totals)
    sums.add(policy_loss=loss)
    if learner.reference is not None and algorithm.kl.place == "loss":
        with torch.no_grad():
            logp_ref, _ = token_logps(learner.reference, step, rows, with_entropy=False)
        kl = aggregate_loss(step, kl_penalty(logp, logp_ref, kind=algorithm.kl.kind), rows, totals)
        loss = loss + algorithm.kl.coefficient * kl
        sums.add(kl_ref=kl)
    if algorithm.positive_nll:
        is_positive = sent(per_token(batch.is_correct, batch, rows), device)
        nll = positive_nll(logp, is_positive, total_tokens=totals.positive_tokens)
        loss = loss + algorithm.positive_nll * nll
        sums.add(positive_nll=nll)
    if has_bonus:
        loss = loss - algorithm.entropy_coefficient * aggregate_loss(step, entropy, rows, totals)
    ratio = clipping_ratio(algorithm.loss, logp.detach(), logp_old, lengths)
    clipped = clipped_tokens(ratio, advantage, clip_low=clip.low, clip_high=clip.high, dual_clip=clip.dual)
    observe_tokens(sums, logp.detach(), logp_old, clipped)
    if step.record is not None and not micro.is_dummy:
        record_first(step.record, rows, policy_ratio(logp.detach(), logp_old), clipped)
    return loss


def per_token(values: Tensor, batch: Batch, rows: Sequence[int]) -> Tensor:
    """[B] one value per row of the batch -> [N] for every token of the chosen rows."""
    chosen = torch.tensor(list(rows))
    return torch.repeat_interleave(values[chosen], torch.tensor([batch.lengths[row] for row in rows]))


def aggregate_loss(step: Step, token_loss: Tensor, rows: Sequence[int], totals: Totals) -> Tensor:
    """The configured mean of losses [N], over the whole update's counts."""
    batch, config, device = step.batch, step.config, token_loss.device
    match config.algorithm.loss_aggregation:
        case "token":
            return token_mean(token_loss, total_tokens=totals.tokens)
        case "sequence":
            row = sent(per_token(torch.arange(len(batch.lengths)), batch, rows), device)
            lengths = sent(torch.tensor(batch.lengths), device)
            return sequence_mean(token_loss, row, row_tokens=lengths, total_sequences=totals.sequences)
        case "prompt":
            group, group_tokens = sent(per_token(batch.group, batch, rows), device), sent(totals.group_tokens, device)
            return prompt_mean(token_loss, group, group_tokens=group_tokens, total_prompts=totals.prompts)
        case "constant":
            length = config.algorithm.loss_constant_tokens or config.limits.max_response_tokens
            return constant_norm(token_loss, constant=totals.sequences * length)


def record_first(record: StepRecord, rows: Sequence[int], ratio: Tensor, clipped: ClippedTokens) -> None:
    """Keep ratio and clip of a token from the first update that trains on it; later epochs do not overwrite them."""
    side = clipped.high.float() - (clipped.low | clipped.dual).float()
    is_new = [bool(torch.isnan(record.ratio.row(row)[0])) for row in rows]
    lengths = [record.ratio.lengths[row] for row in rows]
    ratios, sides = (x.cpu().split(lengths) for x in (ratio, side))
    for row, new, ratio, clip in zip(rows, is_new, ratios, sides, strict=True):
        if new:
            record.ratio.row(row).copy_(ratio)
            record.clip.row(row).copy_(clip)
