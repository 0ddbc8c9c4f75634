"""Budgets and seeds as typed, and how far a run has come: told by its folder alone."""

import io
import json
from pathlib import Path

import pytest
from fake_ladder import job, write_done

from dapo.ablation import run
from dapo.ablation.arms import LADDER
from dapo.ablation.plan import ArmBudget, Job, State, parse_budget, parse_seeds, plan_jobs
from dapo.ablation.summary import learning_rates
from dapo.errors import ConfigError


def test_budgets_become_keys_of_the_run():
    assert parse_budget(None).overrides == ()
    assert parse_budget("steps=20").overrides == ("train.steps=20",)
    assert parse_budget("tokens=500_000").overrides == ("train.steps=1000000", "train.max_generated_tokens=500000")
    assert parse_budget("minutes=2.5").overrides == ("train.steps=1000000", "train.max_minutes=2.5")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "20",
        "steps=",
        "steps=0",
        "steps=2.5",
        "tokens=-1",
        "hours=1",
        "tokens=1e6",
        "steps=_",
        "steps=1__0",
        "steps=" + "9" * 400,
    ],
)
def test_what_is_no_budget_is_refused_with_an_example(text: str):
    with pytest.raises(ConfigError, match=r"(?s)--budget .*tokens=500000"):
        parse_budget(text)


def test_seeds_as_typed():
    assert parse_seeds("0, 2,1") == (0, 2, 1)
    for text in ("", ",", "a", "-1", "1.5", "0,0"):
        with pytest.raises(ConfigError, match="--seeds"):
            parse_seeds(text)


def test_jobs_come_seed_by_seed_and_differ_in_nothing_but_arm_and_seed(tmp_path: Path):
    jobs = plan_jobs("ladder", LADDER, [0, 1], parse_budget("steps=7"), ["train.lr=1e-4"], tmp_path)
    assert [job.seed for job in jobs] == [0] * 6 + [1] * 6
    assert {(job.config.train.steps, job.config.train.lr) for job in jobs} == {(7, 1e-4)}
    assert jobs[7].folder == tmp_path / "overlong-filter" / "seed-1"
    assert jobs[0].arguments("ladder")[:2] == ["train", "ladder"]
    assert "train.seed=1" in jobs[7].arguments("ladder")


def test_a_recipe_without_evaluation_is_refused_before_anything_starts(tmp_path: Path):
    for change in ("eval.every_steps=0", "data.eval=[]"):
        key = change.split("=")[0]
        with pytest.raises(ConfigError, match=key):
            plan_jobs("arithmetic-smollm2-135m", LADDER, [0], ArmBudget(), [change], tmp_path)


def test_a_run_is_done_when_its_last_step_is_evaluated_and_saved(tmp_path: Path):
    planned = job(tmp_path, "naive", 0, "train.steps=4")
    assert planned.state is State.NEW
    write_done(planned, {0: [1, 1], 4: [2, 2]})
    assert planned.state is State.DONE
    manifest = planned.folder / "checkpoints" / "step-000004" / "MANIFEST.json"
    for file in (manifest, planned.folder / "eval.jsonl", planned.folder / "metrics.jsonl"):
        kept = file.read_text()
        file.unlink()
        assert planned.state is State.HALF_DONE
        assert planned.arguments("ladder") == ["resume", str(planned.folder), "--trust"]
        file.write_text(kept)
    assert planned.state is State.DONE


def test_a_run_that_spent_its_budget_is_done(tmp_path: Path):
    planned = job(tmp_path, "naive", 0, "train.steps=4", "train.max_generated_tokens=3000")
    write_done(planned, {0: [1, 1], 3: [2, 2]})
    lines = (planned.folder / "metrics.jsonl").read_text().splitlines()
    (planned.folder / "metrics.jsonl").write_text("\n".join(lines[:3]) + "\n")
    (planned.folder / "checkpoints" / "step-000004").rename(planned.folder / "checkpoints" / "step-000003")
    assert planned.state is State.HALF_DONE
    (planned.folder / "events.jsonl").write_text(json.dumps({"step": 3, "kind": "budget", "message": ""}) + "\n")
    assert planned.state is State.DONE


def test_a_recipe_whose_runs_cannot_go_on_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"(?s)checkpoint\.resumable = false.*resumable=true"):
        plan_jobs("ladder", LADDER, [0], parse_budget(None), ["checkpoint.resumable=false"], tmp_path)


def test_runs_that_keep_the_model_alone_can_be_tabulated(tmp_path: Path):
    sets = ["checkpoint.resumable=false", "train.steps=4"]
    planned = plan_jobs("ladder", LADDER, [0], ArmBudget(), sets, tmp_path, is_table_only=True)
    write_done(planned[0], {0: [1, 1], 4: [2, 2]})
    again = plan_jobs("ladder", LADDER, [0], ArmBudget(), sets, tmp_path, is_table_only=True)
    assert [own.state for own in again] == [State.DONE] + [State.NEW] * 5


def test_a_key_of_one_arm_wins_over_that_of_all_and_reaches_no_other(tmp_path: Path):
    sets = ["naive:train.lr=1e-5", "train.lr=2e-4", "dapo:data.eval=['toy:problems', 'b']"]
    jobs = plan_jobs("ladder", LADDER, [0, 1], ArmBudget(), sets, tmp_path)
    assert learning_rates(jobs[-1:]) == 2e-4
    assert learning_rates([jobs[0], *jobs[-2:]]) == "1e-05 (naive), 0.0002 (token-loss, dapo)"
    for planned in jobs:
        assert planned.config.train.lr == (1e-5 if planned.arm.name == "naive" else 2e-4)
        assert (planned.config.data.eval == ("toy:problems", "b")) == (planned.arm.name == "dapo")
        assert not any(override.startswith(("naive:", "dapo:")) for override in planned.overrides)


def test_a_key_of_an_arm_that_is_not_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"(?s)naive:train\.lr=1e-5: no arm naive .*dapo"):
        plan_jobs("ladder", LADDER[-1:], [0], ArmBudget(), ["naive:train.lr=1e-5"], tmp_path)


def test_a_folder_of_other_settings_is_refused_by_key_and_value(tmp_path: Path):
    write_done(job(tmp_path, "naive", 0, "train.steps=4"), {0: [1, 1], 4: [2, 2]})
    job(tmp_path, "naive", 0, "train.steps=4")
    with pytest.raises(ConfigError, match=r"(?s)train\.lr = 0\.0004 \(now 0\.0001\).*another folder"):
        job(tmp_path, "naive", 0, "train.steps=4", "train.lr=1e-4")


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path):
    folder = tmp_path / "naive" / "seed-0"
    folder.mkdir(parents=True)
    job(tmp_path, "naive")  # empty: left by a run killed before it began
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="is not a run"):
        job(tmp_path, "naive")


def test_a_budget_without_a_last_step_refuses_a_rate_that_falls_towards_it(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--budget tokens=5000: train\.lr_decay = linear"):
        plan_jobs("ladder", LADDER, [0], parse_budget("tokens=5000"), ["train.lr_decay=linear"], tmp_path)
    assert plan_jobs("ladder", LADDER, [0], parse_budget("steps=50"), ["train.lr_decay=linear"], tmp_path)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 7])
def test_border_every_job_runs_once_and_never_more_than_three_together(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[str] = []

    class Process:
        returncode = 0

        def __init__(self) -> None:
            self.looks = 0

        def poll(self) -> int | None:
            self.looks += 1
            return 0 if self.looks > 2 else None

    def start(job: Job, _recipe: str, _lock: int) -> run.Running:
        started.append(job.name)
        write_done(job, {0: [1], job.config.train.steps: [2]})
        return run.Running(job, Process(), io.BytesIO(), 0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "start", start)
    monkeypatch.setattr(run, "LOOK_EVERY_S", 0.0)
    jobs = [job(tmp_path, "naive", seed, "train.steps=2") for seed in range(n)]
    together: list[int] = []
    outcome = run.run_jobs(
        jobs, "ladder", at_once=3, lock=0, progress=lambda running, _outcome, _what: together.append(len(running))
    )
    assert started == [job.name for job in jobs]
    assert sorted(job.name for job in outcome.done) == sorted(started)
    assert max(together, default=0) == min(n, 3)
