"""What the models say of a batch before its updates: π_old, values, the reference's log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dapo.config.schema import Config
from dapo.learner.batch import Batch
from dapo.learner.critic import CriticLearner, Values, apply_gae, score_values
from dapo.learner.dealing import own_rows, share_rows
from dapo.learner.learner import Learner
from dapo.learner.memory import Event, within_memory
from dapo.learner.ragged import Ragged
from dapo.models.policy import Policy


def first_update_scores_old(learner: Learner, config: Config) -> bool:
    """Whether the step's first update may find π_old out by itself: its own forward pass runs on the same weights.

    Not where something needs π_old earlier: a KL penalty inside the reward.
    """
    return not (learner.critic is not None and learner.reference is not None and config.algorithm.kl.place == "reward")


def score_old(
    learner: Learner,
    batch: Batch,
    config: Config,
    *,
    deals: Sequence[Sequence[int]] = (),
    skip: Sequence[int] = (),
    event: Event = lambda _kind, _message: None,
) -> None:
    """π_old: the trainer's own log-probs of every token, once, before the first update; or the engine's (bypass).

    Rows are dealt as the updates deal them, so that both share their packed micro-batches. Rows in `skip` are left to
    the first update, which scores them on the same weights in its own forward pass.
    """
    wanted = sorted(set(range(len(batch.lengths))) - set(skip))

    def score_rows(rows: list[int]) -> None:
        keep_old(batch, config, rows, *score(learner.policy, batch, rows, config))

    own = score_as_dealt(learner, batch, config, wanted, deals, score_rows, event)
    share_rows(learner.world, old_policy_stats(batch), wanted, own)


def score_as_dealt(
    learner: Learner,
    batch: Batch,
    config: Config,
    wanted: Sequence[int],
    deals: Sequence[Sequence[int]],
    work: Callable[[list[int]], None],
    event: Event,
) -> list[int]:
    """work(rows) without gradients, on this rank's micro-batches of the rows wanted; returns which rows these are."""
    left, own = set(wanted), list[int]()
    for deal in (*deals, wanted):  # last: rows that no update trains on
        rows = [row for row in deal if row in left]
        left -= set(rows)
        own += own_rows(batch, rows, learner.world)

        def score_part(budget: int, rows: list[int] = rows) -> None:
            for micro in learner.microbatches(batch, rows, budget):
                with torch.no_grad():
                    work(micro.rows)

        within_memory(learner, batch, rows, config, score_part, event)
    return own


def old_policy_stats(batch: Batch) -> tuple[Ragged, ...]:
    return batch.logp_old, batch.entropy, batch.logp_trainer


def keep_old(batch: Batch, config: Config, rows: Sequence[int], logp: Tensor, entropy: Tensor) -> None:
    """Store what the trainer says of these rows; under bypass the engine's own log-probs are π_old."""
    batch.logp_trainer.put(rows, logp)
    batch.entropy.put(rows, entropy)
    if config.algorithm.old_logp == "bypass":
        batch.logp_old.put(rows, batch.logp_engine.joined(rows, "cpu"))
    else:
        batch.logp_old.put(rows, logp)


def advantages_by_gae(
    learner: Learner, batch: Batch, config: Config, event: Event, *, deals: Sequence[Sequence[int]] = ()
) -> Values | None:
    """With a critic: its values, its targets, and the advantages by GAE. `deals`: as in `score_old`."""
    if learner.critic is None or not batch.lengths:
        return None
    rows, logp_ref = list(range(len(batch.lengths))), None
    if learner.reference is not None and config.algorithm.kl.place == "reward":
        logp_ref = Ragged(batch.lengths, batch.logp_old.flat.dtype)
        reference, ragged = learner.reference, logp_ref

        def score_reference(rows: list[int]) -> None:
            ragged.put(rows, score(reference, batch, rows, config, with_entropy=False)[0])

        own = score_as_dealt(learner, batch, config, rows, deals, score_reference, event)
        share_rows(learner.world, [logp_ref], rows, own)
    old = old_critic_values(learner, learner.critic, batch, config, event, deals=deals)
    return apply_gae(batch, config, old, logp_ref)


def old_critic_values(
    learner: Learner,
    critic: CriticLearner,
    batch: Batch,
    config: Config,
    event: Event,
    *,
    deals: Sequence[Sequence[int]] = (),
) -> Ragged:
    """V of every token, before any update of the step."""
    rows, old = list(range(len(batch.lengths))), Ragged(batch.lengths, batch.advantage.flat.dtype)

    def score_critic(rows: list[int]) -> None:
        old.put(rows, score_values(critic.model, batch, rows))

    own = score_as_dealt(learner, batch, config, rows, deals, score_critic, event)
    share_rows(learner.world, [old], rows, own)
    return old


def score(
    policy: Policy, batch: Batch, rows: Sequence[int], config: Config, *, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the rows' response tokens, end to end."""
    logp, entropy = policy(
        batch.packed(rows, policy.device), temperature=config.sampling.temperature, with_entropy=with_entropy
    )
    return logp, entropy
