"""Whole runs on the quickstart model with `rollout.engine = "vllm"`: they train, evaluate, stop and go on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

SMALL = [
    "rollout.engine=vllm",
    "train.steps=2",
    "sampling.prompts_per_step=4",
    "sampling.responses_per_prompt=4",
    "train.updates_per_step=1",
    "eval.every_steps=2",
    "eval.k=1",
    "checkpoint.every_steps=1",
    "records.every_steps=1",
]


def dapo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dapo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def train(out: Path, *overrides: str) -> None:
    dapo("train", "quickstart", *(f"--set={item}" for item in [*SMALL, *overrides]), "--out", str(out))


def lines(path: Path) -> list[dict[str, Any]]:
    parsed = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("timing.")} for line in parsed]


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return load_file(newest / "model" / "model.safetensors")


@pytest.mark.parametrize("preset", ["dapo", "dapo-fast"])
def test_a_run_trains_and_resumes_to_the_same_end(tmp_path: Path, preset: str):
    """dapo-fast carries half-written responses over a step, so its checkpoints hold vLLM's requests."""
    train(tmp_path / "whole", f"preset={preset}")
    train(tmp_path / "parts", f"preset={preset}", "train.steps=1")
    dapo("resume", str(tmp_path / "parts"), "--set", "train.steps=2")

    whole = lines(tmp_path / "whole" / "metrics.jsonl")
    assert [line["step"] for line in whole] == [1, 2]
    for step in (1, 2):
        rows = pq.read_table(tmp_path / "whole" / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
        gap = np.concatenate([np.abs(np.array(row["logp"]) - np.array(row["logp_old"])) for row in rows])
        versions = np.concatenate([row["version"] for row in rows])
        assert gap[versions == step - 1].mean() < 1e-4, "the engine drew from other weights than the trainer's"
    assert lines(tmp_path / "parts" / "metrics.jsonl") == whole
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(a[name], b[name]) for name in a)
    evaluations = lines(tmp_path / "whole" / "eval.jsonl")
    assert [line["step"] for line in evaluations] == [0, 2]


def test_eval_scores_as_the_local_engine_does(tmp_path: Path):
    common = ["--model", "bundled", "--data", "dapo.quickstart.task:eval_problems", "--template", "raw", "--no-chat",
              "--k", "1", "--temperature", "0", "--max-prompt-tokens", "64", "--max-response-tokens", "64",
              "--json"]  # fmt: skip
    scores = {}
    for engine in ("local", "vllm"):
        done = dapo("eval", *common, "--engine", engine, "--out", str(tmp_path / f"{engine}.jsonl"))
        scores[engine] = json.loads(done.stdout)
    assert scores["vllm"]["avg@k"] == pytest.approx(scores["local"]["avg@k"], abs=0.02)  # greedy, but for ties
