"""A group on the terminal: readable, and a response cannot drive the terminal."""

import io
from pathlib import Path

import pytest
from fake_runs import byte_level, metrics, row, save_tokenizer, write_rollouts, write_run
from rich.console import Console

from dapo.errors import DataError
from dapo.report.terminal import HEATS, print_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", metrics(10), every=5)
    pieces = save_tokenizer(folder, byte_level())
    for step in (5, 10):
        rows = [
            row(pieces, f"\x1b]0;owned\x07 \x1b[2J the answer \u202e {i}", problem=f"p{step}", index=i)
            for i in range(2)
        ]
        rows[1] |= {
            "verdict": "WRONG",
            "reward": -1.5,
            "reward_raw": -1.0,
            "reward_overlong": -0.5,
            "stop_reason": "LENGTH",
        }
        rows[0]["clip"][2] = 1
        write_rollouts(folder, step, rows)
    return folder


def printed(run: Path, **options) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=120, force_terminal=True, color_system="truecolor", highlight=False)
    print_run(run, **({"problem": None, "step": None, "heat": "clipped"} | options), console=console)
    return stream.getvalue()


def test_a_group_is_shown_with_verdict_parts_and_stop_reason(run: Path):
    text = printed(run, problem="p5")
    for part in (
        "What is p5?",
        "1 of 2 correct",
        "CORRECT",
        "WRONG",
        "verdict -1.00, overlong -0.50",
        "LENGTH",
        "answer 42",
    ):
        assert part in text


@pytest.mark.parametrize("heat", HEATS)
def test_a_response_cannot_drive_the_terminal(run: Path, heat: str):
    text = printed(run, problem="p10", heat=heat)
    assert "\x1b]0;" not in text
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "U+001B" in text
    assert "U+202E" in text


def test_without_a_problem_the_answers_and_the_problems_are_listed(run: Path):
    text = printed(run)
    assert "Did it learn?" in text
    assert "p10" in text
    assert "p5" in printed(run, step=5)


def test_the_start_of_an_id_is_enough_and_a_wrong_one_is_refused(run: Path):
    assert "What is p10?" in printed(run, problem="p1")
    with pytest.raises(DataError, match="no recorded step has it"):
        printed(run, problem="q")
    with pytest.raises(DataError, match="Recorded steps: 5, 10"):
        printed(run, problem="p5", step=7)
    with pytest.raises(DataError, match="does not have it"):
        printed(run, problem="p5", step=10)
    with pytest.raises(DataError, match="unknown colouring"):
        printed(run, problem="p5", heat="loudness")
