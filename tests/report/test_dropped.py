"""Groups that were dropped can be looked at, and are counted in nothing that tells what a step was trained on."""

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fake_runs import byte_level, metrics, row, save_tokenizer, table_of, write_rollouts, write_run
from rich.console import Console

from dapo.report.audit import audit_run
from dapo.report.examined import examine_run
from dapo.report.page import write_page
from dapo.report.rollouts.chunks import parse_script, read_script
from dapo.report.rollouts.recorded import drop_after, dropped_path, records_of
from dapo.report.serve import Watched
from dapo.report.terminal import print_run

UPDATED = ("logp_old", "entropy", "advantage", "ratio", "clip")


def dropped(rows: list[dict], why: str) -> list[dict]:
    """As a run records them: nothing that only an update could say."""
    return [{name: v for name, v in one.items() if name not in UPDATED} | {"dropped": why} for one in rows]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Step 5: one trained group of two, one dropped; step 10: nothing was trained on."""
    folder = write_run(tmp_path / "run", metrics(10), every=5)
    pieces = save_tokenizer(folder, byte_level())
    own = write_rollouts(folder, 5, [row(pieces, "the answer is 42", problem="kept", index=i) for i in range(2)])
    wrong = [
        row(pieces, "wait, it is \\boxed{7}", problem="lost", index=i, extracted="7", verdict="WRONG", answer="7")
        for i in range(4)
    ]
    dropped_path(own).parent.mkdir()
    for step in (5, 10):
        path = dropped_path(own.with_name(f"step-{step:06d}.parquet"))
        pq.write_table(table_of(dropped(wrong, "all_wrong")), path)
    return folder


def test_they_are_listed_with_the_reason_and_counted_in_no_sum(run: Path):
    write_page(run)
    index = read_script(run / "rollouts" / "step-000005" / "index.js")
    assert index["groups"]["id"] == ["kept", "lost"]
    assert index["groups"]["dropped"] == ["", "all_wrong"]
    assert index["groups"]["doubt"] == [0, 4]  # shown with the group …
    summary = index["summary"]
    assert (summary["responses"], summary["groups"], summary["dropped"]) == (2, 1, 1)
    assert summary["behaviour"]["doubt"] == 0  # … and in no share
    assert summary["verdicts"] == [["CORRECT", 2]]
    assert summary["top_answer"] == ["42", 2, 1]
    kept, lost = read_script(run / "rollouts" / "step-000005" / "000.js")
    assert (kept["dropped"], lost["dropped"]) == ("", "all_wrong")
    assert lost["responses"][0]["logp"]  # the engine's own: there is no other
    assert lost["responses"][0]["entropy"] is None


def test_a_step_that_has_nothing_else_is_there_all_the_same(run: Path):
    write_page(run)
    data = parse_script((run / "report" / "data.js").read_text())["runs"][0]
    assert [(shown["step"], shown["responses"], shown["dropped"]) for shown in data["rollouts"]] == [
        (5, 2, 1),
        (10, 0, 1),
    ]
    assert [step for step, _ in examine_run(run).summaries] == [5, 10]
    assert [path.stem for path in records_of(run / "rollouts")] == ["step-000005", "step-000010"]
    index = parse_script(Watched(run).chunk("step-000010", "index"))
    assert index["groups"]["dropped"] == ["all_wrong"]


def test_what_was_trained_on_is_all_that_the_doctor_counts(tmp_path: Path):
    """Eight dropped groups that all say 7 beside eight trained ones: no answer dominates."""
    folder = write_run(tmp_path / "run", metrics(10), every=10)
    pieces = save_tokenizer(folder, byte_level())
    own = write_rollouts(
        folder, 10, [row(pieces, "x", problem=f"k{i}", extracted=str(i), answer=str(i)) for i in range(8)]
    )
    wrong = [row(pieces, "7", problem=f"w{i}", extracted="7", verdict="WRONG", answer="1") for i in range(8)]
    dropped_path(own).parent.mkdir()
    pq.write_table(table_of(dropped(wrong, "all_wrong")), dropped_path(own))
    assert "dominating-answer" not in {finding.name for finding in examine_run(folder).findings}
    pq.write_table(table_of(wrong), own)
    assert "dominating-answer" in {finding.name for finding in examine_run(folder).findings}


def printed(run: Path, **options: object) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=140)
    print_run(run, **({"problem": None, "step": None, "heat": "clipped"} | options), console=console)
    return stream.getvalue()


def test_the_terminal_marks_them(run: Path):
    assert "step 000005, groups trained on: 1; of those dropped, recorded: 1" in printed(run, step=5)
    assert "[dropped: all wrong] What is lost?" in printed(run)
    assert "[dropped: all wrong] 0 of 4 correct" in printed(run, problem="lost")


def test_an_audit_tells_them_apart(run: Path, capsys: pytest.CaptureFixture[str]):
    audit_run(run, "math", {}, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["dropped"]["rows"]) == (2, 8)
    assert told["dropped"]["disagreements"][0]["examples"][0]["file"] == "dropped/step-000005.parquet"
    audit_run(run, "math", {}, as_json=False)
    assert "of groups that were dropped: 8 responses" in capsys.readouterr().out


def test_they_go_with_their_step(run: Path):
    write_page(run)
    drop_after(run / "rollouts", 5)
    assert [path.name for path in (run / "rollouts" / "dropped").iterdir()] == ["step-000005.parquet"]
    assert [path.stem for path in records_of(run / "rollouts")] == ["step-000005"]
