"""The embedded task: right answers, graded levels, two sides that never meet."""

import ast
import random
from dataclasses import replace

import pytest

from dapo.quickstart.corpus import CAREFUL, Habits, draw_document, write_response
from dapo.quickstart.task import (
    LARGEST,
    LEVELS,
    Expression,
    draw_expression,
    eval_problems,
    is_for_evaluation,
    normalise,
    train_problems,
)
from dapo.types import Problem


@pytest.fixture(scope="module", name="TRAIN")
def train_set() -> list[Problem]:
    return train_problems()


@pytest.fixture(scope="module", name="EVAL")
def eval_set() -> list[Problem]:
    return eval_problems()


def python_value(problem: Problem) -> int:
    """The value by Python's own grammar and arithmetic, not ours."""
    tree = ast.parse(problem.question.removesuffix("=?"), mode="eval")
    assert all(isinstance(node, ast.Expression | ast.BinOp | ast.Constant | ast.operator) for node in ast.walk(tree))
    value = eval(compile(tree, "question", "eval"))
    assert isinstance(value, int)
    return value


def test_sizes_and_levels(TRAIN, EVAL):
    assert len(TRAIN) == 3000
    assert len(EVAL) == 200
    for problems in (TRAIN, EVAL):
        levels = [problem.meta["level"] for problem in problems]
        assert {levels.count(level.number) for level in LEVELS} == {len(problems) / len(LEVELS)}
        assert levels != sorted(levels), "levels come mixed"


def test_answers_are_right(TRAIN, EVAL):
    assert all(python_value(problem) == int(problem.answer) for problem in TRAIN + EVAL)


def test_the_same_seed_gives_the_same_problems(TRAIN, EVAL):
    assert train_problems(0) == TRAIN
    assert eval_problems(0) == EVAL
    assert eval_problems(3) != EVAL


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_training_and_evaluation_are_disjoint_for_every_pair_of_seeds(seed: int):
    train = {normalise(problem.question) for problem in train_problems(seed)}
    evaluation = {normalise(problem.question) for problem in eval_problems(seed + 1)}
    assert not train & evaluation
    assert len(train) == 3000
    assert len(evaluation) == 200


def test_identity_is_the_question(TRAIN, EVAL):
    by_id = {problem.id: normalise(problem.question) for problem in TRAIN + EVAL}
    assert len(by_id) == len(TRAIN) + len(EVAL) == len(set(by_id.values()))
    assert normalise(" 12 + 7*3 =?\n") == "12+7*3=?"


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: f"level {level.number}")
def test_a_level_is_what_it_says(level):
    rng = random.Random(0)
    for _ in range(200):
        path = draw_expression(level, rng).path()
        assert max(map(abs, path)) <= LARGEST
        assert (path[-1] < 0) == (level.number == 5)


def test_a_writer_who_minds_everything_is_always_right(EVAL):
    rng = random.Random(0)
    for problem in EVAL:
        numbers = (
            problem.question.removesuffix("=?").replace("-", " - ").replace("+", " + ").replace("*", " * ").split()
        )
        expression = Expression(tuple(map(int, numbers[::2])), tuple(numbers[1::2]))
        response, has_end = write_response(expression, CAREFUL, rng)
        assert has_end
        assert response.endswith(f"\nAnswer: {problem.answer}")
        assert response.count("=") == len(expression.operators)


def test_each_slip_is_the_one_described():
    rng = random.Random(0)

    def last_line(numbers: tuple[int, ...], operators: str, **habits: float) -> str:
        writer = replace(CAREFUL, **habits)
        return write_response(Expression(numbers, tuple(operators)), writer, rng)[0].splitlines()[-1]

    assert last_line((47, 38), "+") == "Answer: 85"
    assert last_line((47, 38), "+", minds_carry=0) == "Answer: 75"
    assert last_line((52, 17), "-", minds_carry=0) == "Answer: 45"
    assert last_line((2, 3, 4), "+*", minds_product=0) == "Answer: 9"
    assert last_line((9, 2, 3), "-+", minds_order=0) == "Answer: 4"
    assert last_line((17, 52), "-", minds_sign=0) == "Answer: 35"


def test_the_corpus_never_holds_an_evaluation_question(EVAL):
    rng = random.Random(0)
    questions = [draw_document(Habits(), rng)[0] for _ in range(2000)]
    assert not any(map(is_for_evaluation, questions))
    assert not {normalise(question) for question in questions} & {normalise(problem.question) for problem in EVAL}
