"""`--fit`: a recipe whose memory fits a card, and what was chosen for it."""

from __future__ import annotations

import math
import os

import typer

from dapo.config import Resolved, load_recipe
from dapo.config.machine import GIB
from dapo.config.model_shapes import shape_of, why_no_shape
from dapo.errors import ConfigError
from dapo.planning.fit import FREE, Fit, card_gib, fit, refuse


def fitted(recipe: str, sets: list[str], typed: str, resolved: Resolved) -> Resolved:
    """The recipe with what `--fit` chose; keys that were typed stay as they are."""
    config = resolved.config
    device_gib = min(card_gib(typed), config.model.gpu_memory_gib or math.inf)
    if config.model.device in ("cpu", "mps"):
        raise ConfigError(
            f"--fit {typed}: is for GPUs, and model.device is {config.model.device}.", remedy="Leave one of them out."
        )
    shape = shape_of(config.model.path, config.model.revision)
    if shape is None:
        why = why_no_shape(config.model.path, config.model.revision)
        raise ConfigError(
            f"--fit {typed}: memory is not estimated. {why}",
            remedy="Or leave --fit out, and set train.tokens_per_microbatch and rollout.kv_cache_gib yourself.",
        )
    kept = [key for key, layer in resolved.origin.items() if layer == "--set"]
    found = fit(config, shape, device_gib, kept)
    refuse(found, resolved.name, typed, device_gib, shape, kept)
    if os.environ.get("RANK", "0") == "0":  # the others choose the same
        typer.echo(in_words(found, typed, device_gib))
    return load_recipe(recipe, [*(one.override for one in found.choices), *sets])


def in_words(found: Fit, typed: str, device_gib: float) -> str:
    """What was chosen and why, with the estimate; `dapo explain` has it by part."""
    said = f"{found.memory.fixed / GIB:.1f} of {device_gib:g} GiB without KV cache, {FREE:.0%} left free"
    head = f"--fit {typed}: {said}; room for {found.at_full_length:,} responses of full length at once (estimated)."
    width = max((len(one.override) for one in found.choices), default=0)
    lines = [f"  --set {one.override:<{width}}  {one.why}" for one in found.choices]
    return "\n".join([head, *(lines or ["  It fits as it is."])])
