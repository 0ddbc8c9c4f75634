"""The published files, with the counts their own page states. Skipped where the files are not."""

import pytest

from dapo.data import load_problems
from dapo.data.check import check
from dapo.data.prepare.integer_answers import Restated, integer_answer
from dapo.data.wrappers import DAPO_PREFIX, DAPO_SUFFIX, OUTPUT_INSTRUCTION, WRAPPER


def test_dapo_math_17k(shared_data):
    report = check("dapo-math-17k", root=shared_data)
    assert (report.rows, report.copies, report.schema) == (17_917, 1, "verl")
    assert report.times == {1: 16_492, 2: 664, 3: 23, 4: 7}
    assert report.distinct == sum(report.times.values()) == 17_186
    assert report.duplicate_rows == report.rows - report.distinct
    assert len(report.conflicts) == 12
    assert sum(len(rows) for one in report.conflicts for rows in one.answers.values()) == 24
    assert report.answer_types == {"integer": 17_917}
    assert report.removed == {OUTPUT_INSTRUCTION: 20}
    assert report.usable == report.distinct - len(report.conflicts)
    assert not report.unparseable
    assert not report.no_reference


def test_aime_2024_is_thirty_problems_times_32(shared_data):
    report = check("aime24", use="eval", root=shared_data)
    assert (report.rows, report.rows_once, report.copies, report.distinct) == (960, 30, 32, 30)
    assert report.removed == {WRAPPER: 960}
    problems = load_problems("aime24", use="eval", root=shared_data)
    assert any("30 x 32" in note for note in problems.notes)
    assert not any("Answer:" in problem.question for problem in problems)


def test_the_wrapper_is_the_published_text(shared_data):
    import pyarrow.parquet as pq

    for row in pq.read_table(shared_data / "aime2024" / "aime-2024.parquet").to_pylist():
        assert row["prompt"][0]["content"] == DAPO_PREFIX + row["extra_info"]["raw_problem"] + DAPO_SUFFIX


@pytest.mark.parametrize(("split", "rows"), [("train", 7_473), ("test", 1_319)])
def test_every_reference_of_gsm8k_is_an_integer(split, rows, shared_data):
    report = check(f"gsm8k:{split}", root=shared_data)
    assert report.rows == report.usable == rows
    assert report.answer_types == {"integer": rows}


def test_math_has_two_null_answers(shared_data):
    report = check(str(shared_data / "math_train" / "math.json"))
    assert report.rows == 7_474
    assert len(report.no_reference) == 2


def test_aime_1983_to_2023_are_all_distinct(shared_data):
    report = check(str(shared_data / "aime_train_1983_2023" / "aime.json"))
    assert report.rows == report.distinct == report.usable == 65 * 15


@pytest.mark.slow
def test_no_training_file_holds_aime_2024(shared_data):
    for name in ("dapo-math-17k", str(shared_data / "math_train" / "math.json")):
        (contamination,) = check(name, against=["aime24"], root=shared_data).contamination
        assert not contamination.found
        assert contamination.max_share < 0.3  # stock phrases


@pytest.mark.slow
def test_shared_problems_are_found(shared_data):
    """708 of DAPO's problems are AIME's, by loose key; n-grams and near-duplicates can only add to them."""
    aime = str(shared_data / "aime_train_1983_2023" / "aime.json")
    (contamination,) = check("dapo-math-17k", against=[aime], root=shared_data).contamination
    whole = {overlap.evaluation for overlap in contamination.found if overlap.how in ("exact", "loose")}
    assert len(whole) == 708
    assert contamination.n_hit >= 708


@pytest.mark.slow
def test_the_closed_forms_of_math_become_integers(shared_data):
    """Every restated answer is the sum of its letters; what `restate` itself asserts (form = answer) holds for all."""
    problems = load_problems(str(shared_data / "math_train" / "math.json"))
    outcomes = [integer_answer(problem) for problem in problems]
    restated = [outcome for outcome in outcomes if isinstance(outcome, Restated)]
    assert len(restated) > 0.8 * len(problems)
    for one in restated:
        if one.form:
            assert int(one.problem.answer) == sum(one.values.values())
            assert one.problem.question.startswith(problems_question(one, problems))


def problems_question(one, problems):
    by_id = {problem.id: problem for problem in problems}
    return by_id[one.problem.meta["original_id"]].question.rstrip()
