"""The metrics of a short seeded run, to eight digits: a change that moves the mathematics shows here first.

In float64 on the plain engine, so that machines differ in their last digits alone. Where they are meant to move, write
them anew and say why in the commit: `PYTHONPATH=src:tests python tests/quickstart/test_reference_curve.py`.
"""

import json
import tempfile
from pathlib import Path

import pytest

from dapo.config.load import load_recipe
from dapo.files import read_lines
from dapo.trainer.loop import train
from dapo.trainer.start import start_run
from exact_norms import exact_norms

CURVES = Path(__file__).with_name("reference_curve.json")
SHORT = [
    "model.device=cpu", "model.dtype=float64", "model.kernels=plain", "rollout.engine=plain", "rewards.workers=1",
    "train.steps=3", "train.updates_per_step=2", "sampling.prompts_per_step=4", "sampling.responses_per_prompt=4",
    "eval.every_steps=0", "records.every_steps=0", "checkpoint.every_steps=0", "checkpoint.resumable=false",
]  # fmt: skip
RUNS = {"dapo": ["preset=dapo"], "vapo": ["preset=vapo", "algorithm.critic.pretrain_responses=16"]}


def curve(preset: str, folder: Path) -> list[dict[str, float]]:
    """The declared metrics of each step, but for the clock."""
    run = start_run(load_recipe("quickstart", [*SHORT, *RUNS[preset]]), folder / preset)
    try:
        with exact_norms():
            train(run)
    finally:
        run.close()
    lines = read_lines(folder / preset / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("timing.")} for line in lines]


@pytest.mark.parametrize("preset", ["dapo", pytest.param("vapo", marks=pytest.mark.slow)])
def test_the_curve_is_the_recorded_one(preset: str, tmp_path: Path):
    recorded = json.loads(CURVES.read_text())[preset]
    found = curve(preset, tmp_path)
    assert len(found) == len(recorded) == 3
    for line, expected in zip(found, recorded, strict=True):
        assert line == pytest.approx(expected, rel=1e-8, abs=1e-10)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        curves = {preset: curve(preset, Path(folder)) for preset in RUNS}
    CURVES.write_text(json.dumps(curves, indent=1) + "\n")
