"""The passes before the updates: π_old, the critic's values, the reference's log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dapo.algorithms.advantages import distillation_advantage
from dapo.learner.batch import Batch
from dapo.learner.critic import Values, apply_gae, token_values
from dapo.learner.memory import within_memory
from dapo.learner.microbatches import all_reduce_rows, own_rows
from dapo.learner.ragged import Ragged
from dapo.learner.step import Step
from dapo.models.policy import Policy
from dapo.waiting.registry import report_progress


def first_update_computes_old_logp(step: Step) -> bool:
    """Whether the first update may compute π_old itself: its forward pass runs on the same weights.

    Not where π_old is needed earlier, for a KL inside the reward or the advantage, nor where updates have dropout.
    """
    is_needed_earlier = step.learner.reference is not None and step.config.algorithm.kl.place != "loss"
    return not is_needed_earlier and not step.config.has_dropout


def compute_old_logp(step: Step, skip: Sequence[int] = ()) -> None:
    """π_old: the trainer's own log-probs of every token, once, before the first update; or the engine's (bypass).

    Rows in `skip` are left to the first update, which computes theirs on the same weights in its own forward pass.
    """

    def of_rows(rows: list[int]) -> None:
        keep_old(step, rows, *token_logps(step.learner.policy, step, rows))

    in_microbatches(step, sorted(set(step.rows) - set(skip)), of_rows, old_policy_stats(step.batch))


def advantages_by_gae(step: Step) -> Values | None:
    """With a critic: fill the batch's advantages by GAE; returns the critic's values and targets."""
    if step.learner.critic is None or not step.batch.lengths:
        return None
    is_paid = step.config.algorithm.kl.place == "reward"
    return apply_gae(step.batch, step.config, old_critic_values(step), step.batch.logp_ref if is_paid else None)


def compute_reference_logp(step: Step) -> None:
    """The reference's log-probs of every token, where reward or advantage need them; a loss computes them itself."""
    reference = step.learner.reference
    if reference is not None and step.config.algorithm.kl.place != "loss":
        step.batch.logp_ref = per_token(step, lambda rows: token_logps(reference, step, rows, with_entropy=False)[0])


def add_distillation(step: Step) -> None:
    """With a teacher: its say on every token, beside the advantage that the verdict gave."""
    batch = step.batch
    if batch.logp_ref is not None and step.config.has_teacher:
        batch.advantage.flat = distillation_advantage(
            batch.advantage.flat,
            batch.logp_old.flat,
            batch.logp_ref.flat,
            coefficient=step.config.algorithm.kl.coefficient,
        )


def old_critic_values(step: Step) -> Ragged:
    """V of every token, before any update of the step."""
    critic = step.learner.critic
    assert critic is not None, "values come from a critic"
    return per_token(step, lambda rows: token_values(critic.model, step.batch, rows))


def per_token(step: Step, of_rows: Callable[[list[int]], Tensor]) -> Ragged:
    """One number per token of the batch; of_rows(rows) gives those of some rows, end to end."""
    made = Ragged(step.batch.lengths, step.batch.advantage.flat.dtype)
    in_microbatches(step, step.rows, lambda rows: made.put(rows, of_rows(rows)), [made])
    return made


def in_microbatches(
    step: Step, wanted: Sequence[int], work: Callable[[list[int]], None], results: Sequence[Ragged]
) -> None:
    """work(rows) without gradients on each of this rank's micro-batches; then all ranks share the `results`.

    Rows are split as for the updates, so that both use the same packed micro-batches.
    """
    batch, learner = step.batch, step.learner
    left, own = set(wanted), list[int]()
    for trained in (*step.update_rows, wanted):  # last: rows that no update trains on
        rows = [row for row in trained if row in left]
        left -= set(rows)
        own += own_rows(batch, rows, learner.world)

        def run_part(budget: int, rows: list[int] = rows) -> None:
            for micro in learner.microbatches(batch, rows, budget):
                with torch.no_grad():
                    work(micro.rows)
                report_progress()

        within_memory(step, rows, run_part)
    all_reduce_rows(learner.world, results, wanted, own)


def old_policy_stats(batch: Batch) -> tuple[Ragged, ...]:
    return batch.logp_old, batch.entropy, batch.logp_trainer


def keep_old(step: Step, rows: Sequence[int], logp: Tensor, entropy: Tensor) -> Tensor:
    """Store the trainer's log-probs and entropies of these rows; under bypass the engine's log-probs are π_old.

    Returns π_old, where the log-probs are.
    """
    batch = step.batch
    batch.logp_trainer.put(rows, logp)
    batch.entropy.put(rows, entropy)
    is_bypass = step.config.algorithm.old_logp == "bypass"
    logp_old = batch.logp_engine.joined(rows, logp.device) if is_bypass else logp.detach()
    batch.logp_old.put(rows, logp_old)
    return logp_old


def token_logps(
    policy: Policy, step: Step, rows: Sequence[int], *, with_entropy: bool = True, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the rows' response tokens, end to end."""
    packed, temperature = step.batch.packed(rows, policy.device), step.config.sampling.temperature
    logp, entropy = policy(
        packed, temperature=temperature, with_entropy=with_entropy, entropy_gradient=entropy_gradient
    )
    return logp, entropy
