"""Fill a step: by the prefix rule, or with carry-over and partial rollouts where a switch asks for them."""

from __future__ import annotations

import time

from dapo.config.schema import Config
from dapo.sampling.carry import CarryState, fill_step_carrying
from dapo.sampling.collect import Collector
from dapo.sampling.dynamic import Fill, Progress, Source, fill_step


def fill(
    collector: Collector, source: Source, config: Config, state: CarryState, *, version: int, progress: Progress
) -> Fill:
    """The groups of one step at weight version `version`."""
    start = time.perf_counter()
    filled = _filled(collector, source, config, state, version, progress)
    filled.seconds = time.perf_counter() - start
    return filled


def _filled(
    collector: Collector, source: Source, config: Config, state: CarryState, version: int, progress: Progress
) -> Fill:
    sampling = config.sampling
    filter_truncated, budget = config.shaping.overlong_filter, config.max_prompts_tried_per_step
    if sampling.carry_over or sampling.partial_rollouts:
        return fill_step_carrying(
            collector,
            source,
            sampling,
            state,
            version=version,
            filter_truncated=filter_truncated,
            max_prompts_tried=budget,
            progress=progress,
        )
    return fill_step(
        collector,
        source,
        sampling,
        state,
        filter_truncated=filter_truncated,
        max_prompts_tried=budget,
        progress=progress,
    )
