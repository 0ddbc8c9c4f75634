"""Two runs on the same held-out problems: is one better, and is that said only where it can be?"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import evaluation, metrics, write_run

from dapo.report.differences import SHOWN_STEPS, compare, to_json
from dapo.report.load import load_run
from dapo.report.page import write_page
from dapo.report.paired import paired_difference
from dapo.report.rollouts.chunks import parse_script
from dapo.report.terminal import print_differences

P = 400


def made(
    folder: Path, right: dict[int, list[int]], *, k: int = 1, ids: list[str] | None = None, edit: Any = None
) -> Path:
    """A run with these right responses per step and problem."""
    evaluations = [evaluation(step, sum(row) / len(row) / k) for step, row in right.items()]
    write_run(folder, metrics(10), evaluations=evaluations)
    with (folder / "eval_problems.jsonl").open("w") as file:
        for step, row in right.items():
            names = ids or [f"p{at:03}" for at in range(len(row))]
            questions = ["?"] * len(row)
            whole = {"step": step, "set": "held-out", "k": k, "ids": names, "questions": questions, "correct": row}
            file.write(json.dumps(whole | (edit or {})) + "\n")
    return folder


def first(n: int, of: int = P) -> list[int]:
    return [int(at < n) for at in range(of)]


def compared(run: Path, other: Path):
    return compare(load_run(run), load_run(other))


def test_a_gain_on_problems_that_the_other_lacks_is_seen(tmp_path):
    """40 of 400 more, none fewer: +0.1, which problems drawn again cannot make 0."""
    better = made(tmp_path / "better", {0: first(100), 10: first(240)})
    other = made(tmp_path / "other", {0: first(100), 10: first(200)})
    found = compared(better, other)
    assert found.answer == "0.100 above other"
    assert found.tone == "good"
    start, end = found.rows
    assert (start.step, start.difference.value, start.difference.p) == (0, 0, 1)
    assert (end.step, end.other_step, end.avg, end.other_avg) == (10, 10, 0.6, 0.5)
    assert end.difference.value == pytest.approx(0.1)
    assert end.difference == paired_difference(np.array([first(240)], float), np.array([first(200)], float))
    back = compared(other, better)
    assert (back.answer, back.tone) == ("0.100 below better", "bad")


def test_as_many_other_problems_are_no_difference(tmp_path):
    """The same 200 right, and 10 of each run's own: the score is the same, and nothing is claimed."""
    run = made(tmp_path / "a", {10: first(210)})
    other = made(tmp_path / "b", {10: [*first(200, 200), *[0] * 10, *[1] * 10, *[0] * 180]})
    found = compared(run, other)
    assert found.answer == "No significant difference to b"
    assert found.tone == ""
    assert found.rows[-1].difference.low < 0 < found.rows[-1].difference.high


def test_a_small_gain_is_not_called_one(tmp_path):
    """3 of 400 problems more, 2 fewer: p is far from 0.05."""
    base = first(200)
    other = made(tmp_path / "b", {10: base})
    run = made(tmp_path / "a", {10: [0, 0, *base[2:200], 1, 1, 1, *base[203:]]})
    assert compared(run, other).tone == ""


def test_no_p_after_few_steps_or_of_few_problems(tmp_path):
    def told(name: str, step: int, n: int):
        run = made(tmp_path / f"a-{name}", {step: first(200 + n)})
        return compared(run, made(tmp_path / f"b-{name}", {step: first(200)}))

    for name, found in {"short": told("short", 5, 40), "few": told("few", 6, 9)}.items():
        assert (found.tone, to_json(found)["rows"][-1][-1]) == ("", None), name
        assert "no p (" in found.detail
        assert "p = " not in found.detail
    assert told("enough", 6, 10).tone == "good"


def test_runs_of_different_length_are_compared_at_their_ends_and_where_both_stood(tmp_path):
    run = made(tmp_path / "a", {0: first(90), 10: first(200), 20: first(260)})
    other = made(tmp_path / "b", {0: first(90), 10: first(150)})
    assert [(row.step, row.other_step) for row in compared(run, other).rows] == [(0, 0), (20, 10)]


def test_many_evaluations_are_thinned_and_the_end_stays(tmp_path):
    steps = {step: first(100 + step) for step in range(0, 101, 5)}
    rows = compared(made(tmp_path / "a", steps), made(tmp_path / "b", steps)).rows
    assert len(rows) == SHOWN_STEPS + 1
    assert (rows[0].step, rows[-2].step, rows[-1].step) == (0, 95, 100)


def test_problems_are_matched_by_name_and_not_by_place_or_k(tmp_path):
    names = [f"p{at}" for at in range(P)]
    run = made(tmp_path / "a", {10: first(200)}, ids=names)
    other = made(tmp_path / "b", {10: [4 * n for n in reversed(first(200))]}, k=4, ids=names[::-1])
    end = compared(run, other).rows[-1]
    assert (end.difference.value, end.difference.p) == (0, 1)


def test_other_problems_are_not_compared(tmp_path):
    run = made(tmp_path / "a", {10: first(200)})
    other = made(tmp_path / "b", {10: first(200)}, ids=[f"q{at}" for at in range(P)])
    found = compared(run, other)
    assert (found.answer, found.rows) == ("Not compared", ())
    assert "different problems" in found.detail


def test_evaluations_that_were_sampled_differently_are_not_compared(tmp_path):
    greedy = made(tmp_path / "greedy", {10: first(240)}, edit={"sampling": [0.0, 1.0, 0]})
    sampled = made(tmp_path / "sampled", {10: first(200)}, edit={"sampling": [1.0, 1.0, 0]})
    unknown = made(tmp_path / "unknown", {10: first(200)})
    found = compared(greedy, sampled)
    assert (found.answer, found.rows) == ("Not compared", ())
    assert "greedy with eval.temperature = 0.0" in found.detail
    assert "sampled with eval.temperature = 1.0" in found.detail
    assert compared(greedy, unknown).rows, "an old run does not say how it was sampled"


def test_evaluations_before_the_sampling_changed_are_left_out(tmp_path):
    run = made(tmp_path / "a", {0: first(10), 5: first(100), 10: first(240)}, edit={"sampling": [1.0, 1.0, 0]})
    text = (run / "eval_problems.jsonl").read_text().split("\n")
    text[0] = text[0].replace('"sampling": [1.0,', '"sampling": [0.0,')
    (run / "eval_problems.jsonl").write_text("\n".join(text))
    other = made(tmp_path / "b", {0: first(10), 5: first(100), 10: first(200)}, edit={"sampling": [1.0, 1.0, 0]})
    assert [row.step for row in compared(run, other).rows] == [5, 10]


@pytest.mark.parametrize(
    "line",
    [{"ids": []}, {"ids": "abc"}, {"questions": None}, {"correct": [1]}, {"correct": ["x"] * P}, {"k": 0}, {"k": None},
     {"k": "1"}, {"step": None}, {"ids": [None] * P}, {"correct": [float("nan")] * P}],
)  # fmt: skip
def test_a_line_that_somebody_edited_is_left_out(tmp_path, line):
    run = made(tmp_path / "a", {10: first(200)}, edit=line)
    other = made(tmp_path / "b", {10: first(200)})
    for found in (compared(run, other), compared(other, run)):
        assert found.detail == "a has no evaluation, problem by problem."


def test_a_run_without_evaluations_is_not_compared(tmp_path):
    write_run(tmp_path / "a", metrics(3))
    found = compared(tmp_path / "a", made(tmp_path / "b", {10: first(3)}))
    assert found.answer == "Not compared"


def test_graded_rewards_have_no_right_responses_to_compare(tmp_path):
    """Every response counts as not right, whatever its value: that is no finding about the runs."""
    for name, value in (("a", 0.25), ("b", 0.75)):
        made(tmp_path / name, {10: first(0)})
        lines = [json.loads(line) for line in (tmp_path / name / "eval.jsonl").read_text().splitlines()]
        text = "".join(json.dumps(line | {"mean_value": value}) + "\n" for line in lines)
        (tmp_path / name / "eval.jsonl").write_text(text)
    found = compared(tmp_path / "b", tmp_path / "a")
    assert (found.answer, found.rows) == ("Not compared", ())
    assert found.detail.endswith("Mean value at the end: b 0.750, a 0.250.")


def test_page_and_terminal_say_it(tmp_path, capsys):
    runs = [made(tmp_path / name, {0: first(50), 10: first(n)}) for name, n in (("a", 200), ("b", 240), ("c", 200))]
    write_page(*runs, out=tmp_path / "page")
    b, c = parse_script((tmp_path / "page" / "report" / "data.js").read_text())["differences"]
    assert (b["answer"], b["tone"], len(b["rows"])) == ("0.100 above a", "good", 2)
    assert b["rows"][-1][:5] == [10, 10, 0.6, 0.5, pytest.approx(0.1)]
    assert c["tone"] == ""
    print_differences(runs)
    printed = " ".join(capsys.readouterr().out.split())
    assert "0.100 above a" in printed
    assert "Too little data to compare with a" in printed
