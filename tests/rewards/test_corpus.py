"""The labelled corpus: formatting never decides, tricks never win, and nothing takes long."""

import pytest
from corpus import ALL_HOSTILE as HOSTILE
from corpus import CASES

from dapo.rewards import VerifierPool
from dapo.types import Judgement, Verdict


@pytest.fixture(scope="module")
def pool():
    with VerifierPool("math", workers=2) as pool:
        pool.judge_all([("Answer: \\sqrt{8}", "2\\sqrt{2}")] * 2)  # start the workers
        yield pool


@pytest.fixture(scope="module")
def labelled(pool: VerifierPool) -> list[Judgement]:
    return pool.judge_all([(response, answer) for response, answer, _ in CASES])


@pytest.fixture(scope="module")
def hostile(pool: VerifierPool) -> list[Judgement]:
    return pool.judge_all(HOSTILE)


def test_labelled_responses_get_their_label(labelled: list[Judgement]):
    wrong = [
        f"{response[-80:]!r} against {answer!r}: {judgement.verdict}, expected {expected}"
        for (response, answer, expected), judgement in zip(CASES, labelled, strict=True)
        if judgement.verdict != expected
    ]
    assert not wrong, "\n".join(wrong)
    assert len(CASES) > 650


def test_hostile_responses_are_never_correct(hostile: list[Judgement]):
    wrong = [
        f"{response[:80]!r} against {answer!r}: {judgement.verdict} {judgement.message}"
        for (response, answer), judgement in zip(HOSTILE, hostile, strict=True)
        if judgement.verdict in (Verdict.CORRECT, Verdict.CRASH)
    ]
    assert not wrong, "\n".join(wrong)
    assert len(HOSTILE) > 450


def test_no_verdict_takes_more_than_its_limit(labelled: list[Judgement], hostile: list[Judgement]):
    assert max(judgement.seconds for judgement in [*labelled, *hostile]) < 2.0


@pytest.mark.slow
def test_rewards_are_plus_and_minus_one(pool: VerifierPool):
    right, wrong = pool.judge_all([("Answer: 42", "42"), ("Answer: 41", "42")])
    assert (right.value, wrong.value) == (1.0, -1.0)  # DAPO eq. 7
    assert (right.accuracy, wrong.accuracy) == (1, 0)
    assert (right.extracted, right.reference) == ("42", "42")
