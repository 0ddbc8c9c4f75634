"""Bad input: exit 2, one message that names the file, the row and the remedy, no traceback, and nothing written."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.cli.main import main
from dapo.data.rows import MAX_LINE_BYTES

GOOD = json.dumps({"question": "What is 2 + 3?", "answer": "5"}) + "\n"
NULL = '{"question": "q", "answer": null}\n'


def torn_parquet(path: Path) -> None:
    rows = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(5000)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    path.write_bytes(path.read_bytes()[:-100])


def damaged_parquet(path: Path) -> None:
    """Footer whole, a data page overwritten: it opens, and fails while it is read."""
    rows = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(5000)]
    pq.write_table(pa.Table.from_pylist(rows), path, compression="gzip")
    content = bytearray(path.read_bytes())
    content[200:4000] = b"\xff" * 3800
    path.write_bytes(content)


def repeated(text: str, n: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * n, pa.int32()), pa.array([text]))


def text_bomb(path: Path) -> None:
    """300 MB in a few kilobytes: the same text in every row."""
    n = 300
    pq.write_table(pa.table({"question": repeated("q" * 2**20, n), "answer": ["1"] * n}), path, compression="zstd")


def nested_bomb(path: Path) -> None:
    """The same within the messages of a chat."""
    n = 300
    message = pa.StructArray.from_arrays([repeated("q" * 2**20, n), pa.array(["user"] * n)], ["content", "role"])
    prompt = pa.ListArray.from_arrays(pa.array(range(n + 1), pa.int32()), message)
    pq.write_table(pa.table({"prompt": prompt, "answer": ["1"] * n}), path, compression="zstd")


def row_bomb(path: Path) -> None:
    n = 2_500_000
    pq.write_table(pa.table({"question": repeated("q", n), "answer": repeated("1", n)}), path, compression="zstd")


def long_text(path: Path) -> None:
    pq.write_table(pa.table({"question": ["q" * (17 << 20)], "answer": ["1"]}), path, compression="zstd")


def csv_of(text: str):
    return lambda path: path.write_text(text)


# name -> (file name, how it is made, what the message must name beside the file)
BAD = {
    "empty file": ("a.jsonl", lambda p: p.write_bytes(b""), "empty"),
    "empty parquet name": ("a.parquet", lambda p: p.write_bytes(b""), "empty"),
    "blank lines only": ("a.jsonl", lambda p: p.write_text("\n\n \n"), "no rows"),
    "empty list": ("a.json", lambda p: p.write_text("[]"), "no rows"),
    "torn parquet": ("a.parquet", torn_parquet, "row 1: not a whole parquet file"),
    "damaged parquet": ("a.parquet", damaged_parquet, "not a whole parquet file"),
    "text named parquet": ("a.parquet", lambda p: p.write_text(GOOD), "not a whole parquet file"),
    "parquet, long in one text": ("a.parquet", long_text, "are the most that is read"),
    "parquet, long by repeated texts": ("a.parquet", text_bomb, "are the most that is read"),
    "parquet, long within lists": ("a.parquet", nested_bomb, "are the most that is read"),
    "parquet, millions of rows": ("a.parquet", row_bomb, "are the most that is read"),
    "parquet named jsonl": ("a.jsonl", torn_parquet, "holds parquet"),
    "line cut in half": ("a.jsonl", lambda p: p.write_text(GOOD + GOOD[:20]), "row 2: the line is truncated"),
    "line cut inside a value": ("a.jsonl", lambda p: p.write_text(GOOD + GOOD[:-3] + "\n" + GOOD), "row 2: "),
    "list cut in half": ("a.json", lambda p: p.write_text(f"[{GOOD},{GOOD},{GOOD[:25]}"), "row 3: not JSON"),
    "not JSON": ("a.jsonl", lambda p: p.write_text(GOOD + "hello\n"), "row 2: not JSON"),
    "not objects": ("a.jsonl", lambda p: p.write_text("[1, 2]\n"), "row 1: is a list"),
    "nested without end": ("a.jsonl", lambda p: p.write_text(GOOD + "[" * 200_000), "row 2: "),
    "an endless integer": ("a.jsonl", lambda p: p.write_text(GOOD + '{"answer": ' + "9" * 5000 + "}\n"), "row 2: "),
    "wrong columns": ("a.jsonl", lambda p: p.write_text('{"text": "q", "label": "1"}\n'), "text, label"),
    "columns change": ("a.jsonl", lambda p: p.write_text(GOOD + '{"text": "q"}\n'), "row 2: does not fit"),
    "question is a number": ("a.jsonl", lambda p: p.write_text(GOOD + '{"question": 3, "answer": "1"}\n'), "row 2: "),
    "question is empty": ("a.jsonl", lambda p: p.write_text(GOOD + '{"question": " ", "answer": "1"}\n'), "row 2: "),
    "50 MB line": (
        "a.jsonl",
        lambda p: p.write_text(GOOD + '{"question": "' + "x" * 50_000_000 + '", "answer": "1"}\n'),
        "row 2: longer than 16 MiB",
    ),
    "50 MB line without end": ("a.jsonl", lambda p: p.write_bytes(b"x" * 50_000_000), "row 1: longer than"),
    "50 MB cell": ("a.csv", lambda p: p.write_text("question,answer\n" + "x" * 50_000_000 + ",1\n"), "longer than"),
    "2 MB question": (
        "a.json",
        lambda p: p.write_text(json.dumps([{"question": "x" * 2_000_000, "answer": "1"}])),
        "row 1: the question has 2,000,000 characters",
    ),
    "UTF-16 in lines": ("a.jsonl", lambda p: p.write_bytes(GOOD.encode("utf-16")), "iconv -f utf-16"),
    "not UTF-8": ("a.jsonl", lambda p: p.write_bytes(GOOD.encode() + b'{"question": "caf\xe9"}'), "row 2: byte"),
    "half a character": ("a.jsonl", lambda p: p.write_text(GOOD + GOOD.replace("3", "\\ud800")), "row 2: holds half"),
    "a name too long": ("x" * 300 + ".jsonl", lambda _: None, "no such file"),
    "UTF-16": ("a.csv", lambda p: p.write_text("question,answer\na,1\n", encoding="utf-16"), "row 1: byte 1"),
    "references missing": ("a.jsonl", lambda p: p.write_text(NULL * 3), "row 1: no reference"),
    "no answer column": ("a.jsonl", lambda p: p.write_text('{"question": "q"}\n'), "row 1: no known schema"),
    "references unreadable": ("a.jsonl", lambda p: p.write_text(NULL.replace("null", '"{{"')), "row 1: unparseable"),
    "csv without header": ("a.csv", csv_of("What is 2 + 3?,5\nWhat is 2 + 4?,6\n"), "header"),
    "csv header only": ("a.csv", csv_of("question,answer\n"), "no rows"),
    "csv with a field too many": ("a.csv", csv_of("question,answer\nq,1\nq,1,2\n"), "row 2: 3 fields"),
    "csv with a semicolon too many": ("a.csv", csv_of("question;answer\nq;1;2\n"), "fields that contain semicolons"),
    "csv with a repeated name": ("a.csv", csv_of("answer,answer\nq,1\n"), "repeated name"),
    "csv with an open quote": ("a.csv", csv_of('question,answer\n"q,1\n'), "row 1: not CSV"),
    "unknown suffix": ("a.txt", lambda p: p.write_text(GOOD), "'.txt' is not a known format"),
    "a folder": ("a.jsonl", lambda p: p.mkdir(), "is a folder"),
    "missing": ("a.jsonl", lambda _: None, "no such file"),
}  # fmt: skip


@pytest.mark.parametrize("verb", ["check", "prepare"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_2_and_writes_nothing(name, verb, tmp_path, capsys):
    file_name, make, named = BAD[name]
    path = tmp_path / file_name
    make(path)
    before = sorted(tmp_path.iterdir())
    out = ["--out", str(tmp_path / "out.jsonl")] if verb == "prepare" else []
    with pytest.raises(SystemExit) as exit:
        main(["data", verb, str(path), *out])
    message = capsys.readouterr().err
    assert exit.value.code == 2
    assert "Traceback" not in message
    assert message.startswith("DataError: ")
    assert str(path) in message
    assert named in message
    assert len(message.splitlines()) >= 2, "the remedy is missing"
    assert len(message) < 1000
    assert sorted(tmp_path.iterdir()) == before


def test_a_line_just_under_the_limit_is_read(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    filler = "x" * (MAX_LINE_BYTES - len(GOOD) - 100)
    path.write_text(json.dumps({"question": "q?", "answer": "1", "tests": filler}) + "\n" + GOOD)
    main_returns(["data", "check", str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["usable"] == 2


def main_returns(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 0


@pytest.mark.parametrize(
    ("n_commas", "verifier", "is_told"), [(1, "math", False), (2, "math", True), (2, "exact", False)]
)
def test_border_more_than_a_tenth_with_a_decimal_comma_is_told_where_it_makes_a_list(
    n_commas: int, verifier: str, is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "rows.jsonl"
    answers = ["12,5", "0,75"][:n_commas] + ["7"] * (10 - n_commas)
    rows = [{"question": f"Problem {i}: what is it?", "answer": answer} for i, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main_returns(["data", "check", str(path), "--verifier", verifier])
    said = capsys.readouterr().out
    assert ("write a point" in said) is is_told
    assert ("row 1: 12,5" in said) is is_told
