"""The games, the calculator and the second try, played."""

from pathlib import Path

import pytest

from dapo.environments.calculator import Calculator
from dapo.environments.guess import Guess
from dapo.environments.protocol import Turn
from dapo.environments.second_try import SecondTry
from dapo.environments.wordle import WORDS, Wordle, marks
from dapo.errors import ConfigError
from dapo.quickstart.tokenizer import build_tokenizer
from dapo.types import Problem, Score

PROBLEM = Problem("p", "What is 6 times 7?", "42")
RIGHT, WRONG = Score(1.0, correct=True), Score(-1.0, correct=False)


@pytest.mark.parametrize("seed", range(20))
def test_guess_is_won_by_halving(seed: int):
    game = Guess()
    game.start(PROBLEM, seed)
    low, high, turn = 1, 100, Turn("begin")
    while turn.score is None:
        middle = (low + high) // 2
        turn = game.respond(f"Not 3.5, nor -7. I say {middle}.")
        low, high = (middle + 1, high) if turn.text == "Higher." else (low, middle - 1)
    assert turn.score == RIGHT


def test_guess_is_lost_after_its_tries_and_a_turn_without_a_number_is_one():
    game = Guess()
    game.start(PROBLEM, 0)
    turns = [game.respond(said) for said in ("0", "what?", "", "1e99", "٣", "0.5", "-1")]
    assert [turn.score for turn in turns] == [None] * 6 + [WRONG]
    assert [turn.failed for turn in turns[:3]] == [False, True, True]
    assert turns[0].text == "Higher."


def test_a_seed_is_a_game():
    words = []
    for seed in (1, 1, 2):
        game = Wordle()
        game.start(PROBLEM, seed)
        words.append(game._word)
    assert words[0] == words[1] != words[2]


@pytest.mark.parametrize(
    ("guess", "word", "expected"),
    [
        ("crane", "crane", "GGGGG"),
        ("nacre", "crane", "YYYYG"),
        ("light", "crane", "-----"),
        ("eerie", "crane", "--Y-G"),  # the e in its place is used up; the r stands elsewhere
        ("allee", "apple", "GY--G"),  # one l in the word: the first of the two is marked
        ("ppppp", "apple", "-GG--"),
        ("paper", "apple", "YYGY-"),
    ],
)
def test_marks(guess: str, word: str, expected: str):
    assert marks(guess, word) == expected


def test_wordle():
    game = Wordle()
    game.start(PROBLEM, 3)
    word = game._word
    assert len(word) == 5
    assert len(set(WORDS)) == len(WORDS) > 80
    assert {len(one) for one in WORDS} == {5}
    assert game.respond("[zzzzz] is a first guess, being there").text == "zzzzz -----, 5 left."
    assert game.respond("no").failed
    assert game.respond(f"I take [{word.upper()}] at last").score == RIGHT
    lost = Wordle()
    lost.start(PROBLEM, 3)
    turns = [lost.respond("[zzzzz]") for _ in range(6)]
    assert [turn.score for turn in turns] == [None] * 5 + [WRONG]
    assert not any(word in turn.text for turn in turns)


@pytest.mark.parametrize(
    ("said", "turn"),
    [
        ("=17+8-6\nWait", Turn("\n=19\n", called=True)),
        ("=17+8-6\nWait\n", Turn("=19\n", called=True)),
        ("=27-8\n=29\nWait", Turn("\n=19\n", called=True)),  # its last number is what the doubt is about
        ("=3-8\n=-5\nWait", Turn("\n=-5\n", called=True)),  # a sign is no operation
        ("=3*(2+4)/4\nWait", Turn("\n=9/2\n", called=True)),
        ("Wait", Turn("\n=?\n", called=True, failed=True)),
        ("=4/0\nWait", Turn("\n=?\n", called=True, failed=True)),
        ("=9**9**9\nWait", Turn("\n=?\n", called=True, failed=True)),
        ("=__import__('os')+1\nWait", Turn("\n=?\n", called=True, failed=True)),
        ("=" + "(" * 5000 + "1+1\nWait", Turn("\n=?\n", called=True, failed=True)),
        ("=17+2\n=19\nAnswer: 19", Turn()),
        ("Wait\n=19\nAnswer: 19", Turn()),
        ("", Turn()),
    ],
)
def test_calculator(said: str, turn: Turn):
    calculator = Calculator()
    assert calculator.start(PROBLEM, 0) is None
    assert calculator.respond(said) == turn


def test_calculator_works_out_the_question_until_the_model_has_written_a_line():
    calculator = Calculator()
    calculator.start(Problem("1", "22+5-8=?", "19"), 0)
    said = ("Wait", "=22-8\nWait", "Wait")
    assert [calculator.respond(one).text for one in said] == ["\n=19\n", "\n=14\n", "\n=14\n"]


def test_the_bundled_model_can_write_a_call_and_read_its_answer():
    tokenizer = build_tokenizer()
    for text in ("=17+8-6\n", *Calculator.stop, "\n=-19\n", "\n=?\n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert all(len(tokenizer(stop).input_ids) == 1 for stop in Calculator.stop)


def test_a_wrong_answer_may_be_corrected_once():
    for second, score in (("\\boxed{42}", RIGHT), ("\\boxed{43}", WRONG), ("I do not know.", WRONG)):
        environment = SecondTry()
        assert environment.start(PROBLEM, 0) is None
        first = environment.respond("\\boxed{41}")
        assert first == Turn(SecondTry.again)
        assert PROBLEM.answer not in first.text
        assert environment.respond(second).score == score


def test_a_right_answer_ends_it():
    environment = SecondTry()
    environment.start(PROBLEM, 0)
    assert environment.respond("\\boxed{42}").score == RIGHT


def test_the_second_try_is_judged_by_the_problems_verifier():
    problem = Problem("p", "Which letter?", "forty two", verifier="exact")
    environment = SecondTry()
    environment.start(problem, 0)
    assert environment.respond("42") == Turn(SecondTry.again)
    assert environment.respond("forty two").score == RIGHT
    gym = Problem("p", "?", "7", meta={"gym": {"name": "chain_sum", "index": 0, "digest": ""}})
    environment.start(gym, 0)
    assert environment._verifier.name == "gym"


def test_a_graded_answer_is_neither_wrong_nor_tried_again(tmp_path: Path):
    (tmp_path / "half.py").write_text("def reward(response, answer, meta): return 0.5\n")
    environment = SecondTry()
    environment.start(Problem("p", "?", "42", verifier=f"{tmp_path}/half.py:reward"), 0)
    assert environment.respond("41") == Turn(score=Score(0.5))


def test_a_judge_cannot_be_asked_within_an_episode():
    with pytest.raises(ConfigError, match=r"judge:rubric\.toml"):
        SecondTry().start(Problem("p", "?", "", verifier="judge:rubric.toml"), 0)
