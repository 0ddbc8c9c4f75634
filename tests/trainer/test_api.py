"""Training from Python: own problems, own reward, callbacks; what is refused; and the example, run as a script."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import toy

import dapo
from dapo.errors import ConfigError, DapoError, DataError
from dapo.models.load import save_policy
from dapo.trainer.api import importable_name
from dapo.trainer.loop import train
from dapo.trainer.resume import resume_run
from tiny_models import tiny_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_reward.py"


class Steps(dapo.Observer):
    """Counts the steps, and stops the run after `last`."""

    def __init__(self, last: int = 99) -> None:
        self.seen: list[float] = []
        self.last = last

    def on_start(self, run: object) -> None:
        self.run = run

    def on_step(self, metrics: Mapping[str, float]) -> None:
        self.seen.append(metrics["step"])
        self.run.is_stopping = len(self.seen) >= self.last  # type: ignore[attr-defined]


def test_own_problems_reward_and_callback(tmp_path: Path):
    steps, own = Steps(), list(toy.problems())[:20]
    result = dapo.train(
        toy.recipe(tmp_path, dtype="float32"),
        out=tmp_path / "run",
        overrides=["train.steps=2", "eval.every_steps=2", "eval.k=2"],
        callbacks=[steps],
        problems=own,
        eval_problems=lambda: list(toy.problems())[20:24],
        reward=toy.contains,
    )
    assert steps.seen == [1, 2]
    assert result.is_finished
    assert result.step == result.metrics["step"] == 2
    assert [line["step"] for line in result.evaluations] == [0, 2]
    assert result.evaluations[0]["problems"] == 4
    assert result.model is not None
    assert (result.model / "config.json").is_file()
    assert 'verifier = "toy:contains"' in (result.folder / "config.toml").read_text()


@pytest.mark.slow
def test_a_stopped_run_resumes_with_its_own_problems(tmp_path: Path):
    resolved = toy.recipe(tmp_path, dtype="float32")
    own = list(toy.problems())[:20]
    straight = dapo.train(resolved, out=tmp_path / "straight", problems=own)
    stopped = dapo.train(resolved, out=tmp_path / "stopped", problems=own, callbacks=[Steps(last=1)])
    assert not stopped.is_finished
    assert stopped.step == 1
    resumed = resume_run(tmp_path / "stopped")
    train(resumed)
    resumed.close()
    assert straight.model is not None
    first, second = (
        folder / "checkpoints" / "step-000003" / "model" / "model.safetensors"
        for folder in (straight.folder, stopped.folder)
    )
    assert first.read_bytes() == second.read_bytes()


def nested():
    def inside(response: str, answer: str, meta: Mapping[str, object]) -> dapo.Score:  # noqa: ARG001
        return dapo.Score(0.0)

    return inside


class Holder:
    def method(self, response: str, answer: str, meta: Mapping[str, object]) -> dapo.Score:  # noqa: ARG002
        return dapo.Score(0.0)


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        (lambda response, answer, meta: dapo.Score(0.0), "is a lambda"),  # noqa: ARG005
        (nested(), "is defined inside a function"),
        (Holder().method, "is a method"),
        (Holder(), "is no function"),
        (42, "is no function"),
    ],
)
def test_a_reward_that_no_worker_can_import_is_refused(reward: object, why: str):
    with pytest.raises(ConfigError, match=why):
        importable_name(reward)  # type: ignore[arg-type]


def test_importable_rewards_by_name():
    assert importable_name(toy.contains) == "toy:contains"
    assert importable_name("some.module:function") == "some.module:function"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"problems": []}, DataError, "problems: is empty"),
        ({"problems": ["1 + 1"]}, DataError, r"problems\[0\]: is a str"),
        ({"eval_problems": [None]}, DataError, r"eval_problems\[0\]: is a NoneType"),
        ({"overrides": "train.steps=2"}, ConfigError, "is one string"),
        ({"overrides": ["train.stepz=2"]}, ConfigError, "no such key"),
        ({"overrides": ["preset=grpo"]}, ConfigError, "cannot change in a resolved config"),
        ({"overrides": ["model.path=/nowhere"], "problems": list(toy.problems())}, DapoError, "/nowhere"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(
    tmp_path: Path, arguments: dict[str, object], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        dapo.train(toy.recipe(tmp_path), out=tmp_path / "run", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_no_recipe_and_an_existing_folder_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is a int"):
        dapo.train(3, out=tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="exists already"):
        dapo.train("quickstart", out=Path(__file__).parent)


@pytest.mark.slow
def test_the_example_runs_as_a_script(tmp_path: Path):
    save_policy(tiny_policy("llama", seed=1), tmp_path / "model")
    arguments = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "run"), "--steps", "2"]
    answer = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        cwd=tmp_path,
    )
    assert answer.returncode == 0, answer.stderr
    assert "step 2: mean reward" in answer.stdout
    assert 'verifier = "custom_reward:shorter_is_better"' in (tmp_path / "run" / "config.toml").read_text()
