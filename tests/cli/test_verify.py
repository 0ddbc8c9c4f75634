"""`dapo verify` as a user meets it: verdicts in order, and bad input named by file, row and remedy."""

import io
import json
from pathlib import Path

import pytest

from command_line import dapo
from dapo.cli import verify
from dapo.cli.verify import row_in
from dapo.errors import DataError
from dapo.report import audit
from dapo.rewards import code

ROWS = [
    {"id": "a", "response": "Answer: 42.", "answer": "42"},
    {"response": "Answer: 41", "answer": 42, "id": 7},
    {"response": "no idea", "answer": "42"},
    {"response": "Answer: 2\\sqrt2", "answer": "\\sqrt{8}", "id": None},
    {"response": "Answer: 42", "answer": "42", "stop_reason": "length"},
    {"response": "Answer: 9**9**9**9", "answer": "42"},
    {"response": "Answer: ", "answer": ""},
    {"response": "Answer: 42 \ud800", "answer": "42"},
]
EXPECTED = ["CORRECT", "WRONG", "UNPARSEABLE", "CORRECT", "WRONG", "WRONG", "UNPARSEABLE", "WRONG"]


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_one_verdict_a_line_in_order(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    path.write_bytes(lines(ROWS))
    for done in (dapo("verify", str(path)), dapo("verify", "-", stdin=lines(ROWS))):
        assert done.returncode == 0, done.stderr
        verdicts = [json.loads(line) for line in done.stdout.splitlines()]
        assert [verdict["verdict"] for verdict in verdicts] == EXPECTED
        assert {"verdict", "extracted", "reference", "seconds"} <= verdicts[0].keys()
        assert verdicts[0] | {"seconds": 0} == {
            "id": "a", "verdict": "CORRECT", "extracted": "42.", "reference": "42", "seconds": 0, "value": 1.0
        }  # fmt: skip
        assert verdicts[1]["id"] == 7
        assert "id" not in verdicts[2]
        assert verdicts[3]["id"] is None
        assert "truncated" in verdicts[4]["message"]
        assert done.stderr == ""


@pytest.mark.parametrize("n_rows", [1, 4, 5, 6, 11])
def test_border_every_line_has_its_own_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], n_rows: int
):
    monkeypatch.setattr(verify, "CHUNK", 5)
    path = tmp_path / "numbered.jsonl"
    path.write_bytes(lines([{"id": i, "response": f"Answer: {i}", "answer": i} for i in range(n_rows)]))
    verify.command(str(path), workers=1)
    verdicts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = [(i, "CORRECT", str(i), str(i)) for i in range(n_rows)]
    assert [(v["id"], v["verdict"], v["extracted"], v["reference"]) for v in verdicts] == expected


def test_the_help_works_as_pasted():
    done = dapo("verify", "--help")
    assert done.returncode == 0
    assert "echo" in done.stdout
    pasted = dapo("verify", "-", stdin=b'{"response": "Six by seven. Answer: 42.", "answer": "42"}\n')
    assert json.loads(pasted.stdout)["verdict"] == "CORRECT"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"response": "Answer: nan", "answer": NaN}', "row 1"),
        (b"", "no rows"),
        (b"\n\n  \n", "no rows"),
        (lines(ROWS) + b'{"response": "Answer: 4', "row 9: not JSON"),
        (b'{"response": "\xff\xfe", "answer": "1"}\n', "row 1: not UTF-8"),
        (b'{"response": "Answer: 1"}\n', 'row 1: no "answer"'),
        (b'{"question": "?", "answer": "1"}\n', 'row 1: no "response"'),
        (b"[1, 2]\n", "row 1: a JSON list"),
        (b'{"response": 5, "answer": "1"}\n', '"response" is 5'),
        (b'{"response": "x", "answer": null}\n', '"answer" is null'),
        (b'{"response": "x", "answer": true}\n', '"answer" is true'),
        (b'{"response": "x", "answer": "1", "stop_reason": "tired"}\n', '"stop_reason" is "tired"'),
        (b'{"response": "x", "answer": "1", "meta": [1]}\n', '"meta" is not an object'),
        (b'{"response": "' + b"x" * 50_000_000 + b'", "answer": "1"}\n', "row 1: longer than 16 MB"),
        (b"[" * 100_000 + b"\n", "row 1: not JSON"),
        (b"PAR1\x00\x01\x02", "row 1: not"),
    ],
    ids=lambda value: value[:24].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_bad_input_exits_2_with_file_row_and_remedy(tmp_path: Path, content: bytes, says: str):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    done = dapo("verify", str(path))
    message = done.stderr
    assert done.returncode == 2
    assert done.stdout == ""  # nothing half-written
    assert message.startswith("DataError: ")
    assert "bad.jsonl" in message
    assert says in message
    assert len(message.strip().splitlines()) >= 2, "a remedy"
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verify"], "either a file or --audit"),
        (["verify", "no/such/file.jsonl"], "No such file"),
        (["verify", ".", "--verifier", "math"], "Is a directory"),
        (["verify", "-", "--verifier", "mth"], "no such verifier"),
        (["verify", "-", "--seconds", "0"], "--seconds 0"),
        (["verify", "-", "--workers", "0"], "workers = 0"),
        (["verify", "--audit", "no/such/run"], "no rollouts"),
    ],
)
def test_bad_arguments_exit_2(arguments: list[str], says: str):
    done = dapo(*arguments, stdin=lines(ROWS[:1]))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_other_verifiers_by_name():
    rows = lines([{"response": "Answer: 41=42", "answer": "42"}])
    verdicts = {
        name: json.loads(dapo("verify", "-", "--verifier", name, stdin=rows).stdout)["verdict"]
        for name in ("math", "dapo-published")
    }
    assert verdicts == {"math": "WRONG", "dapo-published": "CORRECT"}


TESTS = [{"args": [2, 3], "expected": 5}]


@pytest.mark.parametrize(
    "row",
    [
        {"tests": TESTS, "function": "add"},
        {"meta": {"tests": TESTS, "function": "add"}},
        {"meta": {"function": "add"}, "tests": TESTS, "answer": None},
        {"tests": [], "function": "sub", "meta": {"tests": TESTS, "function": "add"}},
        {"function": "add", "answer": TESTS},
        {"function": "add", "answer": json.dumps({"tests": TESTS})},
    ],
)
def test_code_needs_tests_and_no_answer_as_in_a_data_file(row: dict):
    line = json.dumps({"id": "a", "response": "", "question": "Add.", "level": 3, **row}).encode()
    task = row_in(line, "row 1", "code").task
    assert code.tests_in(task.answer, task.meta) == ("add", TESTS)
    assert task.meta["level"] == 3
    assert not task.meta.keys() & {"id", "response", "answer", "question", "meta"}


def test_a_line_may_say_where_its_problem_is_from():
    line = b'{"response": "", "answer": "42", "data_source": "gsm8k"}'
    assert row_in(line, "row 1", "own:function").task.meta == {"data_source": "gsm8k"}


@pytest.mark.parametrize(("verifier", "is_taken"), [("code", True), ("own:function", True), ("math", False)])
def test_only_what_compares_with_an_answer_needs_one(verifier: str, is_taken: bool):
    if is_taken:
        assert row_in(b'{"response": "x"}', "row 1", verifier).task.answer == ""
    else:
        with pytest.raises(DataError, match='no "answer"'):
            row_in(b'{"response": "x"}', "row 1", verifier)


@pytest.mark.slow
def test_audit_lists_disagreements_by_kind(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    table = {
        "problem_id": ["p1", "p2", "p3"],
        "response_text": ["Answer: 42", "Answer: 41=42", "Answer: 7"],
        "answer": ["42", "42", "8"],
        "verdict": ["CORRECT", "WRONG", "WRONG"],
        "stop_reason": ["EOS", "EOS", "EOS"],
    }
    parquet.write_table(pyarrow.table(table), folder / "step-000001.parquet")
    done = dapo("verify", "--audit", str(tmp_path / "run"), "--verifier", "dapo-published", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["rows"], report["agree"]) == (3, 2)
    (kind,) = report["disagreements"]
    assert (kind["run"], kind["second"], kind["n"]) == ("WRONG", "CORRECT", 1)
    assert kind["examples"][0]["problem_id"] == "p2"
    shown = dapo("verify", "--audit", str(tmp_path / "run")).stdout  # math-verify is the default second opinion
    assert "3 responses" in shown

    del table["answer"]
    parquet.write_table(pyarrow.table(table), folder / "step-000001.parquet")
    refused = dapo("verify", "--audit", str(tmp_path / "run"))
    assert refused.returncode == 2
    assert "no column answer" in refused.stderr
    (folder / "step-000001.parquet").write_bytes(b"PAR1 torn")
    assert dapo("verify", "--audit", str(tmp_path / "run")).returncode == 2


@pytest.mark.parametrize("n_rows", [0, 1, 4, 5, 6, 11])
def test_border_an_audit_reads_every_row_of_every_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_rows: int
):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(audit, "BATCH_ROWS", 5)
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2):
        columns = {name: [f"{step}-{i}" for i in range(n_rows)] for name in audit.COLUMNS}
        table = pyarrow.table({name: pyarrow.array(values, pyarrow.string()) for name, values in columns.items()})
        parquet.write_table(table, tmp_path / "rollouts" / f"step-{step:06d}.parquet", row_group_size=3)
    read = [row["problem_id"] for rows, _ in audit.batches(tmp_path) for row in rows]
    assert read == [f"{step}-{i}" for step in (1, 2) for i in range(n_rows)]


@pytest.mark.parametrize("ends", [b"", b"\n"])
@pytest.mark.parametrize("n_more", [-1, 0, 1, 101])
def test_border_a_line_of_just_the_limit_is_read_and_a_longer_one_refused(
    monkeypatch: pytest.MonkeyPatch, n_more: int, ends: bytes
):
    monkeypatch.setattr(verify, "MAX_LINE_BYTES", 100)
    line = json.dumps({"response": "", "answer": "1"}).encode()
    line = line.replace(b'""', b'"' + b"x" * (100 - len(line + ends) + n_more) + b'"')
    source = io.BytesIO(lines(ROWS[:1]) + line + ends)
    if n_more <= 0:
        assert [row.task.answer for row in verify.rows_in(source, "f", "math")] == ["42", "1"]
    else:
        with pytest.raises(DataError, match="f, row 2: longer than"):
            list(verify.rows_in(source, "f", "math"))
