"""What a run writes for the report as it goes: the browser's scripts beside each parquet, and evaluated problems."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import toy

from dapo.report.chunks import read_script
from dapo.report.page import write_page
from dapo.trainer.loop import train
from dapo.trainer.resume import resume_run
from dapo.trainer.start import start_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("records")
    keys = ["train.steps=3", "eval.every_steps=3", "eval.k=2", 'data.eval=["toy:problems"]', "checkpoint.every_steps=2"]
    run = start_run(toy.recipe(home, *keys, dtype="float32"), home / "run")
    try:
        train(run)
    finally:
        run.close()
    return home / "run"


def test_scripts_and_parquet_of_a_step_tell_the_same(folder: Path):
    for step in (1, 2, 3):
        rows = pq.read_table(folder / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
        index = read_script(folder / "rollouts" / f"step-{step:06d}" / "index.js")
        assert index["step"] == step
        assert sum(index["groups"]["size"]) == len(rows)
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
