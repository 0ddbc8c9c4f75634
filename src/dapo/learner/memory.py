"""Retry a pass that runs out of device memory with less; the lower budget lasts for the rest of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dapo.errors import OutOfMemoryError, shortage
from dapo.learner.activations import checkpoint_layers, fit_layers
from dapo.learner.dry_run import shortage_of_any
from dapo.learner.optimizer import Optimizer
from dapo.learner.step import Step
from dapo.waiting.registry import waiting

T = TypeVar("T")


def within_memory(
    step: Step, rows: Sequence[int], work: Callable[[int], T], undo: Callable[[], None] = lambda: None
) -> T:
    """work(token budget) on `rows`. Where the device runs out of memory, undo() and repeat with less.

    First every layer recomputes its activations (under gradient_checkpointing = "auto"), then the budget halves. Both
    last for the rest of the run, which ends where the longest row alone does not fit. One rank cannot repeat a pass of
    a sharded model by itself, so the ranks try it before (`dry_run.py`) and lower the budget together.
    """
    learner, batch, config = step.learner, step.batch, step.config
    while True:
        budget = learner.tokens_per_microbatch or config.train.tokens_per_microbatch
        reason = shortage_of_any(step, rows, budget) if learner.is_sharded else ""
        if not reason:
            try:
                with waiting(f"a pass over micro-batches of {budget} tokens", collective=learner.collective):
                    return work(budget)
            except torch.OutOfMemoryError as error:
                reason = shortage(error)
            if learner.is_sharded:
                raise OutOfMemoryError(
                    f"train.tokens_per_microbatch = {budget}: {reason}, though its dry run had fitted.",
                    remedy="Lower it (safe to change on resume), or set train.gradient_checkpointing = true.",
                )
        undo()
        batch.packs.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if config.train.gradient_checkpointing == "auto" and not learner.recomputes_all:
            learner.recomputes_all = True
            fit_activations(step)
            step.event("memory", f"{reason}; every layer recomputes its activations from now on, the pass is repeated")
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
        step.event("memory", f"{reason}; tokens_per_microbatch {budget} -> {budget // 2}, the pass is repeated")


def fit_activations(step: Step) -> None:
    """Recompute in as few layers as this step's largest micro-batch allows, in the policy and in the critic."""
    learner, batch, config = step.learner, step.batch, step.config
    if config.train.gradient_checkpointing != "auto" or not batch.lengths:
        return
    budget = learner.tokens_per_microbatch or config.train.tokens_per_microbatch
    costs = [batch.tokens(row) for row in step.rows]
    tokens = max(max(costs), min(budget, sum(costs)))
    parts: list[tuple[Any, Optimizer]] = [(learner.policy, learner.optimizer)]
    if learner.critic is not None:
        parts.append((learner.critic.model, learner.critic.optimizer))
    to_come = sum(optimizer.bytes_to_come() for _, optimizer in parts)
    for module, _ in parts:
        if learner.recomputes_all:
            checkpoint_layers(module)
            continue
        fit_layers(module, tokens, bytes_to_come=to_come, is_fused=config.model.kernels == "fused")
