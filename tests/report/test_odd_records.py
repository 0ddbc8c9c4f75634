"""Whatever one record holds, the page is made: a response that cannot be read says so, and why."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from fake_runs import byte_level, metrics, row, save_tokenizer, table_of, write_rollouts, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from test_chunks import decode

from dapo.report.behaviour import load_phrases
from dapo.report.doctor.diagnose import verdict
from dapo.report.examined import examine_run
from dapo.report.page import write_page
from dapo.report.rollouts.chunks import make_chunks, parse_script, read_script
from dapo.report.rollouts.pieces import TokenPieces
from dapo.report.terminal import print_run

PIECES = TokenPieces(byte_level())
LONG = "x" * 70_000  # more than 16 bits count


def spaced(*words: str) -> TokenPieces:
    """A tokenizer whose decoder places the spaces: its tokens alone do not spell the text."""
    return TokenPieces(tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, words[0])))


def responses(rows: list[dict[str, Any]], pieces: TokenPieces | None = PIECES) -> list[dict[str, Any]]:
    made = dict(make_chunks(table_of(rows), "step-000010", pieces, load_phrases()))
    parse_script(made["index"])
    return [response for group in parse_script(made["000"]) for response in group["responses"]]


def test_a_token_that_writes_more_than_65535_characters_is_counted():
    pieces = spaced("one", LONG)
    one = row(PIECES, "x") | {"tokens": np.array([0, 1, 0]), "response_text": f"one {LONG} one"}
    (response,) = responses([one], pieces)
    assert response["text"] == f"one {LONG} one"
    assert response["wide"]
    assert decode(response["units"], "<u4").tolist() == [3, 1 + len(LONG), 4]


def test_an_ordinary_response_is_counted_in_two_bytes():
    (response,) = responses([row(PIECES, "the answer is 42")])
    assert "wide" not in response
    assert decode(response["units"], "<u2").sum() == len(response["text"])


ODD: dict[str, dict[str, Any]] = {
    "long": {"response_text": LONG},
    "tokens that do not spell the text": {"response_text": "something else altogether"},
    "empty": {
        "response_text": "", "tokens": [], "logp_old": [], "entropy": [], "advantage": [], "ratio": [], "clip": [],
    },
    "nothing": {"response_text": None, "verdict": None, "stop_reason": None, "reward": None, "question": None},
    "an unknown token": {"tokens": [10**9]},
    "a negative token": {"tokens": [-5]},
    "more clips than tokens": {"clip": [1] * 99},
    "fewer numbers than tokens": {"logp_old": [0.5], "ratio": [], "clip": [1]},
    "numbers that are none": {
        "reward": float("nan"), "reward_raw": float("inf"), "advantage": [float("inf")] * 2, "ratio": [-1.0, 0.0],
        "entropy": [float("nan"), 1e30],
    },
    "a token that is none": {"tokens": [1, None, 2]},
    "tokens as words": {"tokens": ["one", "two"]},
    "clips as words": {"clip": ["low"]},
    "a list of nothing": {"tokens": [None], "clip": [None], "ratio": [None]},
    "tokens that are no list": {"tokens": "1, 2"},
    "a problem without a name": {"problem_id": None, "visit": None},
    "a name that is a number": {"problem_id": 7, "visit": 1.5},
    "an answer without end": {"extracted": "(" * 10_000, "answer": "{" * 10_000},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_page_is_made_whatever_a_record_holds(tmp_path: Path, name: str):
    folder = write_run(tmp_path / "run", metrics(10), every=10)
    save_tokenizer(folder, byte_level())
    odd = row(PIECES, "the answer is 42", problem="odd") | ODD[name]
    write_rollouts(folder, 10, [odd])
    write_page(folder)
    data = parse_script((folder / "report" / "data.js").read_text())
    assert data["runs"][0]["missing"] == []
    assert [shown["step"] for shown in data["runs"][0]["rollouts"]] == [10]
    print_run(folder, problem=None, step=None, heat="clipped", console=Console(file=io.StringIO(), width=100))
    print_run(folder, problem="", step=10, heat="ratio", console=Console(file=io.StringIO(), width=100))


def test_a_response_that_cannot_be_read_says_why_and_the_others_are_shown():
    table = table_of([row(PIECES, "fine", index=i) for i in range(2)])
    tokens = pa.array([[1, None], table["tokens"][1].as_py()])
    made = dict(
        make_chunks(table.set_column(table.column_names.index("tokens"), "tokens", tokens), "step-000010", PIECES,
                    load_phrases())
    )  # fmt: skip
    odd, fine = parse_script(made["000"])[0]["responses"]
    assert odd["unreadable"] == "ValueError: cannot convert float NaN to integer"
    assert (odd["verdict"], odd["reward"], odd["text"]) == ("CORRECT", 1.0, "")
    assert "unreadable" not in fine
    assert parse_script(made["index"])["groups"]["correct"] == [2]


@pytest.mark.parametrize("left_out", sorted(set(row(PIECES, "x")) - {"step"}))
def test_a_column_may_be_missing(left_out: str):
    one = {name: value for name, value in row(PIECES, "the answer is 42").items() if name != left_out}
    (response,) = responses([one])
    assert "unreadable" not in response


def test_bytes_that_are_no_text_are_replaced_in_their_place(tmp_path: Path):
    """A lone surrogate, as a writer without checks leaves it in a column of strings."""
    folder = write_run(tmp_path / "run", metrics(10), every=10)
    save_tokenizer(folder, byte_level())
    rows = [row(PIECES, "fine", index=i) for i in range(2)]
    table = table_of(rows)
    raw = pa.array([b"half \xed\xa0\x80 a character", b"fine"], pa.binary())
    torn = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    place = table.column_names.index("question")
    (folder / "rollouts").mkdir()
    pq.write_table(table.set_column(place, "question", torn), folder / "rollouts" / "step-000010.parquet")
    write_page(folder)
    (group,) = read_script(folder / "rollouts" / "step-000010" / "000.js")
    assert group["question"].startswith("half \ufffd")
    assert "".join(r["text"] for r in group["responses"]) == "fine<eos>fine<eos>"


def test_a_record_that_is_something_else_is_left_out_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_run(tmp_path / "run", metrics(10), every=5)
    for step in (5, 10):
        write_rollouts(folder, step, [row(PIECES, "text")])

    def fails(*_: object, **__: object) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr("dapo.report.examined.make_index", fails)
    write_page(folder)
    missing = parse_script((folder / "report" / "data.js").read_text())["runs"][0]["missing"]
    assert missing[0].startswith("rollouts/step-000005.parquet: cannot be read (KeyError: 'no such thing')")
    examined = examine_run(folder)
    assert verdict(examined.findings, examined.run)


CELL = st.one_of(
    st.none(), st.text(max_size=5), st.integers(-3, 300), st.floats(), st.lists(st.integers(-1, 300), max_size=3),
    st.lists(st.floats(), max_size=3), st.lists(st.text(max_size=2), max_size=2),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(sorted(row(PIECES, "x"))), CELL, max_size=4), st.booleans())
@settings(max_examples=50)
def test_no_cell_of_any_kind_stops_a_page(changes: dict[str, Any], has_tokenizer: bool):
    odd = row(PIECES, "the answer is 42") | changes
    assert len(responses([odd], PIECES if has_tokenizer else None)) == 1
