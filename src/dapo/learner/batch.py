"""Groups become a batch: rewards with their parts, group advantages, and which rows enter the loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dapo.algorithms.advantages import batch_centred, divide_by_batch_std, group_advantage, leave_one_out, whiten
from dapo.algorithms.parts import (
    advantage_shares,
    fill_missing,
    normalize_then_sum,
    normalized_contributions,
    sum_contributions,
    weighted_sum,
)
from dapo.algorithms.shaping import overlong_filter, soft_overlong_penalty
from dapo.config.schema import Config
from dapo.learner.ragged import Ragged
from dapo.models.packing import SHARING_SAVES, Packed, pack
from dapo.types import CORRECT, Group, Judgement, StopReason, Verdict


@dataclass(slots=True)
class Batch:
    """All rows of a step, group after group, response after response; B rows in P groups."""

    groups: list[Group]
    prompts: list[tuple[int, ...]]
    responses: list[NDArray[np.int32]]  # all tokens after the prompt
    own: list[NDArray[np.bool_] | None]  # of an episode: which of these the model drew
    lengths: list[int]  # tokens of each row that the model drew, the end token included: what a loss is taken from
    group: Tensor  # [B] which group a row belongs to
    raw_reward: Tensor  # [B] the verifier's value
    overlong_penalty: Tensor  # [B] eq. 13 times its weight
    parts: dict[str, Tensor]  # [B] each further part of the reward, NaN where it is unknown; also those without weight
    weights: dict[str, float]  # of what is added, the verifier's own part first
    is_correct: Tensor  # [B]
    is_truncated: Tensor  # [B]
    is_in_loss: Tensor  # [B] False for rows that overlong filtering takes out
    advantage: Ragged  # per token
    logp_engine: Ragged
    logp_old: Ragged
    entropy: Ragged
    logp_trainer: Ragged  # the trainer's own log-probs, also where `logp_old` are the engine's
    logp_ref: Ragged | None = None  # of the reference or teacher, where reward or advantage need it
    part_shares: dict[str, float] = field(default_factory=dict)  # of the advantages' variance, by part of the reward
    packs: dict[tuple[int, ...], Packed] = field(default_factory=dict)  # micro-batches on the device, made once a step

    @property
    def reward(self) -> Tensor:
        """[B] ±1 plus shaping (eq. 7 and 13), and the other parts by their weights."""
        return weighted_sum(self.part_rewards, self.part_weights).flatten()

    @property
    def part_rewards(self) -> Tensor:
        """[K, P, G] what is added, by part: the verifier's reward with the overlong penalty, and the others."""
        own = self.raw_reward + self.overlong_penalty  # eq. 13 is added to the rule-based reward
        others = [self.parts[name] for name in self.weights if name != CORRECT]
        P = max(1, len(self.groups))
        stacked = torch.stack([own, *others]).view(len(self.weights), P, len(own) // P)
        return fill_missing(stacked, self.part_weights) if others else stacked

    @property
    def part_weights(self) -> Tensor:
        return torch.tensor(list(self.weights.values()), dtype=torch.float64)

    def loss_rows(self, groups: Collection[int] | None = None) -> list[int]:
        """The rows of these groups, or of all, that enter the loss."""
        wanted = range(len(self.groups)) if groups is None else set(groups)
        return [row for row, group in enumerate(self.group.tolist()) if group in wanted and self.is_in_loss[row]]

    def packed(self, rows: Sequence[int], device: torch.device) -> Packed:
        """The rows as one packed micro-batch: the π_old pass and every update of the same rows share it.

        In float64, which is for comparing runs to the last digits, rows share no prompt: the library's norms work in
        float32 there too, and what a shared token gets back would be rounded once instead of once per response.
        """
        key = tuple(rows)
        if key not in self.packs:
            prompts, responses = [self.prompts[row] for row in rows], [self.responses[row] for row in rows]
            own = [self.own[row] for row in rows]
            is_exact = self.advantage.flat.dtype == torch.float64
            sharing_saves = None if is_exact else SHARING_SAVES
            self.packs[key] = pack(prompts, responses, device, own=own, sharing_saves=sharing_saves)
        return self.packs[key]

    def tokens(self, row: int) -> int:
        """Prompt and response tokens: what a row costs in a micro-batch."""
        return len(self.prompts[row]) + len(self.responses[row])


def make_batch(groups: Sequence[Group], config: Config, dtype: torch.dtype) -> Batch:
    """Rewards by eq. 7 and 13, advantages by eq. 9 (GAE comes later: it needs the critic's values)."""
    rows = [(g, group, i) for g, group in enumerate(groups) for i in range(len(group.completions))]
    completions = [group.completions[i] for _, group, i in rows]
    judgements = [judgement for group in groups for judgement in judgements_of(group, config)]
    lengths = [completion.n_own for completion in completions]
    real = torch.float64 if dtype == torch.float64 else torch.float32
    truncated = torch.tensor([completion.is_truncated for completion in completions], dtype=torch.bool)
    # A response that the engine aborted counts as wrong, and no loss is taken from its tokens.
    is_usable = torch.tensor(
        [c.stop_reason is not StopReason.ABORTED and c.n_own > 0 for c in completions], dtype=torch.bool
    )
    penalty = torch.zeros(len(rows), dtype=torch.float64)
    if config.shaping.overlong_penalty and config.shaping.overlong_buffer_tokens and rows:
        penalty = config.shaping.overlong_penalty * soft_overlong_penalty(
            torch.tensor([len(completion.tokens) for completion in completions], dtype=torch.float64),
            max_length=config.limits.max_response_tokens,
            buffer=config.shaping.overlong_buffer_tokens,
        )
    batch = Batch(
        groups=list(groups),
        prompts=[group.prompt_tokens for _, group, _ in rows],
        responses=[completion.tokens for completion in completions],
        own=[completion.own for completion in completions],
        lengths=lengths,
        group=torch.tensor([g for g, _, _ in rows], dtype=torch.long),
        raw_reward=torch.tensor([judgement.value for judgement in judgements], dtype=torch.float64),
        overlong_penalty=penalty,
        parts=parts_of(judgements, config),
        weights=config.rewards.weights,
        is_correct=torch.tensor([judgement.accuracy for judgement in judgements], dtype=torch.bool),
        is_truncated=truncated,
        is_in_loss=overlong_filter(is_usable, truncated) if config.shaping.overlong_filter else is_usable,
        advantage=Ragged(lengths, real),
        logp_engine=Ragged.of([c.logp if c.own is None else c.logp[c.own] for c in completions], real),
        logp_old=Ragged(lengths, real),
        entropy=Ragged(lengths, real),
        logp_trainer=Ragged(lengths, real),
    )
    if config.algorithm.advantage == "group" and rows:
        per_row = group_advantages(batch, config)
        batch.part_shares = part_shares(batch, config)
        per_token = torch.repeat_interleave(per_row, torch.tensor(lengths))
        if config.algorithm.group.std_over == "tokens":
            per_token = whiten(per_token, torch.repeat_interleave(batch.is_in_loss, torch.tensor(lengths)))
        batch.advantage.flat = per_token.to(real)
    return batch


def judgements_of(group: Group, config: Config) -> list[Judgement]:
    """The group's judgements, in response order; in a control experiment shuffled within the group, or negated."""
    match config.rewards.control:
        case "none":
            return list(group.judgements)
        case "shuffled":

            def rank(i: int) -> bytes:
                name = f"control/{config.train.seed}/{group.problem.id}/{group.visit}/{i}"
                return hashlib.blake2b(name.encode(), digest_size=8).digest()

            return [group.judgements[i] for i in sorted(range(len(group.judgements)), key=rank)]
        case "negated":
            opposite = {Verdict.CORRECT: Verdict.WRONG}
            return [
                replace(
                    j,
                    value=-j.value,
                    verdict=opposite.get(j.verdict, Verdict.CORRECT),
                    parts={name: -value for name, value in j.parts.items()},
                )
                for j in group.judgements
            ]


def parts_of(judgements: Sequence[Judgement], config: Config) -> dict[str, Tensor]:
    """[B] of every further part: those that the config gives a weight, and others that a verifier returned."""
    weighted = [name for name in config.rewards.weights if name != CORRECT]
    returned = sorted({name for judgement in judgements for name in judgement.parts} - {*weighted})
    return {
        name: torch.tensor([j.parts.get(name, float("nan")) for j in judgements], dtype=torch.float64)
        for name in (*weighted, *returned)
    }


def group_advantages(batch: Batch, config: Config) -> Tensor:
    """Over each group's shaped rewards, filtered rows included: eq. 9, or as the config says; [B] in float64.

    A std over tokens is left to `make_batch`: the loss's tokens are its business.
    """
    group = config.algorithm.group
    if config.rewards.aggregation == "normalize_then_sum":
        return normalize_then_sum(batch.part_rewards, batch.part_weights, std=group.std, eps=group.eps).flatten()
    reward = batch.reward.view(len(batch.groups), -1)
    if group.baseline == "group" and group.std_over == "group":
        return group_advantage(reward, std=group.std, eps=group.eps).flatten()
    centred = CENTRED[group.baseline](reward)
    if group.std == "none" or group.std_over == "tokens":
        return centred.flatten()
    of = reward if group.std_over == "batch_rewards" else centred
    return divide_by_batch_std(centred, of, std=group.std, eps=group.eps).flatten()


CENTRED: dict[str, Callable[[Tensor], Tensor]] = {
    "group": partial(group_advantage, std="none"),
    "leave_one_out": leave_one_out,
    "batch": batch_centred,
}


def part_shares(batch: Batch, config: Config) -> dict[str, float]:
    """Of the variance of group advantages, what is due to each part; empty where there is one part only."""
    if len(batch.weights) < 2:
        return {}
    group = config.algorithm.group
    is_normalized = config.rewards.aggregation == "normalize_then_sum"
    contributions = normalized_contributions if is_normalized else sum_contributions
    std = group.std if group.std_over == "group" else "none"  # one divisor for all changes no share
    rewards = batch.part_rewards
    if group.baseline == "batch":
        rewards = rewards.flatten(1)[:, None]
    added = contributions(rewards, batch.part_weights, std=std, eps=group.eps)
    return dict(zip(batch.weights, advantage_shares(added).tolist(), strict=True))


def split_into_minibatches(n_groups: int, n_updates: int, *, seed: int, step: int, epoch: int) -> list[list[int]]:
    """Groups shuffled by (seed, step, epoch) and split into at most `n_updates` mini-batches of nearly equal size.

    Shuffled, so that mini-batches are not sorted by length or by time of completion; never more updates than groups.
    """

    def rank(group: int) -> bytes:
        return hashlib.blake2b(f"minibatch/{seed}/{step}/{epoch}/{group}".encode(), digest_size=8).digest()

    order = sorted(range(n_groups), key=rank)
    n = min(n_updates, n_groups)
    return [sorted(order[i * n_groups // n : (i + 1) * n_groups // n]) for i in range(n)] if n else []


def split_into_updates(batch: Batch, config: Config, *, step: int, epochs: int) -> list[list[int]]:
    """The loss rows of each update of a step; an update may have none."""
    train = config.train
    return [
        batch.loss_rows(groups)
        for epoch in range(epochs)
        for groups in split_into_minibatches(
            len(batch.groups), train.updates_per_step, seed=train.seed, step=step, epoch=epoch
        )
    ]


def split_into_microbatches(batch: Batch, rows: Sequence[int], tokens_per_microbatch: int) -> list[list[int]]:
    """Rows in order, as many together as the token budget holds; a row over the budget is alone in its micro-batch."""
    parts: list[list[int]] = []
    room = 0
    for row in rows:
        cost = batch.tokens(row)
        if not parts or cost > room:
            parts.append([])
            room = tokens_per_microbatch
        parts[-1].append(row)
        room -= cost
    return parts


def why_rft_has_no_loss(batch: Batch, config: Config) -> str:
    """Why a step of rejection-sampling fine-tuning has no loss; empty where it has one, and for other algorithms."""
    imitates = config.algorithm.advantage == "none" and not config.has_teacher
    if not imitates or not batch.lengths or bool((batch.is_correct & batch.is_in_loss).any()):
        return ""
    is_graded = any(group.is_graded for group in batch.groups)
    why = " (the verifier grades them, and calls none correct)" if is_graded else ""
    return f'no response counts as correct{why}: with algorithm.advantage = "none" there is nothing to learn from'
