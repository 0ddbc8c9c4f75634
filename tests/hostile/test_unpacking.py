"""A small parquet file that unpacks to gigabytes is not unpacked, and that is said."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_runs import byte_level, metrics, row, save_tokenizer, table_of, write_rollouts, write_run

from command_line import dapo
from dapo import parquet_size as unpacked
from dapo.parquet_size import too_large
from dapo.report.rollouts.chunks import parse_script


def repeated(value: object, n: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array([value]))


def text_bomb(path: Path, n_rows: int = 2_000, length: int = 1 << 20) -> None:
    """Every response the same megabyte: stored once."""
    columns = {name: repeated("x", n_rows) for name in ("problem_id", "question", "answer", "verdict", "stop_reason")}
    pq.write_table(pa.table(columns | {"response_text": repeated("a" * length, n_rows)}), path, compression="zstd")


def token_bomb(path: Path) -> None:
    """One response with forty million equal tokens."""
    n = 40_000_000
    tokens = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), pa.array(np.zeros(n, np.int8)))
    pq.write_table(pa.table({"problem_id": ["x"], "response_text": ["y"], "tokens": tokens}), path, compression="zstd")


def row_bomb(path: Path) -> None:
    pq.write_table(pa.table({"problem_id": repeated("x", 1_000_000)}), path, compression="zstd")


def long_text(path: Path) -> None:
    pq.write_table(pa.table({"problem_id": ["x"], "response_text": ["a" * (17 << 20)]}), path, compression="zstd")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", metrics(5), wanted=20, every=5)
    (folder / "rollouts").mkdir(exist_ok=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("bomb", [text_bomb, token_bomb, row_bomb, long_text])
def test_a_bomb_is_not_unpacked_and_that_is_said(bomb, run, monkeypatch):
    path = run / "rollouts" / "step-000005.parquet"
    bomb(path)
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr(pq, "read_table", lambda *_args, **_options: pytest.fail("it was unpacked"))
    assert dapo("report", str(run)).returncode == 0
    missing = parse_script((run / "report" / "data.js").read_text())["runs"][0]["missing"]
    (said,) = [text for text in missing if "MB" in text]
    assert "step-000005.parquet" in said
    for words in (["report", str(run), "--terminal"], ["verify", "--audit", str(run), "--verifier", "exact"]):
        answer = dapo(*words)
        assert answer.returncode == 2
        assert "MB" in answer.stderr


def test_what_a_run_records_is_far_from_the_limit(run, monkeypatch):
    pieces = save_tokenizer(run, byte_level())
    rows = [row(pieces, "the answer is 42 " * 50, index=i) for i in range(64)]
    path = write_rollouts(run, 5, rows)
    assert too_large(path) == ""
    monkeypatch.setattr(unpacked, "LEAST_LIMIT", table_of(rows).nbytes * 4 + 64 * unpacked.ROW_BYTES)
    assert too_large(path) == ""


def test_columns_that_no_run_writes_are_left_unread(run):
    path = run / "rollouts" / "step-000005.parquet"
    nested = pa.array([[{"content": "x"}]], pa.list_(pa.struct([("content", pa.string())])))
    pq.write_table(pa.table({"problem_id": ["x"], "response_text": ["y"], "question": nested}), path)
    assert dapo("report", str(run)).returncode == 0
    assert parse_script((run / "report" / "data.js").read_text())["runs"][0]["rollouts"]
