"""What a model folder's config.json says, read before anything is loaded."""

from pathlib import Path

import pytest

from dapo.config.model_shapes import config_of, positions_of, shape_of


@pytest.mark.parametrize("text", ["torn {", "[1]", None])
def test_a_config_that_cannot_be_read_is_none(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert config_of(str(tmp_path)) is None
    assert shape_of(str(tmp_path)) is None


def test_the_embedded_model_has_a_shape_and_positions():
    assert positions_of(config_of("bundled") or {}) == 256
    assert shape_of("bundled") is not None


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({}, None),
        ({"max_position_embeddings": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 256),
        # Qwen2.5 with YaRN names the positions before stretching, Llama 3.1 those after it.
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            },
            131072,
        ),
        # Somebody's file.
        ({"max_position_embeddings": 256, "text_config": "x", "rope_scaling": [1]}, 256),
        ({"max_position_embeddings": 256, "rope_scaling": {"factor": float("inf")}}, 256),
        ({"max_position_embeddings": 256, "rope_scaling": {"factor": float("nan")}}, 256),
        ({"max_position_embeddings": 256, "rope_scaling": {"factor": 2, "original_max_position_embeddings": "x"}}, 512),
    ],
)
def test_positions_are_those_after_stretching(config: dict, positions: int | None):
    assert positions_of(config) == positions
