"""One step's updates: π_old once, then mini-batches of micro-batches under one global normaliser each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dapo.algorithms.aggregate import constant_norm, prompt_mean, token_mean
from dapo.algorithms.diagnostics import ClippedTokens, clipped_tokens
from dapo.algorithms.losses import clipped_surrogate, importance_weight, kl_penalty, positive_nll
from dapo.config.schema import Config
from dapo.distributed.shards import refresh
from dapo.distributed.world import ALONE, World
from dapo.errors import EngineError
from dapo.models.policy import Policy
from dapo.trainer.activations import checkpoint_layers, fit_layers
from dapo.trainer.batch import Batch, deal_minibatches
from dapo.trainer.dealing import Micro, own_microbatches, own_rows, share_rows
from dapo.trainer.optimizer import Optimizer, UpdateOutcome, warmup_lr
from dapo.trainer.ragged import Ragged
from dapo.trainer.value import ValueLearner, Values, estimate_advantages, explained_variance, score_values, value_share


@dataclass(slots=True)
class Learner:
    """What learns, and how far it has come."""

    policy: Policy
    optimizer: Optimizer
    reference: Policy | None = None  # frozen; only with a KL term
    value: ValueLearner | None = None  # the critic; only with GAE
    tokens_per_microbatch: int | None = None  # smaller than the config's after the device ran out of memory
    recomputes_all: bool = False  # gradient_checkpointing = "auto" left too little memory: every layer from then on
    updates: int = 0  # optimizer updates since the start; the version of the weights
    bad_updates: int = 0  # skipped in a row
    world: World = ALONE
    gathered: Policy | None = None  # with a sharded policy: a whole copy, for the engine and for saving

    @property
    def whole(self) -> Policy:
        """The policy with all its weights on this rank, as of the last `publish`."""
        return self.policy if self.gathered is None else self.gathered

    @property
    def is_sharded(self) -> bool:
        return self.gathered is not None

    def publish(self) -> Policy:
        """The whole policy with the newest weights. All ranks take part."""
        if self.gathered is not None:
            refresh(self.gathered, self.policy)
        return self.whole

    def microbatches(self, batch: Batch, rows: Sequence[int], budget: int) -> list[Micro]:
        """This rank's part of the work on `rows`."""
        return own_microbatches(batch, rows, budget, self.world, in_step=self.is_sharded)


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


Event = Callable[[str, str], None]  # (kind, message)
Progress = Callable[[int, int], None]  # (updates done, updates of the step)


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
    first_rows = next((rows for rows in deals if rows), []) if scores_itself(learner, config) else []
    score_old(learner, batch, config, deals=deals, skip=first_rows, event=event)
    values = estimate_values(learner, batch, config, event)
    scored = time.perf_counter()
    sums, first = Sums(), learner.updates
    lr = warmup_lr(config.train.lr, step, config.train.warmup_steps)
    for done, rows in enumerate(deals):
        if rows:
            if values is not None:
                update_critic(learner, batch, values, rows, config, sums, event)
            update_once(learner, batch, rows, config, lr, sums, record, is_old=rows is first_rows, event=event)
            first_rows = []
        progress(done + 1, len(deals))
    if record is not None:
        share_record(learner, batch, deals, record)
    metrics = summarise(batch, sums.across(learner.world), lr, learner, first)
    if values is not None:
        metrics["critic/explained_variance"] = explained_variance(batch, values)
    batch.packs.clear()
    metrics["timing.old_logp_s"] = scored - start
    metrics["timing.update_s"] = time.perf_counter() - scored
    return metrics


def fit_activations(learner: Learner, batch: Batch, config: Config) -> None:
    """Recompute in as few layers as this step's largest micro-batch asks for, in the policy and in the critic."""
    budget = learner.tokens_per_microbatch or config.train.tokens_per_microbatch
    longest = max(batch.tokens(row) for row in range(len(batch.lengths)))
    tokens = max(longest, min(budget, sum(map(batch.tokens, range(len(batch.lengths))))))
    optimizers = [learner.optimizer, *([learner.value.optimizer] if learner.value is not None else [])]
    modules: list[Any] = [learner.policy, *([learner.value.critic] if learner.value is not None else [])]
    to_come = sum(optimizer.bytes_to_come() for optimizer in optimizers)
    for module in modules:
        if learner.recomputes_all:
            checkpoint_layers(module)
            continue
        fit_layers(module, tokens, bytes_to_come=to_come, is_fused=config.model.kernels == "fused")


def scores_itself(learner: Learner, config: Config) -> bool:
    """Whether the step's first update may find π_old out by itself: its own forward pass runs on the same weights.

    Not where something needs π_old earlier: a KL penalty inside the reward.
    """
    return not (learner.value is not None and learner.reference is not None and config.algorithm.kl.place == "reward")


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
    left = set(range(len(batch.lengths))) - set(skip)
    wanted, own = sorted(left), list[int]()
    for deal in (*deals, range(len(batch.lengths))):  # last: rows that no update trains on
        rows = [row for row in deal if row in left]
        left -= set(rows)
        own += own_rows(batch, rows, learner.world)

        def score_rows(budget: int, rows: list[int] = rows) -> None:
            for micro in learner.microbatches(batch, rows, budget):
                with torch.no_grad():
                    keep_old(batch, config, micro.rows, *score(learner.policy, batch, micro.rows, config))

        within_memory(learner, batch, rows, config, score_rows, event)
    share_rows(learner.world, old_values(batch), wanted, own)


def old_values(batch: Batch) -> tuple[Ragged, ...]:
    return batch.logp_old, batch.entropy, batch.logp_trainer


def share_record(learner: Learner, batch: Batch, deals: Sequence[Sequence[int]], record: StepRecord) -> None:
    """What each rank has seen of a row's first update, for the rank that writes it down."""
    left = set(range(len(batch.lengths)))
    for deal in deals:
        rows = [row for row in deal if row in left]
        left -= set(rows)
        own = own_rows(batch, deal, learner.world)
        share_rows(learner.world, (record.ratio, record.clip), rows, own)


def keep_old(batch: Batch, config: Config, rows: Sequence[int], logp: Tensor, entropy: Tensor) -> None:
    """Store what the trainer says of these rows; under bypass the engine's own log-probs are π_old."""
    batch.logp_trainer.put(rows, logp)
    batch.entropy.put(rows, entropy)
    if config.algorithm.old_logp == "bypass":
        batch.logp_old.put(rows, batch.logp_engine.joined(rows, "cpu"))
    else:
        batch.logp_old.put(rows, logp)


def estimate_values(learner: Learner, batch: Batch, config: Config, event: Event) -> Values | None:
    """With a critic: its values, its targets, and the advantages by GAE."""
    if learner.value is None or not batch.lengths:
        return None
    value, rows = learner.value, list(range(len(batch.lengths)))
    logp_ref = None
    if learner.reference is not None and config.algorithm.kl.place == "reward":
        logp_ref = Ragged(batch.lengths, batch.logp_old.flat.dtype)
        reference, ragged = learner.reference, logp_ref

        def score_reference(budget: int) -> None:
            for micro in learner.microbatches(batch, rows, budget):
                with torch.no_grad():
                    ragged.put(micro.rows, score(reference, batch, micro.rows, config, with_entropy=False)[0])

        within_memory(learner, batch, rows, config, score_reference, event)
        share_rows(learner.world, [logp_ref], rows, own_rows(batch, rows, learner.world))
    return estimate_advantages(batch, config, old_values_of_critic(learner, value, batch, config, event), logp_ref)


def old_values_of_critic(
    learner: Learner, value: ValueLearner, batch: Batch, config: Config, event: Event = lambda _kind, _message: None
) -> Ragged:
    """V of every token, before any update of the step."""
    rows, old = list(range(len(batch.lengths))), Ragged(batch.lengths, batch.advantage.flat.dtype)

    def score_critic(budget: int) -> None:
        for micro in learner.microbatches(batch, rows, budget):
            with torch.no_grad():
                old.put(micro.rows, score_values(value.critic, batch, micro.rows))

    within_memory(learner, batch, rows, config, score_critic, event)
    share_rows(learner.world, [old], rows, own_rows(batch, rows, learner.world))
    return old


def score(
    policy: Policy, batch: Batch, rows: Sequence[int], config: Config, *, with_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the rows' response tokens, end to end."""
    logp, entropy = policy(
        batch.packed(rows, policy.device), temperature=config.sampling.temperature, with_entropy=with_entropy
    )
    return logp, entropy


T = TypeVar("T")


def within_memory(
    learner: Learner,
    batch: Batch,
    rows: Sequence[int],
    config: Config,
    work: Callable[[int], T],
    event: Event,
    *,
    undo: Callable[[], None] = lambda: None,
) -> T:
    """work(token budget); where the device runs out of memory: undone, and repeated with less.

    Less is first, under gradient_checkpointing = "auto", all layers recomputed; then half the budget. Either stays for
    the rest of the run. It ends where the longest row alone does not fit. A rank of a sharded model cannot repeat a
    pass by itself: there the run ends.
    """
    while True:
        budget = learner.tokens_per_microbatch or config.train.tokens_per_microbatch
        try:
            return work(budget)
        except torch.OutOfMemoryError as error:
            reason = str(error).split(". ")[0]
        if learner.is_sharded:
            raise EngineError(
                f"train.tokens_per_microbatch = {budget}: {reason}.",
                remedy="Lower it (safe to change on resume), or set train.gradient_checkpointing = true.",
            )
        undo()
        batch.packs.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if config.train.gradient_checkpointing == "auto" and not learner.recomputes_all:
            learner.recomputes_all = True
            fit_activations(learner, batch, config)
            event("memory", f"{reason}; every layer recomputes its activations from now on, the pass is repeated")
            continue
        longest = max(batch.tokens(row) for row in rows)
        if budget <= longest:
            raise EngineError(
                f"train.tokens_per_microbatch = {budget}: no memory for the longest row ({longest} tokens) alone.",
                remedy="Set train.gradient_checkpointing = true, train.moments = int8 or host, or lower "
                "limits.max_response_tokens.",
            )
        learner.tokens_per_microbatch = max(budget // 2, 1)
        event("memory", f"{reason}; tokens_per_microbatch {budget} -> {budget // 2}, the pass is repeated")


def update_once(
    learner: Learner,
    batch: Batch,
    rows: Sequence[int],
    config: Config,
    lr: float,
    sums: Sums,
    record: StepRecord | None,
    *,
    is_old: bool = False,
    event: Event = lambda _kind, _message: None,
) -> None:
    """One optimizer update over `rows`, in as many micro-batches as the token budget asks for.

    `is_old`: the weights still are π_old and nobody has scored these rows; the update does it on its way.
    """
    totals = Totals.of(batch, rows)

    def accumulate(budget: int) -> Sums:
        seen = Sums()
        for micro in learner.microbatches(batch, rows, budget):
            said, noted = (seen, record) if micro.counts else (Sums(), None)
            loss = microbatch_loss(learner, batch, micro.rows, totals, config, said, noted, is_old=is_old)
            (loss if micro.counts else 0 * loss).backward()
        return seen

    sums.merge(within_memory(learner, batch, rows, config, accumulate, event, undo=learner.optimizer.zero_grad))
    if is_old:
        share_rows(learner.world, old_values(batch), rows, own_rows(batch, rows, learner.world))
    outcome = learner.optimizer.step(lr)
    if learner.world.is_first:  # counted once: sums are over the ranks
        sums.add(updates=1, gradient_norm=outcome.gradient_norm if not outcome.is_skipped else 0.0)
        sums.add(skipped=float(outcome.is_skipped))
    count_bad(learner, outcome, config)
    learner.updates += not outcome.is_skipped


def count_bad(learner: Learner, outcome: UpdateOutcome, config: Config) -> None:
    """A skipped update is counted; too many in a row, of policy or critic, stop the run."""
    if not outcome.is_skipped:
        learner.bad_updates = 0
        return
    learner.bad_updates += 1
    if learner.bad_updates > config.train.max_bad_updates:
        raise EngineError(
            f"{learner.bad_updates} updates in a row had a gradient that is not finite.",
            remedy="The newest checkpoint is from before. Lower train.lr, or try model.dtype = float32.",
        )


def update_critic(
    learner: Learner,
    batch: Batch,
    values: Values,
    rows: Sequence[int],
    config: Config,
    sums: Sums,
    event: Event = lambda _kind, _message: None,
) -> None:
    """One update of the critic over the same rows, by its own optimizer at its own learning rate."""
    assert learner.value is not None, "values come from a critic"
    value, critic = learner.value, config.algorithm.critic
    totals = Totals.of(batch, rows)

    def accumulate(budget: int) -> Sums:
        seen = Sums()
        for micro in learner.microbatches(batch, rows, budget):
            token_loss = value_share(value, batch, values, micro.rows, clip=critic.value_clip)
            loss = mean(token_loss, batch, micro.rows, totals, config)
            (loss if micro.counts else 0 * loss).backward()
            if micro.counts:
                seen.add(critic_loss=loss)
        return seen

    sums.merge(within_memory(learner, batch, rows, config, accumulate, event, undo=value.optimizer.zero_grad))
    outcome = value.optimizer.step(critic.lr)
    if learner.world.is_first:
        sums.add(critic_updates=1, critic_gradient_norm=0.0 if outcome.is_skipped else outcome.gradient_norm)
        sums.add(skipped=float(outcome.is_skipped))
    count_bad(learner, outcome, config)


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

    Everything is [1, N], all response tokens end to end: a padded [B, T] would be as long as its longest row.
    """
    algorithm, device = config.algorithm, learner.policy.device
    flat, entropy = score(learner.policy, batch, rows, config, with_entropy=is_old)
    if is_old:
        keep_old(batch, config, rows, flat, entropy)
    logp = flat[None]
    logp_old = batch.logp_old.joined(rows, device)[None]
    advantage = batch.advantage.joined(rows, device)[None]
    clip = algorithm.clip

    token_loss = clipped_surrogate(
        logp, logp_old, advantage, clip_low=clip.low, clip_high=clip.high, dual_clip=clip.dual
    )
    if algorithm.importance_cap is not None:
        engine = batch.logp_engine.joined(rows, device)[None]
        weight = importance_weight(logp_old, engine, cap=algorithm.importance_cap)
        token_loss = token_loss * weight
        sums.add(weight=weight.sum(), weight_squared=(weight**2).sum(), weights=weight.numel())
    loss = mean(token_loss[0], batch, rows, totals, config)
    sums.add(policy_loss=loss)
    if learner.reference is not None and algorithm.kl.place == "loss":
        with torch.no_grad():
            logp_ref = score(learner.reference, batch, rows, config, with_entropy=False)[0][None]
        kl = mean(kl_penalty(logp, logp_ref, kind=algorithm.kl.kind)[0], batch, rows, totals, config)
        loss = loss + algorithm.kl.coefficient * kl
        sums.add(kl_ref=kl)
    if algorithm.positive_nll:
        is_positive = per_token(batch.is_correct, batch, rows).to(device)[None]
        nll = positive_nll(logp, is_positive, total_tokens=totals.positive_tokens)
        loss = loss + algorithm.positive_nll * nll
        sums.add(positive_nll=nll)
    clipped = clipped_tokens(logp, logp_old, advantage, clip_low=clip.low, clip_high=clip.high, dual_clip=clip.dual)
    observe_tokens(sums, logp.detach(), logp_old, clipped)
    if record is not None:
        remember(record, rows, (logp.detach() - logp_old)[0], clipped)
    return loss


def per_token(values: Tensor, batch: Batch, rows: Sequence[int]) -> Tensor:
    """[B] one value per row of the batch -> [N] for every token of the chosen rows."""
    chosen = torch.tensor(list(rows))
    return torch.repeat_interleave(values[chosen], torch.tensor([batch.lengths[row] for row in rows]))


def mean(token_loss: Tensor, batch: Batch, rows: Sequence[int], totals: Totals, config: Config) -> Tensor:
    """The configured mean of losses [N], over the whole update's counts."""
    mask = torch.ones_like(token_loss, dtype=torch.bool)
    match config.algorithm.mean:
        case "token":
            return token_mean(token_loss[None], mask[None], total_tokens=totals.tokens)
        case "sequence":  # eq. 5 is eq. 8 with every response as a group of its own
            response, tokens = torch.arange(len(batch.lengths)), torch.tensor(batch.lengths)
            return grouped_mean(token_loss, mask, per_token(response, batch, rows), tokens, totals.sequences)
        case "prompt":
            group = per_token(batch.group, batch, rows)
            return grouped_mean(token_loss, mask, group, totals.group_tokens, totals.prompts)
        case "constant":
            length = config.algorithm.mean_constant_tokens or config.limits.max_response_tokens
            return constant_norm(token_loss[None], mask[None], constant=totals.sequences * length)


def grouped_mean(token_loss: Tensor, mask: Tensor, group: Tensor, group_tokens: Tensor, n_groups: int) -> Tensor:
    """`prompt_mean` over tokens end to end: N rows of one token each."""
    device = token_loss.device
    return prompt_mean(
        token_loss[:, None],
        mask[:, None],
        group.to(device),
        total_prompts=n_groups,
        group_tokens=group_tokens.to(device),
    )


def observe_tokens(sums: Sums, logp: Tensor, logp_old: Tensor, clipped: ClippedTokens) -> None:
    probability = torch.where(clipped.high, logp.exp(), 0.0)
    sums.add(
        tokens=logp.numel(),
        kl_old=(logp_old - logp).sum(),
        low=clipped.low.sum(),
        high=clipped.high.sum(),
        dual=clipped.dual.sum(),
        high_probability=probability.sum(),
    )
    sums.peak(high_probability=probability.max())


def remember(record: StepRecord, rows: Sequence[int], log_ratio: Tensor, clipped: ClippedTokens) -> None:
    """Ratio and clip of the first update that saw each token; later epochs do not overwrite it."""
    side = (clipped.high.float() - (clipped.low | clipped.dual).float())[0]
    is_new = [bool(torch.isnan(record.ratio.row(row)[0])) for row in rows]
    lengths = [record.ratio.lengths[row] for row in rows]
    ratios, sides = (x.cpu().split(lengths) for x in (log_ratio.exp(), side))
    for row, new, ratio, clip in zip(rows, is_new, ratios, sides, strict=True):
        if new:
            record.ratio.row(row).copy_(ratio)
            record.clip.row(row).copy_(clip)


def summarise(batch: Batch, sums: Sums, lr: float, learner: Learner, start: int) -> dict[str, float]:
    """The step's metrics from its sums."""
    metrics = {
        "lr": lr,
        "updates": learner.updates - start,
        "updates_total": learner.updates,
        "policy/loss": sums.ratio("policy_loss", "updates"),
        "policy/gradient_norm": sums.ratio("gradient_norm", "updates"),
        "policy/skipped_updates": sums.total("skipped"),
        "policy/kl_old": sums.ratio("kl_old", "tokens"),
        "clip/low": sums.ratio("low", "tokens"),
        "clip/high": sums.ratio("high", "tokens"),
        "clip/dual": sums.ratio("dual", "tokens"),
        "clip/high_probability_mean": sums.ratio("high_probability", "high"),
        "clip/high_probability_max": float(sums.largest.get("high_probability", torch.zeros(()))),
    }
    if "kl_ref" in sums.sums:
        metrics["policy/kl_ref"] = sums.ratio("kl_ref", "updates")
    if "positive_nll" in sums.sums:
        metrics["policy/positive_nll"] = sums.ratio("positive_nll", "updates")
    if sums.total("weights"):
        squared = sums.total("weights") * sums.total("weight_squared")
        metrics["engine/effective_sample_size"] = sums.total("weight") ** 2 / squared
    if sums.total("critic_updates"):
        metrics["critic/loss"] = sums.ratio("critic_loss", "critic_updates")
        metrics["critic/gradient_norm"] = sums.ratio("critic_gradient_norm", "critic_updates")
    return metrics | score_metrics(batch)


def score_metrics(batch: Batch) -> dict[str, float]:
    """What the π_old pass says of all tokens: entropy, probability, and how far the engine's log-probs are off."""
    if not batch.lengths:
        return {}
    gap = batch.logp_trainer.flat - batch.logp_engine.flat
    return {
        "policy/entropy": float(batch.entropy.flat.mean()),
        "policy/probability": float(batch.logp_trainer.flat.exp().mean()),
        "engine/gap_mean": float(gap.abs().mean()),
        "engine/gap_max": float(gap.abs().max()),
        "engine/kl": float((torch.expm1(gap) - gap).mean()),
    }
