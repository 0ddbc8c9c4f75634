"""Warnings of settings that are allowed but likely to fail, with the remedy: at a run's start and in `dapo explain`."""

from __future__ import annotations

from collections.abc import Iterator

from dapo.config.horizon import horizon, is_short, longer
from dapo.config.schema import Config


def warnings_of(config: Config) -> list[str]:
    return [*short_horizon(config), *uncorrected_rollouts(config)]


def short_horizon(config: Config) -> Iterator[str]:
    gae, limit = config.algorithm.gae, config.limits.max_response_tokens
    if config.has_critic and is_short(gae, limit):
        yield (
            f"algorithm.gae: the effective GAE horizon is short. The reward reaches about the last "
            f"{horizon(gae, limit):,.0f} tokens of up to {limit:,}; the others learn from the critic's values alone, "
            f"and models got worse that way. Try {longer(gae)}."
        )


def uncorrected_rollouts(config: Config) -> Iterator[str]:
    is_corrected = config.algorithm.correction.cap is not None or config.algorithm.old_logp == "bypass"
    if config.rollout.quantization != "none" and not is_corrected:
        yield (
            f"rollout.quantization = {config.rollout.quantization}: responses come from slightly other probabilities "
            "than the trainer's, and nothing corrects for it. Set algorithm.correction.cap = 2.0 (truncated importance "
            "sampling); engine/kl tells how far apart they are."
        )
