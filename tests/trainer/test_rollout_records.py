"""What a run writes for the report as it goes: the browser's scripts beside each parquet, and evaluated problems."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import toy

from dapo.report.examined import examine_run
from dapo.report.learning import paired_scores
from dapo.report.load import load_run
from dapo.report.page import write_page
from dapo.report.rollouts.chunks import read_script
from dapo.sampling.accounting import Accounting, outcome_of
from dapo.sampling.dynamic import SampledGroups
from dapo.trainer.budget import RunBudget
from dapo.trainer.loop import train
from dapo.trainer.records import DROPPED_PER_OUTCOME, dropped_groups, storable
from dapo.trainer.resume import resume_run
from dapo.trainer.run import Run
from dapo.trainer.start import start_run
from dapo.types import Group, Judgement, Problem, Verdict


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("records")
    keys = ["train.steps=3", "eval.every_steps=3", "eval.k=2", 'data.eval=["toy:problems"]', "checkpoint.every_steps=2"]
    keys += ["eval.temperature=0.5", "eval.top_p=0.9", "eval.top_k=7"]
    run = start_run(toy.recipe(home, *keys, dtype="float32"), home / "run")
    try:
        train(run)
    finally:
        run.close()
    return home / "run"


def test_scripts_and_parquet_of_a_step_tell_the_same(folder: Path):
    for step in (1, 2, 3):
        trained = pq.read_table(folder / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
        dropped = pq.read_table(folder / "rollouts" / "dropped" / f"step-{step:06d}.parquet").to_pylist()
        index = read_script(folder / "rollouts" / f"step-{step:06d}" / "index.js")
        assert index["step"] == step
        sizes = list(zip(index["groups"]["size"], index["groups"]["dropped"], strict=True))
        assert sum(size for size, why in sizes if not why) == index["summary"]["responses"] == len(trained)
        assert sum(size for size, why in sizes if why) == len(dropped)
        rows = [row | {"clip": row.get("clip", [])} for row in (*trained, *dropped)]
        groups = [
            group
            for piece in range(index["summary"]["pieces"])
            for group in read_script(folder / "rollouts" / f"step-{step:06d}" / f"{piece:03d}.js")
        ]
        responses = [response for group in groups for response in group["responses"]]
        for row, response in zip(rows, responses, strict=True):
            assert re.sub(r"<\w+>", "", response["text"]) == row["response_text"]  # special tokens are shown
            assert (response["n"], response["verdict"]) == (len(row["tokens"]), row["verdict"])
            assert [at for at, _ in response["clip"]] == [at for at, side in enumerate(row["clip"]) if side]


def test_evaluated_problems_add_up_to_avg_at_k(folder: Path):
    lines = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    problems = [json.loads(line) for line in (folder / "eval_problems.jsonl").read_text().splitlines()]
    assert [line["step"] for line in problems] == [line["step"] for line in lines] == [0, 3]
    for line, counts in zip(lines, problems, strict=True):
        assert sum(counts["correct"]) / (len(counts["ids"]) * counts["k"]) == pytest.approx(line["avg@k"])
        assert counts["sampling"] == [0.5, 0.9, 7]  # temperature, top-p, top-k
    paired = paired_scores(load_run(folder), lines[0]["set"], (0, 3), graded=False)
    assert paired is not None  # the report finds what the run has written
    assert [scores.mean() for scores in paired] == pytest.approx([line["avg@k"] for line in lines])


def test_a_report_of_it_indexes_and_writes_no_script_again(folder: Path):
    scripts = sorted((folder / "rollouts").glob("step-*/*.js"))
    before = [path.stat().st_mtime_ns for path in scripts]
    write_page(folder)
    assert [path.stat().st_mtime_ns for path in scripts] == before


def test_a_resume_writes_the_steps_it_repeats_anew(folder: Path):
    for manifest in folder.glob("checkpoints/step-000003/MANIFEST.json"):
        manifest.unlink()  # as if killed while writing it
    run = resume_run(folder)
    try:
        assert not (folder / "rollouts" / "step-000003").exists()
        assert (folder / "rollouts" / "step-000002").exists()
        assert len((folder / "eval_problems.jsonl").read_text().splitlines()) == 1
        train(run)
    finally:
        run.close()
    assert (folder / "rollouts" / "step-000003" / "index.js").exists()
    assert len((folder / "eval_problems.jsonl").read_text().splitlines()) == 2


def test_scripts_that_cannot_be_written_are_an_event_and_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dapo.trainer.records.write_chunks", full)
    run = start_run(toy.recipe(tmp_path, "train.steps=1", dtype="float32"), tmp_path / "run")
    try:
        train(run)
    finally:
        run.close()
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "no browser scripts for step 1: OSError" in events
    assert (tmp_path / "run" / "rollouts" / "step-000001.parquet").is_file()
    write_page(tmp_path / "run")
    assert (tmp_path / "run" / "rollouts" / "step-000001" / "index.js").is_file()


# ------------------------------------------------------------------ which steps, and what of them


def trained(home: Path, *keys: str, name: str = "run") -> Path:
    run = start_run(toy.recipe(home, *keys, dtype="float32"), home / name)
    try:
        train(run)
    finally:
        run.close()
    return home / name


def recorded(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in (folder / "rollouts").glob("step-*.parquet"))


def test_the_first_and_the_last_step_are_recorded_whatever_lies_between(tmp_path: Path):
    assert recorded(trained(tmp_path, "train.steps=5", "records.every_steps=3")) == [1, 3, 5]


@pytest.mark.parametrize(
    ("every", "budget", "expected"),
    [
        (3, None, [1, 3, 6, 8]),
        (100, None, [1, 8]),
        (0, None, []),
        (100, 35, [1, 4, 5, 6, 7, 8]),
        (100, 40, [1, 4, 5, 6, 7, 8]),
        (0, 35, []),
    ],
)
def test_a_step_that_spends_the_budget_of_tokens_is_a_last_one(every: int, budget: int | None, expected: list[int]):
    """Ten tokens a step: the fourth spends 35, and 40. (A run ends there; those after it would spend it too.)"""
    limits = SimpleNamespace(steps=8, max_generated_tokens=budget, max_minutes=None)
    config = SimpleNamespace(records=SimpleNamespace(every_steps=every), train=limits)
    run = SimpleNamespace(config=config, budget=RunBudget(limits), is_due=partial(Run.is_due, None))
    found = []
    for step in range(1, 9):
        if Run.is_recorded(run, step, 10):
            found.append(step)
        run.budget.spend({"tokens/generated": 10})
    assert found == expected


def test_where_every_group_is_all_wrong_some_of_them_can_be_looked_at(tmp_path: Path):
    keys = ["train.steps=1", "rewards.verifier=toy:never", "sampling.max_prompts_tried_per_step=12"]
    folder = trained(tmp_path, *keys)
    assert recorded(folder) == []  # nothing was trained on
    rows = pq.read_table(folder / "rollouts/dropped/step-000001.parquet").to_pylist()
    assert [row["dropped"] for row in rows] == ["all_wrong"] * 4 * DROPPED_PER_OUTCOME
    assert all(row["reward_raw"] == -1 and len(row["logp"]) == len(row["tokens"]) for row in rows)
    examined = examine_run(folder)
    ((step, summary),) = examined.summaries
    assert (step, summary["responses"], summary["groups"], summary["dropped"]) == (1, 0, 0, DROPPED_PER_OUTCOME)
    assert summary["verdicts"] == []
    assert examined.run.missing == examined.missing == []
    write_page(folder)


def group_of(name: str, *values: float, is_graded: bool = False) -> Group:
    judgements = tuple(
        Judgement(Verdict.CORRECT if value > 0 else Verdict.WRONG, value, graded=is_graded) for value in values
    )
    return Group(Problem(name, "", ""), 0, (), (), judgements)


def test_of_dropped_groups_the_first_few_of_each_outcome_are_chosen():
    mixed = [group_of(f"mixed-{i}", 1, -1) for i in range(3)]
    wrong = [group_of(f"wrong-{i}", -1, -1) for i in range(DROPPED_PER_OUTCOME + 3)]
    right = [group_of("right", 1, 1)]
    equal = [group_of(f"equal-{i}", 0.5, 0.5, is_graded=True) for i in range(2)]
    sampled = SampledGroups(
        mixed[:2], Accounting(), resolved=[*wrong, *mixed, *right, *equal]
    )  # the third one was surplus
    expected = [*wrong[:DROPPED_PER_OUTCOME], *right, *equal]
    assert dropped_groups(sampled) == expected
    assert [outcome_of(group) for group in expected[-3:]] == ["all_correct", "all_equal", "all_equal"]
    without_dynamic_sampling = SampledGroups([*mixed, *wrong], Accounting(), resolved=[*mixed, *wrong])
    assert dropped_groups(without_dynamic_sampling) == []


def test_a_steps_own_file_holds_trained_groups_alone(folder: Path):
    for step in (1, 2, 3):
        own, dropped = (
            pq.read_table(folder / "rollouts" / name / f"step-{step:06d}.parquet") for name in ("", "dropped")
        )
        assert not set(own["problem_id"].to_pylist()) & set(dropped["problem_id"].to_pylist())
        assert "dropped" not in own.column_names
        assert set(dropped["dropped"].to_pylist()) <= {"all_wrong", "all_correct"}


def test_without_dynamic_sampling_nothing_is_dropped(tmp_path: Path):
    folder = trained(tmp_path, "preset=grpo-naive", "train.steps=1")
    assert recorded(folder) == [1]
    assert not (folder / "rollouts" / "dropped").exists()


def files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in (folder / "rollouts").rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("preset", ["dapo", pytest.param("dapo-fast", marks=pytest.mark.slow)])
def test_a_run_that_was_killed_and_resumed_records_the_same_bytes(tmp_path: Path, preset: str):
    keys = [f"preset={preset}", "train.steps=4", "records.every_steps=2", "checkpoint.every_steps=2"]
    whole = trained(tmp_path, *keys, name="whole")
    parts = shutil.copytree(whole, tmp_path / "parts")
    for path in (parts / "checkpoints").glob("step-000004/MANIFEST.json"):
        path.unlink()  # as if killed while writing it
    run = resume_run(parts)
    assert sorted(files(parts)) == sorted(name for name in files(whole) if "step-000004" not in name)
    try:
        train(run)
    finally:
        run.close()
    assert files(parts) == files(whole)
    assert any("dropped/step-000004" in name for name in files(whole))


def test_text_that_utf8_cannot_hold_is_recorded_with_a_mark():
    assert storable("half \ud800 a pair") == "half ? a pair"
    assert storable("日本 🎲") == "日本 🎲"
    assert storable(None) is None
