"""Losses, advantages and corrections in a config: what goes together, and what is refused with reason and remedy."""

import pytest

from dapo.config import load_recipe
from dapo.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.loss=huber"], ['algorithm.loss = "huber": must be one of', "'cispo'"]),
        (["algorithm.clip.low=none"], ["algorithm.clip.low = none: only the weight of algorithm.loss = cispo"]),
        (
            ["preset=ppo", "algorithm.loss=gspo"],
            ["algorithm.loss = gspo: it has one ratio for a response", 'algorithm.loss = "gspo-token"'],
        ),
        (
            ["preset=cispo", "algorithm.clip.dual=10.0"],
            ["algorithm.clip.dual: has no effect here", 'algorithm.loss = "clip"'],
        ),
    ],
)
def test_bad_combinations_name_key_value_reason_and_remedy(overrides: list[str], said: list[str]):
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", overrides)
    for part in said:
        assert part in str(caught.value)
