"""Whether prompt and response fit the positions that the model was made for: beyond them it generates noise."""

from __future__ import annotations

from dapo.config.model_shapes import positions_of
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
