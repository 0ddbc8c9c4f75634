"""The page of a run: complete, broken and hostile folders."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.errors import DataError
from dapo.report.page import chart, write_page

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\u202e" + "A" * 1000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text('preset = "dapo"\n[model]\npath = "<b>model</b>"\n')
    metrics = [{"step": i, "accuracy": i / 10, "policy/entropy": 1 - i / 10} for i in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics) + '{"step": 6, "accu')
    line = {"step": 0, "set": "s", "problems": 3, "k": 8, "avg@k": 0.25, "avg@k_interval": [0.2, 0.3], "unparseable": 0}
    evaluations = [line | {"pass@k": 0.5, "maj@k": 0.3}, line | {"step": 5, "avg@k": 0.75, "pass@k": 1, "maj@k": 1}]
    (folder / "eval.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evaluations))
    row = {
        "problem_id": "p", "question": HOSTILE, "answer": "<i>4</i>", "response_text": HOSTILE, "verdict": "CORRECT",
        "reward": 1.0, "stop_reason": "EOS", "tokens": [1, 2],
    }  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row, row | {"verdict": "WRONG"}]), folder / "rollouts" / "step-000005.parquet")
    return folder


def test_the_page_shows_what_happened(run: Path):
    text = write_page(run).read_text()
    assert "0.250 → 0.750" in text
    assert text.count("<polyline") == 2
    assert "No step" not in text


def test_what_a_model_wrote_is_text_never_markup(run: Path):
    text = write_page(run).read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text
    assert "<b>model" not in text
    assert "default-src 'none'" in text


@pytest.mark.parametrize("missing", ["metrics.jsonl", "eval.jsonl", "rollouts"])
def test_a_missing_file_is_said_and_the_page_still_renders(run: Path, missing: str):
    gone = run / missing
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    text = write_page(run).read_text()
    assert "<h1>run</h1>" in text
    assert missing == "rollouts" or f"Missing: {missing}" in text


def test_a_run_without_steps(run: Path):
    (run / "metrics.jsonl").write_text("")
    assert "No step has ended yet" in write_page(run).read_text()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="is not a run"):
        write_page(tmp_path)
    answer = subprocess.run(
        [sys.executable, "-m", "dapo", "report", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr


def test_a_flat_curve_and_a_single_point_are_drawn():
    assert "nan" not in chart([("a", [(1.0, 2.0)])])
    assert "<polyline" in chart([("a", [(1.0, 2.0), (2.0, 2.0)])])
