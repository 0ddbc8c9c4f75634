"""`dapo bench sampling` as a user meets it: a table or JSON, and one message for bad input."""

import json

import pytest

from command_line import Answer, dapo


def bench(*arguments: str) -> Answer:
    return dapo("bench", "sampling", *arguments)


SMALL = ("--prompts-per-step", "2", "--responses", "2", "--concurrency", "8", "--steps", "1")


@pytest.mark.parametrize("engine", ["virtual", pytest.param("local", marks=pytest.mark.slow)])
def test_the_figures_as_json(engine: str):
    answer = bench(*SMALL, "--engine", engine, "--json")
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    assert list(figures["strategies"]) == ["rounds x 1", "rounds x 3", "dapo (stream)", "dapo-fast"]
    assert figures["strategies"]["rounds x 1"]["ratio_to_rounds_x1"] == 1.0
    assert figures["load"]["prompts_per_step"] == 2
    assert all(row["seconds"] > 0 for row in figures["strategies"].values())


def test_the_table_names_what_is_not_the_paper():
    answer = bench(*SMALL)
    assert answer.returncode == 0
    assert "dapo (stream)" in answer.stdout
    assert "dapo-fast is not the paper's algorithm" in answer.stdout


@pytest.mark.parametrize("arguments", [("--engine", "vllm"), ("--steps", "0"), ("--responses", "1")])
def test_bad_input_is_one_message(arguments: tuple[str, ...]):
    answer = bench(*arguments)
    assert answer.returncode == 2
    assert arguments[0] in answer.stderr
    assert "Traceback" not in answer.stderr
