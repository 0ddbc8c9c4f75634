"""Whether prompt and response fit the positions that the model was made for: beyond them it writes noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dapo.errors import ConfigError
from dapo.models.policy import Policy


def refuse_short_context(
    policy: Policy, *, max_prompt_tokens: int, max_response_tokens: int, names: tuple[str, str]
) -> None:
    """`names` are the two limits as the user types them, up to their values; the prompt's first."""
    positions = positions_of(policy.config.get_text_config().to_dict())
    if positions is None or max_prompt_tokens + max_response_tokens <= positions:
        return
    prompt, response = names
    raise ConfigError(
        f"{response}{max_response_tokens:,} after a prompt of up to {prompt}{max_prompt_tokens:,}: the model has "
        f"{positions:,} positions.",
        remedy=f"Let both together be at most {positions:,}, or take a model with a longer context.",
    )


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Of a model's config.json, stretched positions (YaRN and its kin) included; None where it names no limit."""
    config = config.get("text_config") or config
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    stretch = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor = stretch.get("factor")
    if not isinstance(factor, int | float):
        return positions
    return max(positions, int(factor * (stretch.get("original_max_position_embeddings") or positions)))
