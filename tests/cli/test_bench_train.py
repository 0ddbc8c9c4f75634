"""`dapo bench train`: loads are read as written, both sides train on the same tokens, presets are compared."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dapo
from dapo.bench import presets as bench_presets
from dapo.bench.train_hf import batched
from dapo.bench.train_workloads import parse_load
from dapo.cli.bench import command
from dapo.config.model_shapes import BENCH_SHAPES, ModelShape
from dapo.errors import ConfigError
from dapo.models.random_model import random_model, training_flops

BUNDLED = str(Path(dapo.__file__).parent / "quickstart" / "model")


def run(*arguments: str) -> dict:
    result = CliRunner().invoke(command, ["train", "--model", BUNDLED, "--repeats", "1", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_loads_are_read_as_written():
    assert parse_load("8x1024").lengths == (1024,) * 8
    assert parse_load("1x16384c").is_checkpointed
    uneven = parse_load("lognormal:64:8192")
    assert len(uneven.lengths) == 64
    assert max(uneven.lengths) <= 8192
    assert uneven == parse_load("lognormal:64:8192")
    with pytest.raises(ConfigError, match="8by4"):
        parse_load("8by4")


@pytest.mark.slow
def test_every_side_is_measured_beside_hugging_face():
    figures = run("--loads", "2x16,2x16c", "--sides", "dapo,hf-masters")
    for load in figures["loads"]:
        assert load["tokens"] == 32
        for row in load["sides"].values():
            assert row["tokens_per_s"] == pytest.approx(32 / (row["ms"] / 1e3))
        assert load["sides"]["hf-masters"]["speed_over_hf-masters"] == 1


def test_the_sharded_path_is_measured_beside_the_plain_one():
    (load,) = run("--loads", "2x16", "--sides", "dapo,dapo-fsdp2")["loads"]
    plain, sharded = load["sides"]["dapo"], load["sides"]["dapo-fsdp2"]
    assert sharded["time_over_dapo"] == pytest.approx(sharded["ms"] / plain["ms"])
    assert "FSDP2 on one rank" in sharded["settings"]


@pytest.mark.slow
def test_two_presets_side_by_side(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_presets, "PROMPTS", 2)
    monkeypatch.setattr(bench_presets, "RESPONSES", 2)
    rows = run("--preset", "ppo,dapo")["presets"]
    assert rows["ppo"]["has_critic"]
    assert not rows["dapo"]["has_critic"]
    assert rows["dapo"]["time_of_first"] == pytest.approx(rows["dapo"]["ms"] / rows["ppo"]["ms"])
    assert rows["ppo"]["time_of_first"] == 1


def test_a_random_model_has_its_shapes_number_of_parameters():
    for shape in (ModelShape(2, 32, 48, 4, 2, 8, 100, True), ModelShape(2, 32, 48, 4, 2, 8, 100, False, True)):
        model = random_model(shape, dtype=torch.float32, device="cpu", attention="sdpa")
        assert sum(p.numel() for p in model.parameters()) == shape.parameters


def test_flops_are_six_per_weight_and_token_and_the_square_of_the_length():
    shape = BENCH_SHAPES["1.5b"]
    weights = shape.parameters
    one = training_flops(shape, [1024] * 8)
    assert one == pytest.approx(6 * weights * 8192, rel=0.05)
    attention = training_flops(shape, [8192]) - one
    assert attention == pytest.approx(6 * 28 * 1536 * (8192**2 - 8 * 1024**2))


@pytest.mark.parametrize("n", [0, 1, 4, 5, 6, 11])
def test_border_every_sequence_is_in_one_batch(n: int):
    rows = [[i] for i in range(n)]
    batches = batched(rows, 5)
    assert [row for batch in batches for row in batch] == rows
    assert [len(batch) for batch in batches] == [5] * (n // 5) + ([n % 5] if n % 5 else [])
