"""The same run by TRL and by us, stopped and resumed: a few steps of the bundled model."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dapo.bench.parity.command import SHIPPED
from dapo.bench.parity.runs import SIDES, ParityPlan, check_plan, compared, evaluations, is_finished, run_all, seconds
from dapo.quickstart.task import eval_problems

pytestmark = pytest.mark.peers

SMALL = {
    "model_name_or_path": "bundled", "num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 2,
    "gradient_accumulation_steps": 2, "max_completion_length": 24, "learning_rate": 5e-4,
    "bf16": False,
}  # fmt: skip


def test_both_train_are_evaluated_alike_and_go_on_where_they_were_stopped(tmp_path: Path):
    held_out = tmp_path / "held-out.jsonl"
    lines = [{"id": p.id, "question": p.question, "answer": p.answer} for p in eval_problems()[:8]]
    held_out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ours = (
        'data.train="dapo.quickstart.task:train_problems"', f'data.eval=["{held_out}"]', "data.template=raw",
        "data.chat_template=false", "limits.max_prompt_tokens=32", "eval.k=2", "rewards.workers=1", "model.device=cpu",
    )  # fmt: skip
    keys = yaml.safe_load(SHIPPED.read_text()) | SMALL
    plan = ParityPlan(tmp_path / "runs", keys, ours, every=1, use_vllm=False, python=sys.executable, minutes=1e-3)
    check_plan(plan, plan.config(0))
    for side in SIDES:
        assert not run_all(plan, [side], [0])  # time for one step
        assert [line["step"] for line in evaluations(plan.run_folder(side, 0))] in ([0], [0, 1])
    assert run_all(replace(plan, minutes=0), SIDES, [0])
    figures = compared(plan, [0])
    for side in SIDES:
        assert is_finished(plan, side, 0)
        assert [line["step"] for line in evaluations(plan.run_folder(side, 0))] == [0, 1, 2]
        assert len(seconds(plan, side, 0)) == 2
        assert 0 < sum(figures["parts"][side].values()) <= figures["s_a_step"][side]
    assert figures["correct"]["dapo"][0][0] == figures["correct"]["trl"][0][0]  # the same model, draws and verdicts
    assert not list(plan.run_folder("trl", 0).glob("step-*"))
