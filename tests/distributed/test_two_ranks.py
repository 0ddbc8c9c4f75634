"""The program that puts two ranks on one card (`tests/gpu/two_ranks.py`): its commands, and how it compares runs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from two_ranks import KEYS, LAYOUTS, command, compared

from dapo.config.load import load_recipe


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_a_valid_config(name: str):
    n_ranks, more = LAYOUTS[name]
    words = command("gsm8k-coder-0.5b-ladder", Path("run"), n_ranks, [*KEYS, *more])
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    config = load_recipe("gsm8k-coder-0.5b-ladder", sets).config
    assert config.cluster.ranks_per_gpu == n_ranks
    assert words[-2:] == ["--out", "run"]


def test_two_runs_are_compared_step_by_step_and_weight_by_weight(tmp_path: Path):
    for name, fates, weight in (("a", ["x", "y", "z"], 1.0), ("b", ["x", "y", "w"], 1.25)):
        model = tmp_path / name / "checkpoints" / "step-000003" / "model"
        model.mkdir(parents=True)
        save_file({"w": torch.full((2,), weight)}, model / "model.safetensors")
        (tmp_path / name / "ledger.jsonl").write_text("".join(f"{json.dumps({'groups': fate})}\n" for fate in fates))
        (tmp_path / name / "metrics.jsonl").write_text('{"accuracy": 0.5, "timing.step_s": 2.0}\n')
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found["same_groups_up_to_step"] == 2
    assert found["same_tokens_up_to_step"] == 0  # none is recorded
    assert found["largest_weight_difference"] == 0.25
