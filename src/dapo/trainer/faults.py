"""Responses that the engine aborted: each becomes an event, and rollout.on_fault may stop the run."""

from __future__ import annotations

from dapo.errors import EngineError
from dapo.rollout.engine import Engine
from dapo.trainer.run import Run

LATER = "The newest checkpoint is from before. Lower train.lr, or try model.dtype = float32."
UNTRAINED = "The policy has not moved yet: check the weights, or try model.dtype = float32."


def report_faults(run: Run, engine: Engine, where: str, *, remedy: str = LATER) -> int:
    """Write an event for every new fault of any rank's engine; returns how many. rollout.on_fault may stop the run."""
    own = [
        f"problem {fault.request.key.problem!r}, response {fault.request.key.response_index}: {fault.reason} at token "
        f"{fault.position}; the response was given up."
        for fault in engine.faults
    ]
    engine.faults.clear()
    faults = [message for part in run.world.gather(own) for message in part]
    for message in faults:
        run.event("fault", message)
    if faults and run.config.rollout.on_fault == "stop":
        raise EngineError(
            f"rollout.on_fault = stop: the engine gave up {len(faults)} responses in {where} because their logits "
            "were not finite.",
            remedy=remedy,
        )
    return len(faults)
