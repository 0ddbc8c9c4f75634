"""Run folders and configs changed at random: whatever reads them ends with an answer or with an error of ours.

`fuzz.py` draws new changes until its time is up; the suite draws a few, the same ones every time
(`test_fuzz_folders.py`).
"""

from __future__ import annotations

import datetime
import decimal
import functools
import io
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))  # started as a program, as pytest does it otherwise

from fake_runs import byte_level, evaluation, metrics, row, save_tokenizer, write_rollouts, write_run

from command_line import dapo
from dapo.cli.main import render_error
from dapo.commands import CONTROL
from dapo.config.keys import known_keys
from dapo.config.load import load_recipe, preset_names, recipe_names, to_toml
from dapo.errors import ConfigError, DapoError
from dapo.report.serve import Watched

Folder = dict[str, bytes]  # path in the folder -> what the file holds

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e\x9b\x00"
# Names of values, so that a failing example is short; each is JSON, and TOML but for the last ones.
JSON = {
    "true": "true", "zero": "0", "minus": "-1", "half": "0.5", "large": "1e308", "tiny": "5e-324", "half a step": "2.5",
    "10**18": f"{10**18}", "10**400": f"{10**400}", "5000 digits": "9" * 5_000, "no text": '""', "word": '"word"',
    "digit": '"1"', "long": f'"{"a" * 100_000}"', "hostile": '"' + "".join(f"\\u{ord(c):04x}" for c in HOSTILE) + '"',
    "none": '"none"', "path": '"../../x"', "wide": '"\\ud7ff\\uffff 答½"', "no list": "[]", "list": "[1, 2]",
    "words": '["a", "b"]', "mixed": '[1, "a", [true]]', "lists": "[[1], []]", "no table": "{}",
    "deep": "[" * 100_000 + "]" * 100_000,
    "null": "null", "nan": "NaN", "inf": "Infinity", "over": "1e400", "table": '{"a": 1}',
    "tables": '[{"a": {"b": 1}}]', "surrogate": '"\\ud800"', "deep table": '{"a":' * 900 + "1" + "}" * 900,
}  # fmt: skip
TOML = {name: text for name, text in JSON.items() if name not in [*JSON][[*JSON].index("null") :]} | {
    "nan": "nan", "inf": "-inf", "date": "1979-05-27", "hour": "07:32:00", "moment": "1979-05-27T07:32:00Z",
    "table": "{a = 1}", "tables": "[{a = {b = 1}}]", "hex": "0xffff_ffff_ffff_ffff", "several lines": '"""a\nb"""',
    "deep table": "{" + "a." * 3_000 + "a = 1}", "nothing": "",
}  # fmt: skip
COLUMNS: dict[str, Callable[[int], pa.Array]] = {
    "nulls": lambda n: pa.nulls(n),
    "numbers": lambda n: pa.array(range(n)),
    "large": lambda n: pa.array([2**63 - 1] * n),
    "unsigned": lambda n: pa.array([2**64 - 1] * n, pa.uint64()),
    "minus": lambda n: pa.array([-1.5] * n),
    "nan": lambda n: pa.array([float("nan"), float("inf")] * n)[:n],
    "booleans": lambda n: pa.array([True] * n),
    "texts": lambda n: pa.array(["word"] * n),
    "hostile": lambda n: pa.array([HOSTILE] * n),
    "some texts": lambda n: pa.array(["word", None] * n)[:n],
    "no text": lambda n: pa.array([""] * n),
    "bytes": lambda n: pa.array([b"\xff\x00"] * n),
    "dates": lambda n: pa.array([datetime.date(1979, 5, 27)] * n),
    "moments": lambda n: pa.array([datetime.datetime(1979, 5, 27)] * n),
    "decimals": lambda n: pa.array([decimal.Decimal("1.5")] * n),
    "lists": lambda n: pa.array([[1, 2]] * n),
    "empty lists": lambda n: pa.array([[]] * n, pa.list_(pa.int64())),
    "some lists": lambda n: pa.array([[1], None] * n)[:n],
    "lists with nulls": lambda n: pa.array([[1, None]] * n),
    "lists of nan": lambda n: pa.array([[float("nan"), 1e308]] * n),
    "lists of large": lambda n: pa.array([[2**62, -1]] * n),
    "lists of texts": lambda n: pa.array([["a", HOSTILE]] * n),
    "lists of lists": lambda n: pa.array([[[1]]] * n),
    "tables": lambda n: pa.array([{"a": 1}] * n),
    "codes": lambda n: pa.array(["word"] * n).dictionary_encode(),
    "large texts": lambda n: pa.array(["word"] * n, pa.large_string()),
}


@functools.cache
def whole_run() -> Folder:
    """The files of a run with nothing wrong, as small as it may be."""
    with tempfile.TemporaryDirectory() as home:
        run = write_run(Path(home), metrics(3), evaluations=[evaluation(0, 0.3), evaluation(3, 0.5)])
        config = load_recipe("quickstart", ["train.steps=3", "records.every_steps=1"]).config
        (run / "config.toml").write_text(to_toml(config))
        (run / "events.jsonl").write_text('{"step": 2, "kind": "note", "message": "said"}\n')
        groups = [["p0", 0, "trained", 2, 9, 1, 0], ["p1", 0, "returned"]]
        (run / "ledger.jsonl").write_text(json.dumps({"step": 1, "groups": groups}) + "\n")
        problems = {"set": "held-out", "k": 8, "ids": ["a", "b"], "questions": ["q", "r"], "values": [0.5, 0.1]}
        scores = [{"step": step, "correct": [1, step]} | problems for step in (0, 3)]
        (run / "eval_problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
        (run / "phrases.toml").write_text('[en]\ndoubt = ["wait"]\n')
        pieces = save_tokenizer(run, byte_level())
        for step in (2, 3):
            rows = [row(pieces, "the answer is 42", problem=f"p{i // 2}", index=i % 2, step=step) for i in range(4)]
            write_rollouts(run, step, rows)
        answer = dapo("report", str(run))  # makes the scripts of the recorded steps
        assert not answer.returncode, answer.stderr
        shutil.rmtree(run / "report")
        return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def write(files: Folder, folder: Path) -> None:
    for name, held in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(held)


# ------------------------------------------------------------------ changes, by words that a failing example shows


def changed(files: Folder, change: tuple[Any, ...]) -> Folder:
    kind, name, *how = change
    return files if name not in files else files | KINDS[kind](name, files[name], *how)


def cut(name: str, held: bytes, place: float, n: int, new: bytes) -> Folder:
    """Some bytes are others; a place is a share of the file."""
    at = int(place * len(held))
    return {name: held[:at] + new + held[at + n :]}


def without_line(name: str, held: bytes, place: float, times: int) -> Folder:
    """A line is gone, or there several times."""
    lines = held.splitlines(keepends=True)
    at = int(place * len(lines))
    return {name: b"".join([*lines[:at], *lines[at : at + 1] * times, *lines[at + 1 :]])}


def without_file(name: str, _: bytes, instead: str) -> Folder:
    """An empty file, none, or a folder of that name."""
    return {name: {"nothing": b"", "gone": GONE, "folder": FOLDER}[instead]}


GONE, FOLDER = b"(gone)", b"(folder)"


def with_json(name: str, held: bytes, place: float, leaf: int, value: str) -> Folder:
    """A value of a JSON line, or of a script's one line, is another."""
    lines = held.decode("utf-8", "replace").splitlines(keepends=True)
    at = int(place * len(lines))
    for line in lines[at : at + 1]:
        before, brace, rest = line.partition("{")
        body, end, after = rest.rpartition("}")
        try:
            tree = json.loads(brace + body + end)
        except (ValueError, RecursionError):
            continue
        holders = list(places_in(tree))
        if holders:
            holder, key = holders[leaf % len(holders)]
            holder[key] = "@@"
            lines[at] = before + json.dumps(tree).replace('"@@"', JSON[value]) + after
    return {name: "".join(lines).encode()}


def places_in(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Where a value stands: (list or table, index or key)."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places_in(tree[key])


def with_toml(name: str, held: bytes, place: float, value: str) -> Folder:
    lines = held.decode("utf-8", "replace").splitlines(keepends=True)
    ours = [at for at, line in enumerate(lines) if " = " in line]
    for at in ours[int(place * len(ours)) :][:1]:
        lines[at] = f"{lines[at].partition(' = ')[0]} = {TOML[value]}\n"
    return {name: "".join(lines).encode()}


def with_key(name: str, held: bytes, key: str, value: str) -> Folder:
    """One more key, first, so that it is of no section."""
    return {name: f"{key} = {TOML[value]}\n".encode("utf-8", "replace") + held}


def with_column(name: str, held: bytes, column: str, values: str | None) -> Folder:
    """A column of other values, or without it; none of the names: a table without rows."""
    try:
        table = pq.read_table(io.BytesIO(held))
    except (pa.ArrowException, OSError):  # another change came first
        return {}
    if column not in table.column_names:
        table = table.slice(0, 0)
    elif values is None:
        table = table.drop_columns([column])
    else:
        table = table.set_column(table.column_names.index(column), column, COLUMNS[values](len(table)))
    to = io.BytesIO()
    pq.write_table(table, to)
    return {name: to.getvalue()}


KINDS: dict[str, Callable[..., Folder]] = {
    "bytes": cut, "line": without_line, "file": without_file, "json": with_json, "toml": with_toml, "key": with_key,
    "column": with_column,
}  # fmt: skip

places = st.floats(0, 1, exclude_max=True, width=32)
odd_bytes = st.one_of(
    st.binary(max_size=4),
    st.sampled_from([b"\x00", b"\xff", b"\xef\xbb\xbf", b"\n", b"{", b'"', b"[", b"=", b"9" * 5_000, HOSTILE.encode()]),
)
odd_keys = st.one_of(
    st.sampled_from(['"a"', "a.b", '""', "train", "train.steps", "data.fields.x", "答", ".".join("a" * 2_000)]),
    st.text(max_size=5),
)


def changes_of(names: Sequence[str]) -> st.SearchStrategy[tuple[Any, ...]]:
    def of(*ends: str) -> st.SearchStrategy[str]:
        return st.sampled_from([name for name in names if name.endswith(ends)])

    def kind(word: str) -> st.SearchStrategy[str]:
        return st.just(word)

    general = [
        st.tuples(kind("bytes"), of(""), places, st.integers(0, 40), odd_bytes),
        st.tuples(kind("line"), of(""), places, st.sampled_from([0, 2])),
        st.tuples(kind("toml"), of(".toml"), places, st.sampled_from(sorted(TOML))),
        st.tuples(kind("key"), of(".toml"), odd_keys, st.sampled_from(sorted(TOML))),
    ]
    if len(names) == 1:
        return st.one_of(general)
    columns = pq.read_schema(io.BytesIO(whole_run()["rollouts/step-000003.parquet"])).names
    lines = st.tuples(
        kind("json"), of(".jsonl", ".js", "r.json"), places, st.integers(0, 99), st.sampled_from(sorted(JSON))
    )
    table = st.tuples(
        kind("column"), of(".parquet"), st.sampled_from([*columns, "?"]), st.sampled_from([None, *COLUMNS])
    )
    gone = st.tuples(kind("file"), of(""), st.sampled_from(["nothing", "gone", "folder"]))
    return st.one_of(*general, lines, lines, lines, table, table, gone)


# ------------------------------------------------------------------ what must hold


def watched(run: Path) -> None:
    """What `dapo watch` answers by; its server would turn an exception into a plain 503."""
    try:
        page = Watched(run)
        page.version(), json.loads(page.data()), page.history()
        for step, part in itertools.product(("step-000002", "step-000003"), ("index", "000", "001")):
            page.chunk(step, part)
    except DapoError as error:
        is_clean(render_error(error))


def commanded(run: Path, *words: str) -> None:
    answer = dapo(
        *(word.replace("OUT", f"{run.parent}/out") for word in words), str(run)
    )  # raises what is no error of ours
    assert answer.returncode in (0, 1, 2), answer
    assert not answer.returncode or answer.stderr.strip(), "an error without a message"
    is_clean(answer.stdout)
    is_clean(answer.stderr)


def is_clean(text: str) -> None:
    found = CONTROL.search(text)
    assert not found, (text[max(0, found.start() - 80) : found.end() + 20], "holds what a terminal acts on")


READERS: dict[str, Callable[[Path], None]] = {"watch": watched} | {
    words: functools.partial(lambda run, words: commanded(run, *words.split()), words=words)
    for words in (
        "report --out OUT", "report --terminal", "report --terminal --problem p1", "doctor", "doctor --json",
        "ledger", "ledger --json",
        "verify --verifier exact --audit", "verify --verifier exact --json --audit", "explain",
    )
}  # fmt: skip


def a_run_is_read_or_refused(reader: str, changes: list[tuple[Any, ...]]) -> None:
    files = functools.reduce(changed, changes, whole_run())
    with tempfile.TemporaryDirectory() as home:
        run = Path(home) / "run"
        write({name: held for name, held in files.items() if held not in (GONE, FOLDER)}, run)
        for name, held in files.items():
            if held == FOLDER:
                (run / name).mkdir(parents=True)
        READERS[reader](run)


def a_config_is_read_or_refused(changes: list[tuple[Any, ...]], overrides: list[str]) -> None:
    files = functools.reduce(changed, changes, {"config.toml": whole_run()["config.toml"]})
    with tempfile.TemporaryDirectory() as home:
        write(files, Path(home))
        path = Path(home) / "config.toml"
        try:
            resolved = load_recipe(str(path), overrides)
        except ConfigError as error:
            is_clean(render_error(error))
            return
        path.write_text(to_toml(resolved.config))
        assert load_recipe(str(path)).config == resolved.config, "not what its own text says"


keys = st.one_of(st.sampled_from([*known_keys(), "preset"]), odd_keys)
set_values = st.one_of(
    st.sampled_from(sorted(TOML)).map(TOML.__getitem__),
    st.sampled_from([*preset_names(), *recipe_names()]),
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(str),
    st.text(max_size=8),
)
overrides = st.one_of(st.tuples(keys, set_values).map("=".join), st.text(max_size=8))

PROPERTIES: dict[Callable[..., None], Callable[[], tuple[st.SearchStrategy[Any], ...]]] = {
    a_run_is_read_or_refused: lambda: (
        st.sampled_from([*READERS]),
        st.lists(changes_of([*whole_run()]), min_size=1, max_size=3),
    ),
    a_config_is_read_or_refused: lambda: (
        st.lists(changes_of(["config.toml"]), max_size=2),
        st.lists(overrides, max_size=2),
    ),
}


def drawn(check: Callable[..., None], *, n_examples: int, seed: int) -> Callable[..., None]:
    """A property with that many examples, the same ones for the same seed. They are short: none is made smaller."""
    quiet = settings(
        max_examples=n_examples, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        print_blob=False, phases=[Phase.generate],
    )  # fmt: skip
    return hypothesis.seed(seed)(quiet(given(*PROPERTIES[check]())(check)))
