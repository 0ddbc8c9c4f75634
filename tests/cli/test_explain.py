"""`dapo explain`: figures that bound each other are told together, and a model's shape is read where it lies."""

import json
from pathlib import Path

import pytest

from dapo.cli.explain.cluster import at_once_in_words as at_once_in_a_cluster
from dapo.cli.explain.command import at_once_in_words, plan_of
from dapo.config import load_recipe
from dapo.config.model_shapes import shape_from_config, shape_of, why_no_shape

SHAPE = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 99}


def words(*overrides: str, gpus: int | None = None) -> tuple[dict[str, int], dict[str, str]]:
    resolved = load_recipe("gsm8k-1.5b-24gb", list(overrides))
    memory = plan_of(resolved, "rtx4090", gpus)["memory"]
    return memory, dict(at_once_in_words(resolved.config, memory))


def test_the_setting_bounds_where_memory_holds_more():
    memory, said = words("rollout.max_concurrent_sequences=100")
    full = memory["full_length_responses_at_once"]
    assert full > 100
    assert said["concurrent responses"].startswith("100: rollout.max_concurrent_sequences = 100;")
    assert f"{full:,} of full length (1,536 tokens)" in said["concurrent responses"]
    assert said["responses per step"] == "512, in 6 rounds or more"  # 512 / 100


def test_memory_bounds_where_the_setting_allows_more():
    memory, said = words("rollout.max_concurrent_sequences=5000")
    full = memory["full_length_responses_at_once"]
    assert said["concurrent responses"].startswith(f"{full:,} to 5,000: memory is enough for {full:,} of full length")
    assert said["responses per step"] == "512"


def test_products_in_fp8_are_told():
    _, said = words("rollout.quantization=fp8")
    assert said["matrix products"] == "FP8 while responses are generated"
    assert "matrix products" not in words()[1]


def test_the_setting_is_shared_by_all_replicas():
    memory, said = words("rollout.max_concurrent_sequences=100", gpus=4)
    assert (memory["replicas"], memory["allowed_responses_at_once"]) == (4, 25)
    assert "100 / 4 replicas = 25 each" in said["concurrent responses"]


@pytest.mark.parametrize(
    ("slots", "limit", "expected"),
    [(8, 32, "by rollout.max_concurrent_sequences = 32"), (5, 32, "allows more"), (50, 32, "set it to 200,")],
)
def test_a_plan_for_a_cluster_says_whether_the_recipe_lets_it_be(slots: int, limit: int, expected: str):
    said = at_once_in_a_cluster({"slots": slots, "replicas": 4, "max_concurrent_sequences": limit})
    assert f"{slots} per replica x 4 = {4 * slots}" in said
    assert expected in said


# ------------------------------------------------------------------ shapes


def test_a_folder_says_its_shape(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"num_key_value_heads": 2}))
    shape = shape_of(str(tmp_path))
    assert (shape.layers, shape.kv_heads, shape.head_size, shape.vocabulary) == (3, 2, 16, 99)


def test_the_cache_of_the_hub_says_it_of_a_model_that_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--org--name"
    for revision, layers in (("c0ffee", 3), ("5eed", 5)):
        (home / "snapshots" / revision).mkdir(parents=True)
        (home / "snapshots" / revision / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("c0ffee")
    assert shape_of("org/name").layers == 3
    assert shape_of("org/name", "5eed").layers == 5
    assert shape_of("org/other") is None
    assert shape_of("/no/such/folder") is None


def test_what_is_no_dense_decoder_has_no_shape_here():
    assert shape_from_config(SHAPE) is not None
    assert shape_from_config({"text_config": SHAPE, "vision_config": {}}).layers == 3
    for change in ({"num_experts": 8}, {"hidden_size": "64"}, {"num_attention_heads": 0}, {"vocab_size": None}):
        assert shape_from_config(SHAPE | change) is None


def test_why_the_memory_is_not_estimated_fits_what_the_path_is(tmp_path):
    assert why_no_shape("owner/my model", None).endswith("Download it: hf download 'owner/my model' config.json")
    gone = why_no_shape(str(tmp_path / "my moe"), None)
    assert "no config.json" in gone
    assert "hf download" not in gone
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    assert "is not a dense decoder" in why_no_shape(str(tmp_path), None)
