"""Responses that the engine gave up: every one is an event, and the config says whether the run goes on."""

from __future__ import annotations

from dapo.errors import EngineError
from dapo.trainer.run import Run


def report_faults(run: Run) -> int:
    """Turn the engine's new faults into events; their number. Stops the run where rollout.on_fault says so."""
    faults = list(run.engine.faults)
    run.engine.faults.clear()
    for fault in faults:
        request = fault.request
        run.event(
            "fault",
            f"problem {request.key.problem!r}, response {request.key.response_index}: {fault.reason} at token "
            f"{fault.position}; the response was given up.",
        )
    if faults and run.config.rollout.on_fault == "stop":
        raise EngineError(
            f"rollout.on_fault = stop: the engine gave up {len(faults)} responses in step {run.step + 1} because their "
            "logits were not finite.",
            remedy="The newest checkpoint is from before. Lower train.lr, or try model.dtype = float32.",
        )
    return len(faults)
