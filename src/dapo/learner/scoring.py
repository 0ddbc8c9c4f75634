"""The passes before the updates: π_old, the critic's values, the reference's log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dapo.learner.batch import Batch
from dapo.learner.critic import Values, apply_gae, score_values
from dapo.learner.memory import within_memory
from dapo.learner.microbatches import all_reduce_rows, own_rows
from dapo.learner.ragged import Ragged
from dapo.learner.step import Step
from dapo.models.policy import Policy


def first_update_scores_old(step: Step) -> bool:
    """Whether the first update may compute π_old itself: its forward pass runs on the same weights.

    Not where π_old is needed earlier, for a KL penalty inside the reward.
    """
    learner, kl = step.learner, step.config.algorithm.kl
    return not (learner.critic is not None and learner.reference is not None and kl.place == "reward")


def score_old(step: Step, skip: Sequence[int] = ()) -> None:
    """π_old: the trainer's own log-probs of every token, once, before the first update; or the engine's (bypass).

    Rows in `skip` are left to the first update, which scores them on the same weights in its own forward pass.
    """

    def score_rows(rows: list[int]) -> None:
        keep_old(step, rows, *score(step.learner.policy, step, rows))

    score_in_microbatches(step, sorted(set(step.rows) - set(skip)), score_rows, old_policy_stats(step.batch))


def advantages_by_gae(step: Step) -> Values | None:
    """With a critic: fill the batch's advantages by GAE; returns the critic's values and targets."""
    critic, reference, config = step.learner.critic, step.learner.reference, step.config
    if critic is None or not step.batch.lengths:
        return None
    logp_ref = None
    if reference is not None and config.algorithm.kl.place == "reward":
        logp_ref = score_tokens(step, lambda rows: score(reference, step, rows, with_entropy=False)[0])
    return apply_gae(step.batch, config, old_critic_values(step), logp_ref)


def old_critic_values(step: Step) -> Ragged:
    """V of every token, before any update of the step."""
    critic = step.learner.critic
    assert critic is not None, "values come from a critic"
    return score_tokens(step, lambda rows: score_values(critic.model, step.batch, rows))


def score_tokens(step: Step, score_rows: Callable[[list[int]], Tensor]) -> Ragged:
    """One number per token of the batch; score_rows(rows) gives those of some rows, end to end."""
    made = Ragged(step.batch.lengths, step.batch.advantage.flat.dtype)
    score_in_microbatches(step, step.rows, lambda rows: made.put(rows, score_rows(rows)), [made])
    return made


def score_in_microbatches(
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

        def score_part(budget: int, rows: list[int] = rows) -> None:
            for micro in learner.microbatches(batch, rows, budget):
                with torch.no_grad():
                    work(micro.rows)

        within_memory(step, rows, score_part)
    all_reduce_rows(learner.world, results, wanted, own)


def old_policy_stats(batch: Batch) -> tuple[Ragged, ...]:
    return batch.logp_old, batch.entropy, batch.logp_trainer


def keep_old(step: Step, rows: Sequence[int], logp: Tensor, entropy: Tensor) -> None:
    """Store the trainer's log-probs and entropies of these rows; under bypass the engine's log-probs are π_old."""
    batch = step.batch
    batch.logp_trainer.put(rows, logp)
    batch.entropy.put(rows, entropy)
    is_bypass = step.config.algorithm.old_logp == "bypass"
    batch.logp_old.put(rows, batch.logp_engine.joined(rows, "cpu") if is_bypass else logp)


def score(
    policy: Policy, step: Step, rows: Sequence[int], *, with_entropy: bool = True, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the rows' response tokens, end to end."""
    packed, temperature = step.batch.packed(rows, policy.device), step.config.sampling.temperature
    logp, entropy = policy(
        packed, temperature=temperature, with_entropy=with_entropy, entropy_gradient=entropy_gradient
    )
    return logp, entropy
