"""Every algorithm really learns the embedded task, in a short run on a CPU; a control does not."""

from pathlib import Path

import pytest

from dapo.config import load_recipe
from dapo.files import read_lines
from dapo.trainer.loop import train
from dapo.trainer.start import start_run


def gain(folder: Path, *overrides: str) -> float:
    run = start_run(load_recipe("quickstart", [*overrides, "model.device=cpu", "checkpoint.every_steps=0"]), folder)
    try:
        train(run)
    finally:
        run.close()
    scores = [line["avg@k"] for line in read_lines(folder / "eval.jsonl")]
    return scores[-1] - scores[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "steps", "least"), [("dapo", 8, 0.1), ("grpo", 8, 0.1), ("ppo", 8, 0.15), ("vapo", 8, 0.15)]
)
def test_it_learns(tmp_path: Path, preset: str, steps: int, least: float):
    keys = [f"preset={preset}", f"train.steps={steps}", f"eval.every_steps={steps}"]
    if preset in ("ppo", "vapo"):
        keys.append("algorithm.critic.pretrain_responses=1024")
    assert gain(tmp_path / "run", *keys) > least


@pytest.mark.slow
def test_shuffled_verdicts_teach_nothing(tmp_path: Path):
    length = ["train.steps=12", "eval.every_steps=12"]
    assert gain(tmp_path / "run", "rewards.control=shuffled", *length) < 0.05
