"""The example problem set: answers are right, and no held-out pair is trained on in either order."""

from pathlib import Path

import pytest

from dapo.data.problems import load_problems

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def pairs(name: str) -> set[tuple[str, frozenset[str]]]:
    problems = load_problems(f"examples.arithmetic:{name}")
    return {(problem.source, frozenset(problem.id.split(":")[1].split(","))) for problem in problems}


def test_training_and_test_pairs_are_disjoint():
    assert not pairs("train_problems") & pairs("test_problems")


@pytest.mark.parametrize("name", ["train_problems", "test_problems", "test_problems_as_text", "test_questions"])
def test_answers_are_the_values_of_the_last_question(name: str):
    problems = load_problems(f"examples.arithmetic:{name}")
    assert len(problems) >= 250
    for problem in problems:
        a, sign, b = problem.question.rpartition("What is ")[2].partition("?")[0].split()
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert str(value) == problem.answer
