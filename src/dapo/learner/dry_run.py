"""Does a pass of a sharded model fit the memory of every rank? Tried before it, where one rank can fail by itself.

In the pass itself nobody can: the others wait inside a collective for the rank that has run out of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from dapo.errors import shortage
from dapo.learner.activations import recompute
from dapo.learner.batch import split_into_microbatches
from dapo.learner.learner import Learner, layers_of
from dapo.learner.microbatches import split_over_ranks
from dapo.learner.step import Step
from dapo.models.policy import Policy


def shortage_of_any(step: Step, rows: Sequence[int], budget: int) -> str:
    """Why some rank has no memory for its largest micro-batch of these rows; empty where all have. Collective.

    A micro-batch no larger than one that has fitted before is not tried again. All ranks know all micro-batches, so
    they agree on that without asking.
    """
    learner, batch = step.learner, step.batch
    shares = [
        split_into_microbatches(batch, part, budget) for part in split_over_ranks(batch, rows, learner.world.size)
    ]
    largest = [
        max((sum(map(batch.tokens, micro)), micro) for micro in micros) if micros else (0, []) for micros in shares
    ]
    tokens = max((n for n, _ in largest), default=0)
    if tokens <= learner.fitting_tokens:
        return ""
    _, own = largest[learner.world.rank]
    told = learner.world.gather(try_passes(step, own) if own else "")
    short = [
        f"rank {rank}: {reason}" if learner.world.size > 1 else reason for rank, reason in enumerate(told) if reason
    ]
    if not short:
        learner.fitting_tokens = tokens
    return "; ".join(short)


def try_passes(step: Step, rows: Sequence[int]) -> str:
    """A forward and backward pass of a micro-batch on the unsharded copy of the weights; the shortage, if there is one.

    Activations are those of the real pass. What else that needs is stood in for: gathered layers, their gradients, and
    what the optimizer has not allocated yet.
    """
    learner, whole = step.learner, step.learner.whole
    try:
        reserved = torch.empty(bytes_beside_activations(learner), dtype=torch.uint8, device=whole.device)
        with trained_like(whole, learner.policy):
            logp, _ = whole(step.batch.packed(rows, whole.device), temperature=step.config.sampling.temperature)
            first = next(parameter for parameter in whole.parameters() if parameter.requires_grad)
            torch.autograd.grad(logp.sum(), first, allow_unused=True)
        del reserved
    except torch.OutOfMemoryError as error:
        return shortage(error)
    return ""


def bytes_beside_activations(learner: Learner) -> int:
    """Two layers and what belongs to none, gathered; the gradients of one layer and of that, in the masters' type."""
    whole = learner.whole
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(whole)]
    layer = max(sizes, default=0)
    rest = sum(parameter.numel() for parameter in whole.parameters()) - sum(sizes)
    wide = next(iter(learner.optimizer.masters.values())).dtype.itemsize
    return (2 * layer + rest) * whole.dtype.itemsize + (layer + rest) * wide + learner.optimizer.bytes_to_come()


@contextmanager
def trained_like(whole: Policy, trained: Policy) -> Iterator[None]:
    """The unsharded copy keeps for a backward pass what the sharded one would: its layers recompute where those do."""
    layers: list[tuple[Any, Any]] = list(zip(layers_of(whole), layers_of(trained), strict=True))
    before = [(layer, dict(vars(layer))) for layer, _ in layers]
    for parameter, model in zip(whole.parameters(), trained.parameters(), strict=True):
        parameter.requires_grad_(model.requires_grad)
    for layer, twin in layers:
        for name in ("gradient_checkpointing", "training", "keeps_attention"):
            if hasattr(twin, name):
                setattr(layer, name, getattr(twin, name))
        layer._gradient_checkpointing_func = partial(recompute, layer)
    try:
        yield
    finally:
        whole.requires_grad_(False)
        for layer, kept in before:
            vars(layer).clear()
            vars(layer).update(kept)
