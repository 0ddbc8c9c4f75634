"""Prompts and responses that the model has no positions for are refused before anything is sampled."""

from pathlib import Path

import pytest
from toy import recipe

from dapo.errors import ConfigError
from dapo.trainer.start import start_run
from tiny_models import tiny_policy


def test_limits_beyond_the_models_positions_are_refused(tmp_path: Path):
    positions = tiny_policy("llama").config.max_position_embeddings
    with pytest.raises(ConfigError, match=rf"limits\.max_response_tokens = .* the model has {positions:,} positions"):
        start_run(recipe(tmp_path, f"limits.max_response_tokens={positions - 15}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    start_run(recipe(tmp_path, f"limits.max_response_tokens={positions - 16}"), tmp_path / "run").close()
