"""What `gym:TASK` says, and what of its scoring needs no reasoning-gym: expressions, answers, the guards."""

from fractions import Fraction

import pytest

from dapo.config import load_recipe
from dapo.data.sources import find_source
from dapo.errors import DataError
from dapo.rewards import Task, VerifierPool
from dapo.rewards.gym import expression, score
from dapo.rewards.gym.names import HELD_OUT, TRAIN, parse
from dapo.rewards.verifiers import reference_error
from dapo.trainer.trust import code_named

COUNTDOWN = {"gym": {"name": "gym:countdown", "index": 0, "digest": "", "numbers": [6, 61, 94, 4], "target": 309}}
HOSTILE = [
    "__import__('os').system('true')",
    "9**9**9",
    "(" * 5_000 + "1" + ")" * 5_000,
    "-" * 5_000 + "1",
    "\\" * 5_000,
    "1" * 100_000,
    "9" * 13,
    "1/0",
    "4 6",
    "(4",
    "4)",
    "",
    "٤",  # a digit, but none that a program reads
    "1 +",
    "exec('1')",
]


def test_a_name_in_full_is_the_same_for_every_order_of_its_parameters():
    one = parse("gym:countdown?min_numbers=3&size=50&operators=+,-")
    other = parse("gym:countdown?operators=+,-&size=50&min_numbers=3")
    assert one.canonical == other.canonical
    assert one.canonical == "gym:countdown?min_numbers=3&operators=+,-&size=50&seed=0&split=train"
    assert parse(one.canonical) == one  # a plus is a plus
    assert (parse("gym:gcd").split, parse("gym:gcd", split=HELD_OUT).split) == (TRAIN, HELD_OUT)
    assert parse("gym:gcd?split=held-out").size == 200


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gym:", "no name of a task"),
        ("gym:Count Down", "no name of a task"),
        ("gym:../x", "no name of a task"),
        ("gym:gcd?size", "not parameter=value"),
        ("gym:gcd?", "not parameter=value"),
        ("gym:gcd?=3", "not parameter=value"),
        ("gym:gcd?size=0", "size = '0'"),
        ("gym:gcd?size=1e3", "size = '1e3'"),
        ("gym:gcd?size=1000001", "size = '1000001'"),
        ("gym:gcd?seed=-1", "seed = '-1'"),
        ("gym:gcd?size=2&size=3", "size is given twice"),
        ("gym:gcd?split=test", "split = 'test'"),
        ("gym:gcd?bare=yes", "bare = 'yes'"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name: str, why: str):
    with pytest.raises(DataError) as refused:
        parse(name)
    assert name in refused.value.message
    assert why in refused.value.message
    assert refused.value.remedy


def test_without_reasoning_gym_or_in_another_version_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.1.99")
    with pytest.raises(DataError, match=r"gym:gcd: reasoning-gym is 0.1.99 here.*\n.*reasoning-gym==0.1.25"):
        find_source("gym:gcd")


def test_the_verifier_comes_with_the_source_unless_one_is_named():
    def verifier(*overrides: str) -> str:
        return load_recipe("quickstart", ["data.train=gym:gcd", *overrides]).config.rewards.verifier

    assert verifier() == "gym"
    assert verifier("rewards.verifier=math") == "math"
    assert verifier("rewards.verifier=gym-graded") == "gym-graded"
    assert verifier("data.train=gym") == "math"
    assert code_named({"data.train": "gym:gcd", "rewards.verifier": "gym"}) == {}  # a task is no module of somebody's


@pytest.mark.parametrize(
    ("text", "value", "used"),
    [
        ("94*4 - 61 - 6", 309, [94, 4, 61, 6]),
        ("5*(65 + 35)", 500, [5, 65, 35]),
        ("-(3 - 5)*+2", 4, [3, 5, 2]),
        ("7/2*2", 7, [7, 2, 2]),
        ("2-3-4", -5, [2, 3, 4]),
        ("1/3/3", Fraction(1, 9), [1, 3, 3]),
        ("\n 12 ", 12, [12]),
    ],
)
def test_an_expression_has_its_exact_value_and_its_numbers(text: str, value: int, used: list[int]):
    assert expression.value_of(text) == (value, used)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_expression_is_refused_at_once(text: str):
    with pytest.raises(ValueError):  # noqa: PT011 each says it in its own words
        expression.value_of(text)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>94*4 - 61 - 6</answer>", "94*4 - 61 - 6"),
        ("<answer>1</answer> no: <answer>\n1 2\n3 4\n</answer>. Done.", "1 2\n3 4"),
        ("so 3\nAnswer: 94*4 - 61 - 6", "94*4 - 61 - 6"),
        ("thus \\boxed{17}", "17"),
        ("The answer is 17.", "17"),
        ("Answer: **17**", "17"),
        ("<answer>  </answer>", None),
        ("17", None),
        ("", None),
    ],
)
def test_the_answer_stands_in_tags_or_in_the_final_statement(response: str, answer: str | None):
    assert score.answer_in(response) == answer


@pytest.mark.parametrize(
    "text", ["x**3/3 + C", "-3*x**2*y + 2.5", "exp(x)*sin(2*x)/2 - log(x + 1)", "X**2 + C", "sqrt(2)*pi"]
)
def test_plain_formulas_reach_sympys_parser(text: str):
    assert score.may_be_parsed(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "x.__class__",
        "x[0]",
        "'a'*9",
        "lambda: 1",
        "f(x) if x else y",
        "exec(x)",
        "os",
        "x_1",
        "(x := 2)",
        "eval(x)",
        "sin.x",
        "{1}",
        "x,y",
        "x;y",
        "x\\",
        "1" * 13,
        "x" * 1_001,
        "open(x)",
        "x" + " " * 900 + "!",
    ],
)
def test_anything_else_does_not(text: str):
    assert not score.may_be_parsed(text)


def test_countdown_is_scored_by_us_and_needs_no_package():
    right = ["94*4 - 61 - 6", "4*94-(61+6)"]
    wrong = ["94*4 - 61", "94*4 - 61 - 6 - 6 + 6", "309", "94*4 - 61 - 6 = 309", *HOSTILE]
    with VerifierPool("gym", workers=1) as pool, VerifierPool("gym-graded", workers=1) as graded:
        tasks = [Task(f"<answer>{text}</answer>", right[0], None, COUNTDOWN) for text in (*right, *wrong)]
        verdicts = [judgement.verdict.value for judgement in pool.judge_all(tasks)]
        assert verdicts[:2] == ["CORRECT", "CORRECT"]
        assert set(verdicts[2:]) <= {"WRONG", "UNPARSEABLE"}
        values = [(judgement.value, judgement.graded) for judgement in graded.judge_all(tasks[1:3])]
        assert values == [(1.0, False), (-1.0, False)]


def test_a_problem_that_is_not_from_reasoning_gym_has_no_reference_for_its_verifier():
    assert reference_error("7", verifier="gym", meta=COUNTDOWN) is None
    assert reference_error("7", verifier="gym", meta={}) == "it is no problem of reasoning-gym"
    assert reference_error("7", verifier="gym-graded", meta={"gym": "countdown"}) is not None
