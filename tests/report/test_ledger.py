"""The ledger: every group accounted for once, and what a broken or foreign one is told."""

import json
import re
from pathlib import Path

import pytest

from command_line import dapo
from dapo.errors import DataError
from dapo.report.answers import BAD, PLAIN, went
from dapo.report.ledger import Entry, Step, balance, balance_of_run, ledger_line, rows_of
from dapo.report.load import load_run

TRAINED, DROPPED = ("trained", 4, 40, 2, 7), ("all_wrong", 4, 20, 0, 7)


def entry(problem: str, visit: int, fate: str, *counts: int) -> Entry:
    return Entry(problem, visit, fate, *counts)


def steps(*groups: list[Entry]) -> list[Step]:
    return [Step(number, entries) for number, entries in enumerate(groups, 1)]


def test_a_group_may_wait_and_come_again_and_ends_once():
    found = balance(
        steps([entry("v", 0, "trained", 2, 6, 1, 0)]),
        steps(
            [entry("a", 0, *TRAINED), entry("b", 0, "in_flight"), entry("c", 0, "returned")],
            [entry("b", 0, "carried", 4, 8, 1, 7), entry("c", 0, *DROPPED), entry("v", 1, "returned")],
            [entry("b", 0, *TRAINED), entry("a", 1, "held", 4, 8, 4, 8)],
        ),
        skips_visits=False,
    )
    assert found.faults == []
    assert found.n_returns == 2
    counted = {row.fate: (row.groups, row.tokens, row.accuracy) for row in rows_of(found)}
    assert counted == {
        "trained": (3, 86 / 10, 5 / 10),  # v, a and b: 6 + 40 + 40 tokens in 2 + 4 + 4 responses
        "all_wrong": (1, 5.0, 0.0),
        "held": (1, 2.0, 1.0),
        "returned": (1, None, None),
    }


@pytest.mark.parametrize(
    ("later", "says"),
    [
        ([entry("a", 0, *DROPPED), entry("b", 0, *TRAINED)], "step 2: problem a, visit 0: .*but before: trained on"),
        ([entry("b", 0, *TRAINED), entry("b", 0, "carried")], r"but before: trained on"),
        ([entry("b", 0, "in_flight"), entry("b", 0, "in_flight")], r"but before: still being generated"),
        ([entry("c", 0, *TRAINED)], "step 2: problem b, visit 0: lost; before: still being generated"),
        ([entry("b", 0, *TRAINED), entry("a", 2, *TRAINED)], "problem a, visit 1: never sampled"),
        ([entry("b", 0, *TRAINED), entry("c", 1, "returned")], "problem c, visit 0: never sampled"),
    ],
)
def test_what_is_lost_or_used_twice_is_named(later: list[Entry], says: str):
    first = [entry("a", 0, *TRAINED), entry("b", 0, "in_flight")]
    found = balance([], steps(first, later), skips_visits=False)
    assert len(found.faults) == 1
    assert re.search(says, found.faults[0])
    passed_over = balance([], steps(first, later), skips_visits=True).faults
    assert passed_over == ([] if "never sampled" in says else found.faults)


FIRST = [entry("a", 0, *TRAINED), entry("b", 0, "in_flight"), entry("c", 0, "returned")]
SECOND = [entry("b", 0, *TRAINED), entry("c", 0, *DROPPED), entry("d", 0, *TRAINED)]


def test_every_prompt_taken_from_the_order_is_named():
    value = [Step(1, [entry("v", 0, *TRAINED)], (0, 1))]
    found = balance(value, [Step(1, FIRST, (1, 3)), Step(2, SECOND, (3, 5)), Step(3, [], (5, 5))], skips_visits=False)
    assert found.faults == []


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        ([(0, 2), (62, 64)], "step 2: begins after 62 prompts of the order, .* ended after 2: 60 never sampled"),
        ([(0, 2), (1, 3)], "step 2: begins after 1 prompts of the order, .* ended after 2: 1 sampled again"),
        ([(7, 9), (9, 11)], "step 1: begins after 7 prompts .* ended after 0: 7 never sampled"),
        ([(0, 3), (3, 5)], "step 1: took 3 prompts from the order and names 2"),
        ([(0, 2), (2, 3)], "step 2: took 1 prompts from the order and names 2"),
    ],
)
def test_prompts_that_the_order_passed_and_no_step_names_are_told(orders: list[tuple[int, int]], says: str):
    lines = [Step(number, groups, at) for number, groups, at in zip((1, 2), (FIRST, SECOND), orders, strict=True)]
    found = balance([], lines, skips_visits=False)
    assert len(found.faults) == 1
    assert re.search(says, found.faults[0])
    passed_over = balance([], lines, skips_visits=True).faults
    assert passed_over == ([] if "took 3" in says else found.faults)  # selection may pass over a prompt


def test_after_lines_of_an_earlier_version_the_order_is_checked_from_the_first_that_tells_it():
    lines = [Step(1, FIRST), Step(2, SECOND, (40, 42)), Step(3, [], (43, 43))]
    assert [fault[:6] for fault in balance([], lines, skips_visits=False).faults] == ["step 3"]


def test_the_ledger_of_another_run_with_as_many_steps_is_refused(tmp_path: Path):
    run = run_folder(tmp_path / "run", line(1, *FIRST), line(2, *SECOND))
    counted = [{"step": 1, "sampling/prompts_tried": 2}, {"step": 2, "sampling/prompts_tried": 2}]
    assert balance_of_run(run, skips_visits=False, metrics=counted).faults == []
    counted[1]["sampling/prompts_tried"] = 3
    with pytest.raises(DataError, match=r"names 2 new prompts in step 2, metrics\.jsonl 3: the files of two runs"):
        balance_of_run(run, skips_visits=False, metrics=counted)


@pytest.mark.parametrize(
    ("numbers", "done", "says"),
    [
        ([1, 2, 1], 0, "step 1 comes again after step 2: two runs wrote into one folder"),
        ([1, 1], 0, "step 1 comes again after step 1"),
        ([4, 5], 0, "begins with step 4: the steps before it were run by a version of dapo without a ledger"),
        ([1, 3], 0, "step 3 follows step 1: lines are lost"),
        ([1, 2], 3, "ends with step 2, metrics.jsonl with 3: lines of it are lost, or these are the files of two runs"),
        ([1, 2, 3, 4], 2, "ends with step 4, metrics.jsonl with 2"),
    ],
)
def test_steps_that_are_not_those_of_one_run_are_refused(tmp_path: Path, numbers: list[int], done: int, says: str):
    run = run_folder(tmp_path / "run", *map(line, numbers))
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n + 1}}}\n' for n in range(done)))
    answer = dapo("ledger", str(run))
    assert answer.returncode == 2
    assert f"DataError: ledger.jsonl: {says}" in answer.stderr
    assert "keep one run to a folder" in answer.stderr
    assert went(load_run(run)).answer == "Cannot be read"


def test_a_run_killed_between_its_ledger_and_its_metrics_has_a_step_more_there(tmp_path: Path):
    run = run_folder(tmp_path / "run", line(1), line(2))
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert dapo("ledger", str(run)).returncode == 0


# ------------------------------------------------------------------ dapo ledger


def run_folder(path: Path, *lines: str, config: str = "") -> Path:
    path.mkdir()
    (path / "config.toml").write_text(f"preset = 'dapo'\n{config}")
    (path / "ledger.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return path


def line(step: int, *entries: Entry) -> str:
    """As an earlier version wrote it, without its place in the order."""
    written = ledger_line(step, entries, (0, 0))
    del written["order"]
    return json.dumps(written)


def test_the_command_shows_each_fate_and_says_that_it_balances(tmp_path: Path):
    run = run_folder(tmp_path / "run", line(1, entry("a", 0, *TRAINED), entry("b", 0, "returned")))
    answer = dapo("ledger", str(run))
    assert answer.returncode == 0, answer.stderr
    assert re.search(r"1 +trained on +10\.0 +0\.500", answer.stdout)
    assert (
        "1 were sampled and not needed: 0 of them have been sampled again, 1 are next (in the table)." in answer.stdout
    )
    assert "OK: each of 2 groups is accounted for exactly once" in answer.stdout
    told = json.loads(dapo("ledger", str(run), "--json").stdout)
    assert (told["balanced"], told["not_used"], told["resampled"], told["faults"]) == (True, 1, 0, [])
    assert told["fates"][0] == {"fate": "trained", "groups": 1, "tokens": 10.0, "accuracy": 0.5}


def test_a_group_counts_as_resampled_once_a_later_step_has_it(tmp_path: Path):
    returned = (entry("b", 0, "returned"), entry("c", 0, "returned"))
    again = (entry("b", 0, *TRAINED), entry("c", 0, "returned"))  # c is resampled, and not used a second time
    run = run_folder(tmp_path / "run", line(1, *returned), line(2, *again))
    assert (
        "3 were sampled and not needed: 2 of them have been sampled again, 1 are next (in the table)."
        in dapo("ledger", str(run)).stdout
    )


def test_a_ledger_that_does_not_balance_ends_with_1_and_names_the_groups(tmp_path: Path):
    lost = [entry(f"p{i}", 0, "carried", 4, 8, 1, 0) for i in range(12)]
    run = run_folder(tmp_path / "run", line(1, *lost), line(2))
    answer = dapo("ledger", str(run))
    assert answer.returncode == 1
    assert "groups were lost or used twice: " in answer.stderr
    assert "problem p0, visit 0: lost" in answer.stderr
    assert "and 2 more" in answer.stderr
    assert len(json.loads(dapo("ledger", str(run), "--json").stdout)["faults"]) == 12


def test_gaps_are_no_loss_where_problems_may_be_passed_over(tmp_path: Path):
    gap = line(1, entry("a", 3, *TRAINED))
    assert dapo("ledger", str(run_folder(tmp_path / "a", gap))).returncode == 1
    for name, key in (("b", "predictive = true"), ("c", "retire_above = 0.9")):
        run = run_folder(tmp_path / name, gap, config=f"[sampling]\n{key}\n")
        assert dapo("ledger", str(run)).returncode == 0


@pytest.mark.parametrize(
    "torn",
    [
        '{"step": 2, "gro',
        "[]",
        '{"step": "2", "groups": []}',
        '{"step": 2, "groups": [["a", 0, "eaten"]]}',
        '{"step": 2, "groups": [["a", "0", "trained"]]}',
        '{"step": 2, "groups": [["a", 0, "trained", 1, 2, 3, 4, 5]]}',
        '{"step": 2, "groups": [["a", 0, "trained", 1.5]]}',
        '{"step": 2, "groups": 3}',
        '{"step": 2, "groups": [], "order": [1]}',
        '{"step": 2, "groups": [], "order": [0, 1, 2]}',
        '{"step": 2, "groups": [], "order": [3, 2]}',
        '{"step": 2, "groups": [], "order": [0, 2.0]}',
        '{"step": 2, "groups": [], "order": 0}',
    ],
)
def test_a_torn_or_foreign_line_is_named(tmp_path: Path, torn: str):
    run = run_folder(tmp_path / "run", line(1), torn)
    answer = dapo("ledger", str(run))
    assert answer.returncode == 2
    assert "ledger.jsonl, line 2: not a step of a ledger" in answer.stderr
    assert "dapo resume" in answer.stderr


def test_a_run_of_before_is_told_so(tmp_path: Path):
    run = run_folder(tmp_path / "run")
    (run / "ledger.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no ledger\.jsonl.*an earlier version"):
        balance_of_run(run, skips_visits=False)
    assert dapo("ledger", str(run)).returncode == 2
    assert dapo("ledger", str(tmp_path / "nothing")).returncode == 2


def test_the_report_says_where_the_prompts_went(tmp_path: Path):
    run = run_folder(tmp_path / "run", line(1, entry("a", 0, *TRAINED), entry("b", 0, *DROPPED)))
    answer = went(load_run(run))
    assert (answer.answer, answer.tone) == ("50% trained on", PLAIN)
    assert "trained on 1 (10 tokens per response); dropped: all wrong 1 (5 tokens" in answer.detail
    assert answer.fractions == [("trained on", 0.5), ("dropped: all wrong", 0.5)]
    (run / "ledger.jsonl").write_text(line(2) + "\n")
    assert went(load_run(run)).tone == BAD
    (run / "ledger.jsonl").write_text("torn")
    assert went(load_run(run)).answer == "Cannot be read"
    (run / "ledger.jsonl").write_text("")
    assert went(load_run(run)).answer == "Not measured"
