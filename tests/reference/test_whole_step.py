"""A whole step beside the reference trainer: every preset, every key that reaches its mathematics, a whole run.

Rewards, advantages, losses, gradients and new weights of policy and critic agree within 1e-9 of the largest number of
their kind; on the machine this was written on, within 1e-13. The library's norms work in float32 inside a model of
float64, so that a difference in the last digit could become one in the eighth; here they stay in float64, in both
trainers.
"""

import ast
import os
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch
from cases import CASES, ELSEWHERE, LEFT_OUT, NOT_IN_A_STEP, PRESETS, Case
from side_by_side import TOLERANCE, groups_of, make_models, run_both, settings
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from dapo.config.load import known_keys, preset_names

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def exact_norms() -> Iterator[None]:
    def forward(norm: Any, x: Tensor) -> Tensor:
        scaled: Tensor = norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return scaled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", forward)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


def check(folder: Path, overrides: dict[str, Any]) -> Tensor:
    """Both trainers agree; returns all our new weights."""
    gaps, weights = run_both(folder, overrides)
    wrong = {name: gap for name, gap in gaps.items() if not gap < TOLERANCE}
    assert not wrong, f"{overrides}: {wrong}"
    return torch.cat([weight.flatten() for weight in weights.values()])


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_does_what_the_papers_say(folder: Path, preset: str):
    _, keys = settings(folder, {"preset": preset})
    fields = known_keys()
    for key, value in keys.items():
        if key.startswith(("algorithm.", "shaping.overlong_", "sampling.")) and key not in IN_RECIPE:
            default = None if fields[key].is_required() else fields[key].default
            default = "group" if key == "algorithm.advantage" else default
            assert value == PRESETS[preset].get(key, default), key
    check(folder, {"preset": preset})


IN_RECIPE = {
    "algorithm.critic.path",
    "shaping.overlong_buffer_tokens",
    "sampling.prompts_per_step",
    "sampling.responses_per_prompt",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_value_of_a_key_does_what_the_papers_say(folder: Path, case: Case):
    results = {}
    for value in case.values:
        asked = value.format(folder=folder) if isinstance(value, str) else value
        results[value] = check(folder, case.base | {case.key: asked})
    for one, other in combinations(case.values, 2):
        if results[one].shape != results[other].shape:
            continue  # with and without a critic
        difference = float((results[one] - results[other]).abs().max())
        if case.is_seen:
            assert difference > 1e-7, f"{case.key}: {one} and {other} do the same"
        else:
            assert difference < TOLERANCE, f"{case.key}: {one} and {other} differ by {difference}"
