"""float16 on a GPU: the loss scale is found, the weights follow float32, a resume is exact; the gap is measured."""

import json

import numpy as np
import pytest
import torch

from command_line import dapo
from dapo.learner.loss_scale import FIRST, LossScale
from dapo.learner.optimizer import Optimizer
from dapo.models.packing import pack
from dapo.models.policy import Policy
from tiny_models import VOCABULARY, tiny_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def optimizer_of(policy: Policy, scale: LossScale | None) -> Optimizer:
    return Optimizer(
        policy.named_parameters(), betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=1.0, loss_scale=scale
    )


def loss_of(policy: Policy) -> torch.Tensor:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, 4).tolist() for _ in range(6)]
    packed = pack(prompts, [rng.integers(3, VOCABULARY, 30) for _ in range(6)], "cuda")
    logp, _ = policy(packed, temperature=1.0)
    return -logp.mean()


@pytest.mark.parametrize("family", ["llama-tied", "qwen2-window", "qwen3"])
def test_gradients_in_float16_are_those_of_float32_nearly(family: str):
    norms = {}
    for dtype in (torch.float32, torch.float16):
        policy = tiny_policy(family, dtype).cuda()
        optimizer = optimizer_of(policy, LossScale(2.0**10) if dtype == torch.float16 else None)
        optimizer.scaled(loss_of(policy)).backward()
        outcome = optimizer.step(0.0)
        assert not outcome.is_skipped
        norms[dtype] = outcome.gradient_norm
    assert norms[torch.float16] == pytest.approx(norms[torch.float32], rel=1e-2)


def test_a_loss_too_large_for_float16_is_searched_down_and_then_trained_on():
    policy = tiny_policy("qwen3", torch.float16).cuda()
    optimizer = optimizer_of(policy, LossScale())
    skipped, before = 0, float(loss_of(policy))
    for _ in range(60):
        optimizer.scaled(1000 * loss_of(policy)).backward()
        outcome = optimizer.step(1e-2)
        assert not outcome.is_bad
        skipped += outcome.is_skipped
    assert optimizer.loss_scale is not None
    assert 0 < skipped < 30
    assert optimizer.loss_scale.value == FIRST / 2**skipped
    assert float(loss_of(policy)) < before - 0.1


@pytest.mark.parametrize("preset", ["dapo", "ppo"])
def test_a_run_in_float16_trains_and_resumes(tmp_path, preset: str):
    keys = ("model.dtype=float16", "model.device=cuda", f"preset={preset}", "eval.every_steps=0")
    sets = [word for key in keys for word in ("--set", key)]
    out = str(tmp_path / "run")
    assert dapo("train", "quickstart", *sets, "--set", "train.steps=2", "--out", out).returncode == 0
    assert dapo("resume", out, "--set", "train.steps=3").returncode == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert all(line["policy/skipped_updates"] == 0 for line in lines)
    assert all(1 <= line["update/loss_scale"] <= FIRST for line in lines)
    assert sum(line["updates"] for line in lines) > 0


def test_explain_measures_both_types():
    made = dapo("explain", "quickstart", "--measure", "--set", "model.device=cuda", "--json")
    assert made.returncode == 0
    found = json.loads(made.stdout)["precision"]
    assert [gap["dtype"] for gap in found["gaps"]] == ["bfloat16", "float16"]
    assert all(gap["tokens"] > 0 and 0 < gap["mean"] < 0.05 for gap in found["gaps"])
    assert found["recommended"].startswith(("bfloat16:", "float16:"))
