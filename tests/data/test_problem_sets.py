"""Any source, known schema and mapped columns give the same problems; what is merged or dropped is said."""

import csv
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpu_time import cpu_seconds
from dapo.data import Why, hold_out, inventory, load_problems
from dapo.data import rows as rows_module
from dapo.data.keys import loose, normalized, problem_id
from dapo.data.prepare.clean import prepare
from dapo.data.rows import read_rows
from dapo.data.sources import hub_rows
from dapo.data.wrappers import DAPO_PREFIX, DAPO_SUFFIX, OUTPUT_INSTRUCTION, WRAPPER, bare_question
from dapo.errors import ConfigError, DataError
from dapo.types import Problem

ONE = ("What is 2 + 3?", "5")
TWO = ("Find $x$ with $x - 1 = 6$.", "7")


def verl(question: str, answer: str, **extra: object) -> dict[str, object]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": question}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": "0", **extra},
    }


SYSTEM = {"role": "system", "content": "Be brief."}
SCHEMAS = {
    "verl bare": lambda q, a: verl(q, a),
    "verl wrapped": lambda q, a: verl(DAPO_PREFIX + q + DAPO_SUFFIX, a),
    "verl raw_problem": lambda q, a: verl("anything around " + q, a, raw_problem=q),
    "verl system": lambda q, a: {**verl(q, a), "prompt": [SYSTEM, *verl(q, a)["prompt"]]},
    "gsm8k": lambda q, a: {"question": q, "answer": f"We add <<1+1={a}>>{a}.\n#### {a}"},
    "math with solution": lambda q, a: {"problem": q, "level": "Level 1", "solution": f"So it is $\\boxed{{{a}}}$."},
    "math with answer": lambda q, a: {"problem": q, "answer": a, "difficulty": 1.0, "type": "Algebra"},
    "aime": lambda q, a: {"problem": q, "solution": "…", "answer": a, "year": 1983, "problem_number": 1},
    "question/answer": lambda q, a: {"question": q, "answer": a},
    "problem/answer, capitals": lambda q, a: {"ID": 3, "Problem": q, "Answer": a},
    "answer as a number": lambda q, a: {"question": q, "answer": float(a)},
}  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_known_schemas_need_no_configuration(schema, write_jsonl):
    path = write_jsonl([SCHEMAS[schema](*ONE), SCHEMAS[schema](*TWO)])
    assert [(p.question, p.answer) for p in load_problems(str(path))] == [ONE, TWO]


@pytest.mark.parametrize("missing", [None, "", " ", float("nan")])
@pytest.mark.parametrize("more", [{}, {"hint": None}])
def test_a_first_row_without_an_answer_does_not_hide_the_schema(missing, more, write_jsonl):
    rows = [{"question": "What is 1 + 1?", "answer": missing}, SCHEMAS["gsm8k"]("What is 2 + 2?", 4)]
    [problem] = load_problems(str(write_jsonl([row | more for row in rows])))
    assert (problem.question, problem.answer) == ("What is 2 + 2?", "4")


@pytest.mark.parametrize(
    ("rows", "answers"),
    [
        ([{"answer": "5", "level": None}, {}, {"answer": "7", "level": None}], ["5", "7"]),
        (
            [{"answer": "5", "solution": None}, {"solution": "\\boxed{6}"}, {"answer": "8", "solution": None}],
            ["5", "6", "8"],
        ),
        (
            [{"answer": "5", "level": None}, {"answer": "6", "level": ""}, {"answer": "#### 7", "level": "3"}],
            ["5", "6"],
        ),
    ],
)
def test_the_first_row_tells_the_schema_where_it_has_an_answer(rows, answers, write_jsonl):
    path = write_jsonl([{"question": f"What is {i}?", **row} for i, row in enumerate(rows)])
    assert [problem.answer for problem in load_problems(str(path))] == answers


def test_fields_map_any_column(write_jsonl):
    path = write_jsonl([{"text": ONE[0], "gold": {"value": ONE[1]}, "grade": 4}])
    fields = {"question": "text", "answer": "gold.value", "level": "grade"}
    (problem,) = load_problems(str(path), fields=fields)
    assert (problem.question, problem.answer, problem.meta) == (*ONE, {"level": 4})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"question": "text"}, "data.fields"),
        ({"question": "text", "answer": "gold.valeu"}, "data.fields.answer = 'gold.valeu'"),
    ],
)
def test_wrong_fields_name_the_key(fields, named, write_jsonl):
    path = write_jsonl([{"text": "q", "gold": {"value": "1"}}])
    with pytest.raises(DataError, match=r"(?s)data\.fields.*COLUMN") as error:
        load_problems(str(path), fields=fields)
    assert named in error.value.message


def test_every_format_gives_the_same_set(tmp_path):
    rows = [{"question": q, "answer": a} for q, a in (ONE, TWO, ("多少？", "1"))]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "lines.json").write_text("\n".join(json.dumps(r) for r in rows))
    (tmp_path / "held.json").write_text(json.dumps({"data": rows}))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    digests = {load_problems(str(path)).sha256 for path in tmp_path.iterdir()}
    assert len(digests) == 1


@pytest.mark.parametrize("sign", [",", ";", "\t"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_a_csv_is_separated_as_its_header_is(sign, quoting, tmp_path):
    rows = [["question", "answer"], ["How much, in all; roughly?", "12,5"], ['Say\t"a"\nagain', "7;8"]]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=sign, quoting=quoting).writerows(rows)
    assert [list(row.values()) for _, row in read_rows(tmp_path / "a.csv")] == rows[1:]


@pytest.mark.parametrize(
    ("header", "sign", "names"),
    [
        ("Frage;Antwort", ";", ["Frage", "Antwort"]),
        ("a;b,c", ",", ["a;b", "c"]),  # the comma first
        ("a\tb;c", ";", ["a\tb", "c"]),
        ('"a,b";c', ";", ["a,b", "c"]),
        ('"a";"b,c"', ";", ["a", "b,c"]),
        ('"say ""a,b""";c', ";", ['say "a,b"', "c"]),
        ('"a;b",c', ",", ["a;b", "c"]),
        ('5" pipe;c', ";", ['5" pipe', "c"]),  # a quote within a field is none
        ('"a;b"', ",", ["a;b"]),
        ("a", ",", ["a"]),
    ],
)
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_border_a_separator_counts_outside_quotes_only(header, sign, names, ends, tmp_path):
    cells = ["1;,\t1"] * len(names)
    (tmp_path / "a.csv").write_text(header + ends + sign.join(f'"{cell}"' for cell in cells) + ends, newline="")
    assert [row for _, row in read_rows(tmp_path / "a.csv")] == [dict(zip(names, cells, strict=True))]


def test_checksum_is_of_questions_and_answers(write_jsonl):
    def digest(answer: str, **more: object) -> str:
        return load_problems(str(write_jsonl([{"question": "q?", "answer": answer, **more}]))).sha256

    assert digest("1") == digest("1", level=3)
    assert digest("1") != digest("2")


# Questions and answers as generated text: letters, signs, blanks; answers are integers, so that all are usable.
pairs = st.dictionaries(
    st.text("abc xyz+-=()\n", min_size=1).map(lambda s: s.strip()).filter(bool),
    st.integers(-999, 999),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=pairs, k=st.integers(1, 5), data=st.data())
def test_a_file_repeated_k_times_is_the_file_once(pairs, k, data, write_jsonl):
    rows = [{"question": q, "answer": str(a)} for q, a in pairs.items()]
    once = outcome(write_jsonl(rows))
    shuffled = data.draw(st.permutations(rows * k))
    assert outcome(write_jsonl(shuffled)) == once
    if k > 1 and once:
        notes = load_problems(str(write_jsonl(shuffled))).notes
        assert any(f"{len(rows):,} x {k}" in note for note in notes)


def outcome(path: Path) -> set[tuple[str, str]]:
    """What is kept, whatever the order; nothing where every question has conflicting answers."""
    try:
        return {(normalized(p.question), p.answer) for p in load_problems(str(path))}
    except DataError:
        return set()


def test_a_repeated_file_keeps_its_own_duplicates_apart(write_jsonl):
    """Of (a, a, b) x 10 the file is 3 rows x 10, and one of the three is a duplicate."""
    rows = [{"question": q, "answer": "1"} for q in ("a?", "a?", "b?")]
    problems = load_problems(str(write_jsonl(rows * 10)))
    assert len(problems) == 2
    assert problems.dropped == {Why.DUPLICATE: 1}


def test_white_space_and_case_are_folded_and_nothing_else(write_jsonl):
    questions = ["Compute  $\\sin 60^\\circ$.", "compute $\\sin 60^\\circ$.", "Compute $\\sin -60^\\circ$."]
    assert loose(questions[0]) == loose(questions[2])
    problems = load_problems(str(write_jsonl([{"question": q, "answer": "1"} for q in questions])))
    assert [p.question for p in problems] == [questions[0], questions[2]]
    assert problems.drops[0].row == 2


def test_conflicting_answers_drop_the_problem_but_spelling_is_no_conflict(write_jsonl):
    rows = [("a?", "7"), ("a?", "8"), ("b?", "7"), ("B?", "007"), ("c?", "1")]
    problems = load_problems(str(write_jsonl([{"question": q, "answer": a} for q, a in rows])))
    assert [p.question for p in problems] == ["b?", "c?"]
    assert problems.dropped == {Why.CONFLICT: 2, Why.DUPLICATE: 1}
    assert {drop.detail for drop in problems.drops if drop.why is Why.CONFLICT} == {"7 / 8"}


@pytest.mark.parametrize(
    "spellings",
    [
        ["7", "+7", "007", "7^\\circ", "$7$", "\\mathbf{7}"],
        ["0.5", "\\frac12", "1/2"],
        ["2\\sqrt{2}", "\\sqrt 8"],
        ["\\text{a b}", "\\text{a  b}"],
    ],
)
def test_one_answer_in_several_spellings_is_one_answer(spellings, write_jsonl):
    rows = [{"question": "q?", "answer": spelling} for spelling in spellings]
    problems = load_problems(str(write_jsonl(rows)))
    assert problems.dropped == {Why.DUPLICATE: len(spellings) - 1}


def test_rows_without_a_usable_reference_are_dropped_and_counted(write_jsonl):
    rows = [("a?", None), ("b?", ""), ("c?", "4"), ("d?", "\\frac{1}{")]
    problems = load_problems(str(write_jsonl([{"question": q, "answer": a} for q, a in rows])))
    assert [p.question for p in problems] == ["c?"]
    assert problems.dropped == {Why.NO_REFERENCE: 1, Why.UNPARSEABLE: 2}


def test_several_sources_are_one_set(write_jsonl):
    first = write_jsonl([{"question": "a?", "answer": "1"}, {"question": "b?", "answer": "2"}], "one.jsonl")
    second = write_jsonl([{"problem": "A?", "answer": "1"}, {"problem": "b?", "answer": "3"}], "two.jsonl")
    problems = load_problems([str(first), str(second)])
    assert [p.question for p in problems] == ["a?"]
    assert len(problems.files) == 2


@given(st.text().map(str.strip).filter(lambda q: q and bare_question(q) == (q, ())))
def test_the_wrapper_comes_off_whole(question):
    assert bare_question(DAPO_PREFIX + question + DAPO_SUFFIX) == (question, (WRAPPER,))


@pytest.mark.parametrize(
    "instruction",
    [
        "\n请以“Answer: \\boxed{<final_answer>}”的格式输出最终答案。",
        "\n\nPut your final answer in \\boxed{}.",
        " Let's think step by step and output the final answer within \\boxed{}.",
    ],
)
def test_an_output_instruction_in_the_data_is_taken_off(instruction):
    assert bare_question("How many?" + instruction) == ("How many?", (OUTPUT_INSTRUCTION,))


def test_a_box_that_belongs_to_the_question_stays():
    question = "Fill in the blank:\n$3 + \\boxed{?} = 5$."
    assert bare_question(question) == (question, ())


def test_ids_are_the_datas_own_only_where_all_have_one(write_jsonl):
    own = [{"question": q, "answer": "1", "unique_id": f"test/{q}"} for q in "ab"]
    assert [p.id for p in load_problems(str(write_jsonl(own)))] == ["test/a", "test/b"]
    own[1].pop("unique_id")
    assert [p.id for p in load_problems(str(write_jsonl(own)))] == [problem_id("a"), problem_id("b")]


def test_a_callable_yields_problems_or_columns(tmp_path, monkeypatch):
    (tmp_path / "my_problems.py").write_text(
        "from dapo.types import Problem\n"
        "def both():\n"
        "    yield Problem('own-1', 'a?', '1', 'mine', {'level': 2})\n"
        "    yield {'id': 'own-2', 'question': 'b?', 'answer': 2}\n"
        "def broken():\n"
        "    yield {'question': 'a?', 'answer': '1'}\n"
        "    raise RuntimeError('no more')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    problems = load_problems("my_problems:both")
    assert list(problems) == [
        Problem("own-1", "a?", "1", "mine", {"level": 2}),
        Problem("own-2", "b?", "2", "my_problems:both"),
    ]
    with pytest.raises(DataError, match="my_problems:broken: row 2: raised RuntimeError: no more"):
        load_problems("my_problems:broken")
    with pytest.raises(DataError, match="cannot be imported"):
        load_problems("my_problems:absent")


def test_known_names_lie_under_the_root(tmp_path, monkeypatch):
    (tmp_path / "gsm8k").mkdir()
    for split, answer in (("train", "1"), ("test", "2")):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text(json.dumps({"question": "q?", "answer": f"#### {answer}"}))
    monkeypatch.setenv("DAPO_DATA", str(tmp_path))
    assert load_problems("gsm8k")[0].answer == "1"
    assert load_problems("gsm8k", use="eval")[0].answer == "2"
    assert load_problems("gsm8k:train", use="eval", root=tmp_path)[0].answer == "1"
    with pytest.raises(DataError, match=r"gsm8k:valid: no such split.\ngsm8k has train, test"):
        load_problems("gsm8k:valid")
    with pytest.raises(DataError, match="Did you mean gsm8k"):
        load_problems("gsm8")


def test_the_hub_loader_reads_a_folder_in_the_hubs_layout(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "test.jsonl").write_text(json.dumps({"problem": "q?", "answer": "1"}) + "\n")
    rows = list(hub_rows(str(tmp_path), config=None, split="test", revision=None))
    assert rows == [(1, {"problem": "q?", "answer": "1"})]
    with pytest.raises(DataError, match="split train could not be loaded"):
        list(hub_rows(str(tmp_path), config=None, split="train", revision=None))


@pytest.mark.parametrize(
    "question",
    [
        "\n" * 500_000 + "q",
        "q\n" + "\\boxed" * 150_000,
        "q\n" + "Answer " * 140_000,
        "q " + "Let's think step by step " * 40_000,
    ],
    ids=["line breaks", "boxes", "answers", "sentences"],
)
def test_a_long_question_costs_no_more_than_its_length(question):
    assert cpu_seconds(lambda: bare_question(question)) < 10


def test_many_answers_to_one_question_are_one_conflict(write_jsonl):
    rows = [{"question": "q?", "answer": str(i)} for i in range(20_000)] + [{"question": "r?", "answer": "1"}]
    problems = load_problems(str(write_jsonl(rows)))
    assert problems.dropped == {Why.CONFLICT: 20_000}


def test_held_out_problems_are_none_of_the_rest(write_jsonl):
    problems = load_problems(str(write_jsonl([{"question": f"{i}?", "answer": "1"} for i in range(30)])))
    rest, held = hold_out(problems, 7, seed=3)
    assert (len(rest), len(held)) == (23, 7)
    assert {p.id for p in rest} | {p.id for p in held} == {p.id for p in problems}
    assert hold_out(problems, 7, seed=3)[1].problems == held.problems
    assert hold_out(problems, 7, seed=4)[1].problems != held.problems
    with pytest.raises(DataError, match="cannot hold out 30"):
        hold_out(problems, 30, seed=3)


def nan_jsonl(path: Path) -> None:
    answers = ("NaN", "Infinity", "null", '"nan"', "[NaN]", "6.0")
    rows = [f'{{"question": "q{i}", "answer": {answer}}}\n' for i, answer in enumerate(answers, 1)]
    path.write_text("".join(rows))


def nan_parquet(path: Path) -> None:
    answers = pa.array([float("nan"), float("inf"), None, -math.inf, None, 6.0], pa.float64())
    pq.write_table(pa.table({"question": [f"q{i}" for i in range(1, 7)], "answer": answers}), path)


def nan_csv(path: Path) -> None:
    path.write_text("question,answer\nq1,nan\nq2,NaN\nq3,nan\nq4,nan\nq5,nan\nq6,6\n")


@pytest.mark.parametrize(("name", "write"), [("a.jsonl", nan_jsonl), ("a.parquet", nan_parquet), ("a.csv", nan_csv)])
@pytest.mark.parametrize("verifier", ["math", "exact"])
def test_an_answer_that_is_not_there_is_not_the_word_nan(name, write, verifier, tmp_path):
    write(tmp_path / name)
    loaded = load_problems(str(tmp_path / name), verifier=verifier)
    assert [(problem.question, problem.answer) for problem in loaded] == [("q6", "6")]
    assert loaded.dropped == {"no reference": 5}


@pytest.mark.parametrize("verifier", ["math", "exact", "choice", "dapo-published"])
def test_an_empty_answer_is_dropped_with_its_reason(verifier, write_jsonl):
    path = write_jsonl([{"question": "q1", "answer": ""}, {"question": "q2", "answer": "B"}])
    loaded = load_problems(str(path), verifier=verifier)
    assert [problem.answer for problem in loaded] == ["B"]
    assert [(drop.why, drop.row) for drop in loaded.drops] == [(Why.UNPARSEABLE, 1)]
    assert loaded.drops[0].detail


ADD = [{"stdin": "2 3", "stdout": "5"}]


@pytest.mark.parametrize("answer", [{}, {"answer": None}, {"answer": ""}, {"solution": "print(5)"}], ids=str)
def test_code_problems_need_no_answer_beside_their_tests(answer, write_jsonl):
    rows = [{"question": "Add two numbers.", "tests": ADD, **answer}, {"question": "No tests.", "tests": [], **answer}]
    loaded = load_problems(str(write_jsonl(rows)), verifier="code")
    assert [(p.question, p.answer, p.meta["tests"]) for p in loaded] == [("Add two numbers.", "", ADD)]
    assert [(drop.why, drop.row) for drop in loaded.drops] == [(Why.UNPARSEABLE, 2)]
    assert "tests must be a list" in loaded.drops[0].detail


def test_code_problems_in_parquet_and_under_other_names(tmp_path):
    path = tmp_path / "code.parquet"
    pq.write_table(pa.Table.from_pylist([{"text": "Add two numbers.", "cases": ADD}]), path)
    loaded = load_problems(str(path), fields={"question": "text", "tests": "cases"}, verifier="code")
    assert [(p.answer, p.meta["tests"]) for p in loaded] == [("", ADD)]


def test_tests_without_an_answer_name_the_verifier_that_runs_them(write_jsonl):
    path = write_jsonl([{"question": "Add two numbers.", "tests": ADD}])
    with pytest.raises(DataError, match="--verifier code"):
        load_problems(str(path))


def test_prepared_code_problems_keep_their_tests(write_jsonl, tmp_path):
    path = write_jsonl([{"question": "Add two numbers.", "tests": ADD}])
    prepare(str(path), tmp_path / "clean.parquet", verifier="code")
    assert load_problems(str(tmp_path / "clean.parquet"), verifier="code")[0].meta["tests"] == ADD


def test_a_verifier_that_is_none_is_refused(write_jsonl):
    path = write_jsonl([{"question": "q", "answer": "1"}])
    with pytest.raises(ConfigError, match="maths"):
        load_problems(str(path), verifier="maths")


# ------------------------------------------------------------------ borders


@pytest.mark.parametrize("n_rows", [0, 1, 4095, 4096, 4097, 8193])
def test_border_every_row_of_a_parquet_file_comes_once_in_order(n_rows, tmp_path):
    """Rows are read 4,096 at a time, whatever the file's own groups are."""
    path = tmp_path / "set.parquet"
    pq.write_table(pa.table({"question": pa.array(range(n_rows), pa.int64())}), path, row_group_size=1000)
    assert list(read_rows(path)) == [(i + 1, {"question": i}) for i in range(n_rows)]


@pytest.mark.parametrize("n_rows", [1, 4095, 4096, 4097, 8193])
def test_border_every_row_of_a_hub_data_set_comes_once_in_order(n_rows, monkeypatch):
    import datasets

    table = datasets.Dataset.from_dict({"question": list(range(n_rows))})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_arguments, **_options: table)
    monkeypatch.setattr("dapo.data.sources.why_offline", lambda: "")
    rows = hub_rows("owner/name", config=None, split="train", revision=None)
    assert list(rows) == [(i + 1, {"question": i}) for i in range(n_rows)]


@pytest.mark.parametrize("first_answer", [1, 2, 5, 6, 7, 12])
@pytest.mark.parametrize("n_rows", [12, 20])
def test_border_rows_looked_at_for_an_answer_are_read_once_like_the_others(
    first_answer, n_rows, write_jsonl, monkeypatch
):
    """Behind the first row five more are looked at."""
    monkeypatch.setattr(inventory, "HEAD_ROWS", 5)
    rows = [{"question": f"{i}?", "answer": None if i < first_answer else str(i)} for i in range(1, n_rows + 1)]
    problems = load_problems(str(write_jsonl(rows)))
    assert [p.question for p in problems] == [f"{i}?" for i in range(first_answer, n_rows + 1)]
    assert [drop.row for drop in problems.drops] == list(range(1, first_answer))


@pytest.mark.parametrize("ends", ["", "\n", "\n\n", "\r\n"])
@pytest.mark.parametrize("n_rows", [1, 2, 3])
def test_border_the_last_line_counts_with_and_without_its_end(n_rows, ends, tmp_path):
    rows = [{"question": f"{i}\u2028?", "answer": "1"} for i in range(n_rows)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + ends, newline="")
    (tmp_path / "a.csv").write_text(
        "question,answer\n" + "\n".join(f"{r['question']},1" for r in rows) + ends, newline=""
    )
    for name in ("a.jsonl", "a.csv"):
        assert [row["question"] for _, row in read_rows(tmp_path / name)] == [row["question"] for row in rows]


@pytest.mark.parametrize("n_more", [-1, 0, 1, 101])
@pytest.mark.parametrize("ends", ["", "\n"])
def test_border_a_line_of_just_the_limit_is_read_and_a_longer_one_refused(n_more, ends, tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "MAX_LINE_BYTES", 100)
    row = {"question": "", "answer": "1"}
    row["question"] = "q" * (100 - len(json.dumps(row) + ends) + n_more)
    short = json.dumps({"question": "s", "answer": "1"}) + "\n"
    path = tmp_path / "set.jsonl"
    path.write_text(short + json.dumps(row) + ends)
    if n_more <= 0:
        assert [row["question"][0] for _, row in read_rows(path)] == ["s", "q"]
    else:
        with pytest.raises(DataError, match="row 2: longer than"):
            list(read_rows(path))


@pytest.mark.parametrize("n_held", [1, 2, 9, 10, 11, 19])
def test_border_held_out_and_the_rest_are_the_set_in_its_order(n_held, write_jsonl):
    problems = load_problems(str(write_jsonl([{"question": f"{i}?", "answer": "1"} for i in range(20)])))
    rest, held = hold_out(problems, n_held, seed=3)
    assert (len(rest), len(held)) == (20 - n_held, n_held)
    in_order = {problem.id: place for place, problem in enumerate(problems)}
    places = [[in_order[problem.id] for problem in part] for part in (rest, held)]
    assert all(part == sorted(part) for part in places)
    assert sorted(places[0] + places[1]) == list(range(20))
