"""`dapo bench step`: our side is a real run of fixed work; a peer that is not there is said to be so."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command_line import dapo
from dapo.bench.step import together
from dapo.bench.step_plan import CPU, StepPlan
from dapo.bench.step_sides import DigitFraction, peer_steps, seconds_of
from dapo.bench.trl_peer import sum_of
from dapo.cli.bench import command
from dapo.errors import ConfigError
from dapo.types import Task

PLAN = StepPlan(**CPU, device="cpu", threads=1)
SMALL = [
    "step",
    "--prompts",
    "2",
    "--responses",
    "2",
    "--tokens",
    "20",
    "--steps",
    "3",
    "--hidden",
    "16",
    "--layers",
    "1",
]


def peer(folder: Path, script: str) -> str:
    """An interpreter that runs `script` whatever it is asked for."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_peer_that_hangs_is_ended_with_its_children_and_its_last_words_are_told(tmp_path: Path):
    python = peer(tmp_path, f"echo loading >&2\nsleep 600 &\necho $! > {tmp_path}/child\necho 'graphs: 3 of 40'\nwait")
    row = peer_steps(PLAN, tmp_path, python, minutes=0.1)  # long enough to say so on a busy machine
    assert row == {"settings": "did not run: 0.1 minutes are over; its last words: graphs: 3 of 40"}
    child = Path("/proc") / (tmp_path / "child").read_text().strip() / "stat"
    while child.exists() and child.read_text().split()[2] != "Z":
        time.sleep(0.05)


def test_a_peer_that_fails_is_told_by_its_last_words(tmp_path: Path):
    row = peer_steps(PLAN, tmp_path, peer(tmp_path, "echo 'No module named trl' >&2\necho\nexit 3"), minutes=1)
    assert row == {"settings": "did not run: exit 3; its last words: No module named trl"}


def test_a_peers_figures_are_found_among_what_else_it_says(tmp_path: Path):
    line = json.dumps({"trl": "TRL 9", "marks": [[0, 0], [5, 5], [7, 6], [9, 7]], "settings": "all of it"})
    row = peer_steps(PLAN, tmp_path, peer(tmp_path, f"echo hello\necho '{line}'\necho bye >&2"), minutes=1)
    assert row == {"wall": [2, 2], "cpu": [1, 1], "first_s": 5, "settings": "TRL 9: all of it"}


def test_our_side_trains_and_a_missing_peer_is_named():
    no_trl = [*SMALL, "--peer-python", "/nowhere/python", "--sides", "dapo,trl", "--rounds", "2", "--json"]
    answer = dapo("bench", *no_trl)
    figures = json.loads(answer.stdout.splitlines()[-1])
    ours, trl = figures["sides"]["dapo"], figures["sides"]["trl"]
    assert ours["seconds"] > 0
    assert ours["cpu_seconds"] > 0
    assert len(ours["cpu_seconds_by_round"]) == 2
    assert "did not run" in trl["settings"]
    assert "seconds" not in trl


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "1"], "not counted"),
        (["--responses", "1"], "no baseline"),
        (["--sides", "verl"], "no side verl"),
        (["--tokens", "4"], "overlong"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], words: str):
    result = CliRunner().invoke(command, [*SMALL, *arguments])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_medians_are_over_all_rounds_and_leave_their_first_steps_out():
    marks = [(0.0, 0.0), (9.0, 9.0), (10.0, 9.5), (12.0, 10.5), (15.0, 12.0)]
    slow = [(a * 10, b * 10) for a, b in marks]
    row = together([seconds_of(marks)])
    assert row == {"seconds": 2.0, "cpu_seconds": 1.0, "first_s": 9.0, "cpu_seconds_by_round": [1.0]}
    row = together([seconds_of(marks), seconds_of(slow)])
    assert (row["seconds"], row["cpu_seconds"]) == (6.5, 3.25)  # of 1 2 3 10 20 30, and of half of these
    assert row["cpu_seconds_by_round"] == [1.0, 10.0]
    assert together([seconds_of(marks), {"settings": "did not run"}]) == {"settings": "did not run"}


def test_the_judge_grades_by_the_share_of_digits():
    judge = DigitFraction()
    tickets = [judge.submit(Task(text, "")) for text in ("12ab", "123", "")]
    assert [judgement.value for judgement in judge.wait(tickets).values()] == [0.5, 1.0, 0.0]


def test_prompts_are_the_same_every_time_and_of_one_length():
    assert {len(sum_of(i)) for i in range(100)} == {8}
    assert sum_of(7) == sum_of(7) != sum_of(8)
