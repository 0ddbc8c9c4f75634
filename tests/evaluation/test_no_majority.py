"""A verifier that extracts no answer leaves nothing to vote with: maj@k is not known, which is not 0."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_runs import evaluation, metrics, write_run

from dapo.cli.eval import print_table
from dapo.cli.running.terminal import evaluation_line
from dapo.evaluation.runner import Answered, summarise
from dapo.release.card import scores
from dapo.report.page import write_page
from dapo.report.rollouts.chunks import parse_script
from dapo.trainer.track import TrackerObserver
from dapo.types import Problem, Verdict

PROBLEMS = [Problem("a", "", ""), Problem("b", "", "")]


def line_of(*extracted: str | None) -> dict:
    """Two problems, two responses each; the first of each is right."""
    answers = {
        (problem.id, i): Answered(
            problem.id, i, Verdict.WRONG if i else Verdict.CORRECT, extracted[2 * p + i], n_tokens=3, is_truncated=False
        )
        for p, problem in enumerate(PROBLEMS)
        for i in range(2)
    }
    return {"step": 0, **summarise("own", PROBLEMS, answers, k=2)}


NOTHING = line_of(None, None, None, None)


def test_no_answer_at_all_is_no_majority_and_one_is():
    assert (NOTHING["avg@k"], NOTHING["pass@k"]) == (0.5, 1.0)
    assert NOTHING["maj@k"] is None
    assert NOTHING["maj@k_interval"] is None
    assert line_of("4", None, None, None)["maj@k"] == 0.5  # the vote of one problem; the other has none and counts 0
    assert '"maj@k": null' in json.dumps(NOTHING)  # what eval.jsonl and `dapo eval --json` hold


def test_terminals_and_the_card_say_n_a(capsys: pytest.CaptureFixture[str]):
    assert "maj@2 n/a" in evaluation_line(NOTHING)
    print_table(NOTHING | {"dropped_prompts": 0})
    written = capsys.readouterr().out
    assert "n/a" in next(row for row in written.splitlines() if row.startswith("maj@2"))
    assert "| own | 2 | maj@2 | n/a | n/a |" in scores([NOTHING, NOTHING | {"step": 4}], 4)


def test_a_tracker_is_handed_what_is_known():
    handed = {}
    observer = TrackerObserver(())
    observer.trackers = [SimpleNamespace(log=lambda _step, values: handed.update(values), trouble=lambda: "")]
    observer.on_evaluation(NOTHING)
    assert set(handed) == {"eval/own/avg@k", "eval/own/pass@k"}


def test_the_page_has_no_such_value(tmp_path: Path):
    lines = [evaluation(step, 0.5) | {"maj@k": None, "maj@k_interval": None} for step in (0, 10)]
    folder = write_run(tmp_path, metrics(10), evaluations=lines)
    write_page(folder)
    shown = parse_script((folder / "report" / "data.js").read_text())["runs"][0]["evaluations"]
    assert [line["maj"] for line in shown] == [None, None]
