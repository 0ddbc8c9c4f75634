"""Environments in workers: they keep their state, are made again if it is lost, and trouble is one episode's alone."""

from collections.abc import Iterator
from typing import Any

import pytest

from dapo.environments.conversation import Answer, Conversation
from dapo.environments.pool import EnvironmentPool
from dapo.errors import ConfigError
from dapo.types import Problem, Verdict

COUNTING = "odd_environments:Counting"
PROBLEM = Problem("7", "a riddle", "", environment=COUNTING, turns=(("user", "a riddle"),))


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    made = EnvironmentPool([COUNTING, "odd_environments:Forgetful"], workers=1, seconds=0.5)
    yield made
    made.close()


def ask(pool: EnvironmentPool, name: str, *said: str, answers: tuple[Answer, ...] = (), **problem: Any) -> Answer:
    asked = Problem(**{"id": "7", "question": "a riddle", "answer": "", "environment": COUNTING, **problem})
    ticket = pool.ask(Conversation(name, asked, 5, said, answers))
    return pool.wait([ticket])[ticket]


def talk(pool: EnvironmentPool, name: str, *said: str) -> tuple[Answer, ...]:
    answers: tuple[Answer, ...] = ()
    for n in range(1, len(said) + 1):
        answers += (ask(pool, name, *said[:n], answers=answers),)
    return answers


def test_a_class_says_when_it_answers_and_what_it_adds_to_the_prompt(pool: EnvironmentPool):
    assert pool.answer_after_ticks(COUNTING) == 2
    assert pool.answer_after_ticks("odd_environments:Forgetful") == 4
    assert pool.stop(COUNTING) == ()
    assert pool.stop("odd_environments:Forgetful") == (("", "w9"), ("<call>", "</call>"))
    assert pool.opening(PROBLEM, 5) == "Seed 5 of a riddle."


def test_an_environment_keeps_its_state_from_turn_to_turn(pool: EnvironmentPool):
    first, second, third = talk(pool, "a", "one", "no", "three")
    assert (first.text, second.text) == ("5: one", "5: one no")
    assert (first.called, first.failed, second.failed) == (True, False, True)
    assert third.is_over
    assert third.judgement is not None
    assert third.judgement.value == 0.5
    assert third.judgement.graded
    assert third.judgement.parts == {"words": 3.0}
    (over,) = talk(pool, "b", "over")
    assert over.is_over
    assert over.judgement is None


@pytest.mark.parametrize(
    ("said", "verdict", "why"),
    [
        ("hang", Verdict.TIMEOUT, "0.5 s of CPU time"),
        ("die", Verdict.CRASH, "SIGKILL"),
        ("long", Verdict.CRASH, "10,000,000 characters"),
        ("raise", Verdict.CRASH, "not today"),
        ("odd", Verdict.CRASH, "not a dapo.environments.protocol.Turn"),
        ("infinite", Verdict.CRASH, "the reward is inf"),
    ],
)
def test_trouble_ends_its_own_episode_and_no_other(pool: EnvironmentPool, said: str, verdict: Verdict, why: str):
    """The other one is made again where its worker is gone."""
    answers = talk(pool, "well", "one")
    (failed,) = talk(pool, said, said)
    assert failed.judgement is not None
    assert failed.judgement.verdict is verdict
    assert failed.judgement.value == -1.0
    assert why in failed.judgement.message
    assert ask(pool, "well", "one", "two", answers=answers).text == "5: one two"
    pool.end("well")
    pool.end(said)


def test_an_episode_begins_anew_under_its_old_name(pool: EnvironmentPool):
    """As it does where a step is rolled back."""
    talk(pool, "c", "one", "two")
    assert talk(pool, "c", "four", "five")[-1].text == "5: four five"


def test_one_that_answers_otherwise_when_it_is_replayed_is_found_and_named(pool: EnvironmentPool):
    told: list[str] = []
    pool.on_notice = told.append
    kind = {"environment": "odd_environments:Forgetful"}
    before = (Answer("I am nobody."),)
    failed = ask(pool, "d", "one", "two", answers=before, **kind)
    assert failed.judgement is not None
    assert failed.judgement.verdict is Verdict.CRASH
    assert "answered otherwise" in told[0]
    assert "odd_environments:Forgetful" in told[0]
    assert "problem 7, turn 1" in told[0]
    assert "I am nobody." in told[0]


def test_nobody_waits_for_an_episode_that_was_given_up(pool: EnvironmentPool):
    pool.ask(Conversation("e", PROBLEM, 5, ("hang",)))
    pool.end("e")
    assert talk(pool, "f", "one")[0].text == "5: one"


def test_others_do_not_wait_behind_one_that_sleeps():
    with_two = EnvironmentPool([COUNTING], workers=2, seconds=5)
    try:
        (first,) = talk(with_two, "quick", "pid")
        home = next(desk for desk in with_two._all_desks() if "quick" in desk.names)
        home.n_out, home.last_reply = 1, 0.0  # as if it had been silent for long
        said = ("pid", "pid")
        moved = ask(with_two, "quick", *said, answers=(first,))
        assert moved.judgement is not None  # it is made again elsewhere, and this one tells by its process
        assert "answered otherwise" in moved.judgement.message
        assert len(with_two.worker_pids()) == 2
    finally:
        with_two.close()
    assert with_two.worker_pids() == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("odd_environments:Missing", "Missing"),
        ("no_such_module_here:Class", "No module named"),
        ("odd_environments:NO_CLASS", "no class with the methods"),
        ("odd_environments:Impatient", "answer_after_ticks is -1"),
        ("odd_environments:Endless", "not some strings or pairs of strings"),
    ],
)
def test_what_is_no_environment_is_refused_at_the_start(name: str, why: str):
    with pytest.raises(ConfigError, match=r"data\.environment") as refused:
        EnvironmentPool([name], workers=1)
    assert why in refused.value.message
    assert name in refused.value.message
