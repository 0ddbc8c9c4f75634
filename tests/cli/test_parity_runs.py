"""`dapo bench parity --out`: what is refused, what the rows are, how two curves are compared. With TRL: tests/peers."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line import dapo
from dapo.bench.parity.command import SHIPPED, peer_keys
from dapo.bench.parity.runs import ParityPlan, check_plan, compared, is_finished, rewards_of, run_all, write_rows
from dapo.data.order import ProblemOrder
from dapo.errors import ConfigError
from dapo.files import append_line
from dapo.rewards import VerifierPool

SMALL = {
    "model_name_or_path": "bundled", "num_generations": 2, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1, "max_completion_length": 16, "max_steps": 4, "bf16": False,
}  # fmt: skip
OURS = (
    'data.train="dapo.quickstart.task:train_problems"', 'data.eval=["dapo.quickstart.task:eval_problems"]',
    "data.template=raw", "data.chat_template=false", "limits.max_prompt_tokens=32", "eval.k=2",
)  # fmt: skip


def plan_of(folder: Path, *, every: int = 2, ours: tuple[str, ...] = OURS, **keys: Any) -> ParityPlan:
    known = yaml.safe_load(SHIPPED.read_text()) | SMALL | keys
    return ParityPlan(folder, known, ours, every, use_vllm=False, python="/nowhere/python", minutes=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_iterations": 2}, "max_steps = 4: TRL counts updates"),
        ({"shuffle_dataset": True}, "shuffle_dataset = true"),
        ({"ours": OURS[:1]}, "--eval: is missing"),
        ({"bf16": True, "ours": (*OURS, "model.device=cpu")}, "bf16 = true: .* on a CPU"),
    ],
)
def test_what_would_make_them_different_runs_is_refused(tmp_path: Path, changes: dict[str, Any], words: str):
    plan = plan_of(tmp_path, **changes)
    with pytest.raises(ConfigError, match=words):
        check_plan(plan, plan.config(0))


def test_a_folder_goes_on_with_its_own_settings_only(tmp_path: Path):
    plan = plan_of(tmp_path)
    check_plan(plan, plan.config(0))
    check_plan(plan, plan.config(1))
    other = plan_of(tmp_path, learning_rate=1e-3)
    with pytest.raises(ConfigError, match=r"begun with other settings \(keys\)"):
        check_plan(other, other.config(0))


def test_our_config_is_the_imported_one(tmp_path: Path):
    config = plan_of(tmp_path, learning_rate=2e-4, epsilon_high=0.3).config(7)
    assert (config.train.seed, config.train.lr, config.algorithm.clip.high) == (7, 2e-4, 0.3)
    assert (config.sampling.prompts_per_step, config.eval.every_steps, config.eval.k) == (4, 2, 2)


@pytest.mark.slow
def test_trl_gets_the_problems_in_the_order_of_our_run(tmp_path: Path):
    config = plan_of(tmp_path).config(3)
    problems = write_rows(tmp_path, config)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    order = ProblemOrder(len(problems.problems), seed=3)
    expected = []
    for _ in range(4):
        order.start_step()
        expected += [order.next()[0] for _ in range(4)]
    assert [row["row"] for row in rows] == expected
    assert [tuple(row["tokens"]) for row in rows] == [problems.prompts[index] for index in expected]
    assert rows[0]["prompt"] == problems.problems[expected[0]].question


def test_rewards_are_our_verdicts_and_a_truncated_response_is_wrong(tmp_path: Path):
    problems = write_rows(tmp_path, plan_of(tmp_path).config(0))
    right = f"Answer: {problems.problems[5].answer}"
    said = [(right, False), ("Answer: 12345", False), (right, True)]
    with VerifierPool("math", workers=1) as pool:
        values = rewards_of([{"row": 5, "text": text, "is_truncated": cut} for text, cut in said], problems, pool)
    assert values == [1.0, -1.0, -1.0]


def evaluated(plan: ParityPlan, side: str, seed: int, curve: dict[int, list[int]]) -> None:
    folder = plan.run_folder(side, seed)
    folder.mkdir(parents=True)
    for step, correct in curve.items():
        append_line(folder / "eval_problems.jsonl", {"step": step, "k": 2, "ids": [], "correct": correct})
    for step in range(1, 5):
        append_line(folder / "metrics.jsonl", {"step": step, "timing.step_s": 2.0 + (step == 1)})
        append_line(folder / "times.jsonl", {"step": step, "seconds": 8.0 + (step == 1)})


def test_curves_coincide_or_are_told_apart(tmp_path: Path):
    plan = plan_of(tmp_path)
    start, middle = [0, 1] * 20, [1, 1] * 20
    for seed in (0, 1):
        evaluated(plan, "dapo", seed, {0: start, 2: middle, 4: [2, 2] * 20})
        evaluated(plan, "trl", seed, {0: start, 2: middle[::-1], 4: [2, 1] * 20})
    assert is_finished(plan, "trl", 1)
    assert run_all(plan, ("dapo", "trl"), (0, 1))  # nothing is left to run: no peer is started
    figures = compared(plan, (0, 1))
    assert figures["apart_at"] == [4]
    assert not figures["coincide"]
    assert [point["dapo"] for point in figures["points"]] == [0.25, 0.5, 1.0]
    assert figures["points"][2]["difference"]["value"] == 0.25
    assert figures["difference"]["value"] == 0.125  # of the mean of both evaluations after the first
    assert figures["s_a_step"] == {"dapo": 2.0, "trl": 8.0}
    assert figures["correct"]["trl"][1][4] == [2, 1] * 20


def test_a_run_that_is_not_whole_is_not_finished(tmp_path: Path):
    plan = plan_of(tmp_path, every=3)
    evaluated(plan, "trl", 0, {0: [1], 3: [1]})
    assert plan.evaluated_steps == [0, 3, 4]
    assert not is_finished(plan, "trl", 0)


def test_keys_of_trl_are_read_as_yaml():
    read = peer_keys(["bf16=false", "loss_type=grpo", "max_steps=3"], model="here", steps=9)
    assert read == {"bf16": False, "loss_type": "grpo", "max_steps": 9, "model_name_or_path": "here"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "3"], "--steps: has no effect on recorded rollouts"),
        (["--out", "x", "--sides", "verl"], "no side verl"),
        (["--out", "x", "--seeds", "one"], "--seeds one: not numbers"),
        (["--config", str(Path(__file__))], "is neither YAML nor JSON"),
        (["--out", "x", "--peer-set", "lr"], "--peer-set lr is not KEY=VALUE"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    answer = dapo("bench", "parity", *arguments)
    assert answer.returncode == 2
    assert words in answer.stderr.replace("\n", " ")
    assert not list(tmp_path.iterdir())
