"""The sources of a mixture in page and terminal, of our runs and of tables that anybody may have written."""

import io
import json
from pathlib import Path

import pytest
from fake_runs import metrics, write_run
from rich.console import Console

from dapo.cli.running.terminal import step_line
from dapo.report.doctor.diagnose import examine
from dapo.report.examined import DiagnosedRun
from dapo.report.load import load_run
from dapo.report.page_data import page_data
from dapo.report.sources import sources_of
from dapo.report.terminal import print_sources

TABLE = "{easy = {weight = 3.0, path = 'easy.jsonl'}, hard = {verifier = 'exact', path = 'none'}}"


def lines(n: int) -> list[dict[str, float]]:
    own = {"sampling/prompts_tried": 40, "source/easy/prompts_tried": 30, "source/hard/prompts_tried": 10}
    shares = {"source/easy/share_submitted": 0.75, "source/hard/share_submitted": 0.25}
    kept = {"source/easy/share_kept": 0.5, "source/hard/share_kept": 0.5, "source/easy/accuracy": 0.9}
    return [line | own | shares | kept | {"source/hard/accuracy": line["step"] / 10} for line in metrics(n)]


def test_a_source_knows_its_share_of_the_weights_of_what_was_submitted_and_of_what_was_trained_on(tmp_path: Path):
    easy, hard = sources_of(load_run(write_run(tmp_path, lines(8), train=TABLE)))
    assert (easy.wanted, easy.submitted, easy.kept) == (0.75, 0.75, 0.5)
    assert (hard.path, hard.verifier, easy.verifier) == ("hard", "exact", "?")
    assert hard.over_last("accuracy", 20) == (pytest.approx((0.7 + 0.8) / 2), 20, 7)
    assert hard.over_last("accuracy", 21) == (pytest.approx((0.6 + 0.7 + 0.8) / 3), 30, 6)
    assert hard.over_last("accuracy", 1000)[1:] == (80, 1)
    assert hard.over_last("length", 20) == (None, 0, 0)
    assert sources_of(load_run(write_run(tmp_path / "plain", lines(8)))) == []


def test_names_of_sources_are_values_of_the_page_and_their_curves_have_our_names(tmp_path: Path):
    run = load_run(write_run(tmp_path, lines(8), train=TABLE.replace("easy =", "'__proto__' =")))
    data = page_data([DiagnosedRun(run, {}, examine(run))], ["."], [])
    (shown,) = data["runs"]
    assert [source["name"] for source in shown["sources"]] == ["__proto__", "hard"]
    assert shown["sources"][1]["metrics"]["accuracy"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    assert shown["data"] == "__proto__, hard"
    assert not any(name.startswith("source/") for name in shown["metrics"])
    assert "source/NAME/accuracy" in [name for name, _, _ in data["glossary"]]
    json.dumps(data, allow_nan=False)


def test_the_terminal_has_a_line_per_source(tmp_path: Path):
    stream = io.StringIO()
    run = load_run(write_run(tmp_path, lines(8), train=TABLE))
    print_sources(run, Console(file=stream, width=120, markup=False))
    text = stream.getvalue()
    assert "easy" in text
    assert "75.0%" in text
    assert "50.0%" in text
    line = lines(1)[0] | {"source/easy/groups_kept": 0.25, "source/hard/groups_kept": 1.0, "sampling/retired": 7}
    assert "easy 0.900 (25% mixed)  hard 0.100 (100% mixed)  retired 7" in step_line(line)


@pytest.mark.parametrize(
    "table",
    ["{}", "{a = 3}", "{a = {weight = 'x'}}", "{a = {weight = -1}, b = {}}", "{a = {path = 3, verifier = []}}",
     "{'\\u001b[2J' = {}}", "{a = {weight = inf}}"],
)  # fmt: skip
def test_a_table_that_no_run_would_write_breaks_nothing(tmp_path: Path, table: str):
    odd = [line | {"source/a/accuracy": "x", "source/a/prompts_tried": -1} for line in lines(8)]
    run = load_run(write_run(tmp_path, odd, train=table))
    stream = io.StringIO()
    print_sources(run, Console(file=stream, width=120, markup=False))
    assert "\x1b" not in stream.getvalue()
    json.dumps(page_data([DiagnosedRun(run, {}, examine(run))], ["."], []), allow_nan=False)
