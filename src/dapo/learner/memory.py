"""Passes that run out of the device's memory are undone and repeated with less; how much less is remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dapo.config.schema import Config
from dapo.errors import OutOfMemoryError, shortage
from dapo.learner.activations import checkpoint_layers, fit_layers
from dapo.learner.batch import Batch
from dapo.learner.learner import Learner

Event = Callable[[str, str], None]  # (kind, message)
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
            reason = shortage(error)
        if learner.is_sharded:
            raise OutOfMemoryError(
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
            raise OutOfMemoryError(
                f"train.tokens_per_microbatch = {budget}: no memory for the longest row ({longest} tokens) alone: "
                f"{reason}.",
                remedy="dapo resume RUN --set train.gradient_checkpointing=true; or begin anew with train.moments = "
                "int8 or host, or a lower limits.max_response_tokens.",
            )
        learner.tokens_per_microbatch = max(budget // 2, 1)
        event("memory", f"{reason}; tokens_per_microbatch {budget} -> {budget // 2}, the pass is repeated")


def fit_activations(learner: Learner, batch: Batch, config: Config) -> None:
    """Recompute in as few layers as this step's largest micro-batch asks for, in the policy and in the critic."""
    budget = learner.tokens_per_microbatch or config.train.tokens_per_microbatch
    longest = max(batch.tokens(row) for row in range(len(batch.lengths)))
    tokens = max(longest, min(budget, sum(map(batch.tokens, range(len(batch.lengths))))))
    optimizers = [learner.optimizer, *([learner.critic.optimizer] if learner.critic is not None else [])]
    modules: list[Any] = [learner.policy, *([learner.critic.model] if learner.critic is not None else [])]
    to_come = sum(optimizer.bytes_to_come() for optimizer in optimizers)
    for module in modules:
        if learner.recomputes_all:
            checkpoint_layers(module)
            continue
        fit_layers(module, tokens, bytes_to_come=to_come, is_fused=config.model.kernels == "fused")
