"""The critic's side of PPO and VAPO: values, GAE with its own λ for policy and critic, and the value update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dapo.algorithms.advantages import decoupled_gae, gae, length_adaptive_lambda, whiten
from dapo.algorithms.diagnostics import ExplainedSums, explained_variance
from dapo.algorithms.losses import kl_penalty, value_loss
from dapo.algorithms.shaping import token_rewards
from dapo.config.schema import Config
from dapo.learner.batch import Batch
from dapo.learner.optimizer import Optimizer
from dapo.learner.ragged import Ragged, token_mask
from dapo.models.critic import Critic

PADDED_VALUES = 1 << 24  # of the rows that go through GAE together
ENOUGH_PROBLEMS = 100  # new to the critic, before their explained variance may end pretraining
WINDOW, RISE = 3, 0.01  # pretraining steps that are pooled, and the least gain in explained variance between them
FOLDS = 4  # of problems, to cross-validate the closed-form fit of the head


@dataclass(slots=True)
class CriticLearner:
    """The critic and its own optimizer."""

    model: Critic
    optimizer: Optimizer
    bad_updates: int = 0  # skipped in a row


@dataclass(slots=True)
class Values:
    """Per token of a batch: V at the start of the step, the critic's target, and the observed return."""

    old: Ragged
    target: Ragged
    outcome: Ragged  # the target with λ = 1, which no predicted value enters


def token_values(critic: Critic, batch: Batch, rows: Sequence[int]) -> Tensor:
    """V(s_t) of the rows' response tokens, end to end."""
    value: Tensor = critic(batch.packed(rows, critic.device))
    return value


def apply_gae(batch: Batch, config: Config, old: Ragged, logp_ref: Ragged | None = None) -> Values:
    """GAE over every row from its `old` values: fills `batch.advantage`; returns values, targets and outcomes.

    The reward is paid at the last token; with KL in the reward each token also pays β·KL, by algorithm.kl.kind. The
    critic's targets use their own λ where one is given (VAPO's decoupled GAE); the policy's λ may grow with the length.
    """
    target, outcome = (Ragged(batch.lengths, batch.advantage.flat.dtype) for _ in range(2))
    settings = config.algorithm.gae
    target_lam = settings.lam if settings.lam_critic is None else settings.lam_critic
    penalty: Ragged | None = None
    if logp_ref is not None:
        penalty = Ragged(batch.lengths, old.flat.dtype)
        penalty.flat = kl_penalty(batch.logp_old.flat, logp_ref.flat, kind=config.algorithm.kl.kind)
    for rows in similar_lengths(batch.lengths):
        lengths = [batch.lengths[row] for row in rows]
        mask, value = token_mask(lengths, "cpu"), old.padded(rows, "cpu")
        kl = None if penalty is None else penalty.padded(rows, "cpu")
        paid = batch.reward[list(rows)].to(value.dtype)
        reward = token_rewards(paid, mask, kl, kl_coefficient=config.algorithm.kl.coefficient)
        alpha = settings.length_adaptive_alpha
        lam: float | Tensor = settings.lam
        if alpha is not None:
            lam = length_adaptive_lambda(
                torch.tensor(lengths, dtype=value.dtype), alpha=alpha, floor=settings.length_adaptive_floor
            )
        advantage, ret = decoupled_gae(reward, value, mask, gamma=settings.gamma, lam=lam, lam_critic=target_lam)
        _, observed = gae(reward, value, mask, gamma=settings.gamma, lam=1.0)
        batch.advantage.put(rows, advantage[mask])
        target.put(rows, ret[mask])
        outcome.put(rows, observed[mask])
    if settings.whiten:  # over all loss tokens of the step: not over filtered rows
        in_loss = torch.repeat_interleave(batch.is_in_loss, torch.tensor(batch.lengths))
        batch.advantage.flat = whiten(batch.advantage.flat, in_loss)
    return Values(old, target, outcome)


def similar_lengths(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows, the longest first, as many together as `PADDED_VALUES` allows: GAE takes a step for every column."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    while order:
        n = max(1, PADDED_VALUES // max(1, lengths[order[0]]))
        yield order[:n]
        order = order[n:]


def value_losses(
    learner: CriticLearner, batch: Batch, values: Values, rows: Sequence[int], *, clip: float | None
) -> Tensor:
    """Token losses [N] of a micro-batch, end to end; the caller takes the mean."""
    device = learner.model.device
    value = token_values(learner.model, batch, rows)
    old, target = values.old.joined(rows, device), values.target.joined(rows, device)
    return value_loss(value, old, target, clip=clip)


@dataclass(frozen=True, slots=True)
class HeldOutFit:
    """How well the critic predicts problems that are new to it, in one or several steps of value pretraining."""

    problems: int
    explained: ExplainedSums

    @classmethod
    def of(cls, values: Values, rows: Sequence[int], problems: int) -> HeldOutFit:
        if not rows:
            return cls(0, ExplainedSums())
        return cls(problems, ExplainedSums.of(values.old.joined(rows, "cpu"), values.outcome.joined(rows, "cpu")))

    @classmethod
    def restore(cls, state: dict[str, Any]) -> HeldOutFit:
        return cls(state["problems"], ExplainedSums(**state["explained"]))

    def __add__(self, other: HeldOutFit) -> HeldOutFit:
        return HeldOutFit(self.problems + other.problems, self.explained + other.explained)


def latest_fit(fits: Sequence[HeldOutFit]) -> HeldOutFit | None:
    """The newest `WINDOW` steps together, more where these have too few new problems; None without enough."""
    pooled = None
    for n, step in enumerate(reversed(fits), start=1):
        pooled = step if pooled is None else step + pooled
        if n >= WINDOW and pooled.problems >= ENOUGH_PROBLEMS:
            return pooled
    return None


def has_stopped_rising(fits: Sequence[HeldOutFit]) -> bool:
    """Whether the critic predicts new problems no better than it did `WINDOW` steps ago."""
    now, before = latest_fit(fits), latest_fit(fits[:-WINDOW])
    return now is not None and before is not None and now.explained.variance < before.explained.variance + RISE


def explained_variance_of(values: Values, rows: Sequence[int]) -> float:
    """Of the observed returns by the critic's values at the start of the step, over the tokens of some rows.

    Not of its targets: with λ < 1 these are largely the critic's own values.
    """
    if not rows:
        return 0.0
    return explained_variance(values.old.joined(rows, "cpu"), values.outcome.joined(rows, "cpu"))
