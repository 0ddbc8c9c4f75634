"""Rewards in parts: each part on workers of its own; what fails is a failure with the part's name, never a 0."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo.config.schema import RewardsConfig
from dapo.rewards import VerifierPool, VerifierPools
from dapo.rewards.functions import score_of
from dapo.rewards.parts import PartsJudge, with_parts
from dapo.rewards.worker import MAX_PARTS, encoded
from dapo.types import Judgement, Score, StopReason, Task, Verdict

MODULE = """
from dapo.types import Score
def length(response, answer, meta): return float(len(response))
def raises(response, answer, meta):
    if "bad" in response:
        raise ValueError("no opinion on this one")
    return 0.5
def not_finite(response, answer, meta): return float("inf") if "bad" in response else 1.0
def hangs(response, answer, meta):
    while "bad" in response:
        pass
    return 2.0
def tidy(response, answer, meta):
    return Score(1.0, answer in response, {"tidy": 0.25, "rare": 1.0} if "bad" not in response else {"rare": 1.0})
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "part_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def rewards(**parts: dict[str, object]) -> RewardsConfig:
    return RewardsConfig.model_validate({"verifier": "exact", "workers": 1, "cpu_seconds": 1.0, "parts": parts})


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Iterator[PartsJudge]:
    config: RewardsConfig = request.param
    with VerifierPool(config.verifier, workers=1) as pool:
        made = PartsJudge(pool, config)
        yield made
        made.close()


def judged(judge: PartsJudge, *responses: str, stop: StopReason = StopReason.EOS) -> list[Judgement]:
    tickets = [judge.submit(Task(response, "42", stop_reason=stop, meta={})) for response in responses]
    found = judge.wait(tickets)
    return [found[ticket] for ticket in tickets]


def function(name: str, weight: float = 1.0) -> dict[str, object]:
    return {"function": f"part_rewards:{name}", "weight": weight}


@pytest.mark.parametrize(
    "judge", [rewards(length=function("length"), same={"verifier": "exact", "weight": -2.0})], indirect=True
)
def test_a_judgement_carries_every_part_and_the_verifier_alone_says_what_is_correct(judge: PartsJudge):
    right, wrong = judged(judge, "42", "five")
    assert (right.verdict, right.value, dict(right.parts)) == (Verdict.CORRECT, 1.0, {"length": 2.0, "same": 1.0})
    assert (wrong.verdict, wrong.value, dict(wrong.parts)) == (Verdict.WRONG, -1.0, {"length": 4.0, "same": -1.0})
    # A function reads a truncated response; a verifier calls it wrong, as always.
    (cut,) = judged(judge, "42", stop=StopReason.LENGTH)
    assert (cut.verdict, dict(cut.parts)) == (Verdict.WRONG, {"length": 2.0, "same": -1.0})


def test_a_source_with_a_verifier_of_its_own_has_the_parts_of_all():
    config = rewards(length=function("length"), same={"verifier": "exact", "weight": 1.0})
    with VerifierPool("math", workers=1) as own, VerifierPool("exact", workers=1) as other:
        judge = PartsJudge(VerifierPools(own, [other]), config)
        tickets = [judge.submit(Task("\\boxed{42.0}", "42", StopReason.EOS, verifier=name)) for name in ("", "exact")]
        found = judge.wait(tickets)
        judge.close()
    assert [found[ticket].verdict for ticket in tickets] == [Verdict.CORRECT, Verdict.WRONG]  # by its own verifier
    assert [dict(found[ticket].parts) for ticket in tickets] == [{"length": 12.0, "same": -1.0}] * 2


@pytest.mark.parametrize("judge", [rewards(length=function("length"))], indirect=True)
def test_border_tickets_may_be_waited_for_in_any_order_and_once(judge: PartsJudge):
    tickets = [judge.submit(Task("x" * n, "42", stop_reason=StopReason.EOS)) for n in range(1, 6)]
    assert [j.parts["length"] for j in judge.wait(reversed(tickets[3:])).values()] == [5.0, 4.0]
    assert judge.wait([]) == {}
    assert [j.parts["length"] for j in judge.wait(tickets[:3]).values()] == [1.0, 2.0, 3.0]
    with pytest.raises(KeyError):
        judge.wait(tickets[:1])


@pytest.mark.parametrize(
    ("judge", "verdict", "says"),
    [
        (rewards(a=function("length"), b=function("raises")), Verdict.CRASH, "rewards.parts.b: ValueError: no opinion"),
        (rewards(a=function("length"), b=function("not_finite")), Verdict.CRASH, "rewards.parts.b: the reward is inf"),
        (rewards(a=function("length"), b=function("gone")), Verdict.CRASH, "rewards.parts.b: AttributeError"),
    ],
    indirect=["judge"],
)
def test_a_part_that_fails_fails_the_judgement_by_name(judge: PartsJudge, verdict: Verdict, says: str):
    good, bad = judged(judge, "42", "a bad one")
    assert bad.verdict is verdict
    assert bad.value == -1.0
    assert says in bad.message
    assert dict(bad.parts) == {"a": 9.0}  # what is known stays; what is not is no 0
    if "gone" not in says and "AttributeError" not in says:
        assert good.verdict is Verdict.CORRECT
        assert good.parts.keys() == {"a", "b"}


@pytest.mark.slow
@pytest.mark.parametrize("judge", [rewards(b=function("hangs"))], indirect=True)
def test_a_part_that_hangs_is_killed_and_timed_out_by_name(judge: PartsJudge):
    good, bad = judged(judge, "42", "a bad one")
    assert (bad.verdict, dict(bad.parts)) == (Verdict.TIMEOUT, {})
    assert bad.message.startswith("rewards.parts.b: ")
    assert (good.verdict, dict(good.parts)) == (Verdict.CORRECT, {"b": 2.0})


TIDY = RewardsConfig.model_validate(
    {"verifier": "part_rewards:tidy", "workers": 1, "parts": {"tidy": {"weight": 0.5}, "correct": {"weight": 2.0}}}
)


@pytest.mark.parametrize("judge", [TIDY], indirect=True)
def test_a_score_carries_parts_and_one_without_its_part_has_failed(judge: PartsJudge):
    good, bad = judged(judge, "42", "bad 42")
    assert (good.verdict, dict(good.parts)) == (Verdict.CORRECT, {"tidy": 0.25, "rare": 1.0})
    assert bad.verdict is Verdict.CRASH
    assert bad.message == "rewards.parts.tidy: the Score has no part 'tidy'"
    (cut,) = judged(judge, "42", stop=StopReason.LENGTH)  # the verifier was not asked, and so failed at nothing
    assert (cut.verdict, dict(cut.parts)) == (Verdict.WRONG, {})


def test_a_part_with_a_function_of_its_own_is_that_functions_value_whatever_the_score_says():
    own = Judgement(Verdict.CORRECT, 1.0, parts={"a": 9.0, "b": 0.25})
    assert with_parts(own, {"a": Judgement(Verdict.WRONG, 0.5)}).parts == {"a": 0.5, "b": 0.25}


def test_the_verifiers_own_failure_comes_first():
    own = Judgement(Verdict.TIMEOUT, -1.0, message="too slow")
    found = with_parts(own, {"b": Judgement(Verdict.CRASH, -1.0, message="also"), "a": Judgement(Verdict.WRONG, 0.5)})
    assert (found.verdict, found.message, dict(found.parts)) == (Verdict.TIMEOUT, "too slow", {"a": 0.5})


def test_a_graded_response_of_which_a_part_failed_is_wrong_and_not_graded():
    own = Judgement(Verdict.WRONG, 0.75, graded=True)
    found = with_parts(own, {"b": Judgement(Verdict.CRASH, -1.0, message="gone")})
    assert (found.verdict, found.value, found.graded) == (Verdict.CRASH, -1.0, False)


def test_work_of_all_parts_is_counted():
    found = with_parts(Judgement(Verdict.WRONG, -1.0, seconds=1.0), {"a": Judgement(Verdict.WRONG, 0.5, seconds=2.0)})
    assert found.seconds == 3.0


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"a/b": 1.0}, "'a/b' is no name"),
        ({"correct": 1.0}, "'correct' is no name"),
        ({"": 1.0}, "'' is no name"),
        ({3: 1.0}, "3 is no name"),
        ({"a": math.nan}, "a is nan"),
        ({"a": -math.inf}, "a is -inf"),
        ({"a": "much"}, "could not convert"),
        ({f"p{i}": 1.0 for i in range(MAX_PARTS + 1)}, f"{MAX_PARTS + 1} parts"),
        ([("a", 1.0)], "Score.parts"),
    ],
)
def test_a_score_with_parts_that_are_none_is_a_crash(parts: dict[str, float], says: str):
    reply = encoded(Score(1.0, correct=True, parts=parts))
    assert reply["verdict"] == "CRASH"
    assert says in reply["message"]


def test_border_as_many_parts_as_a_score_may_have():
    reply = encoded(Score(1.0, correct=True, parts={f"p{i}": 1.0 for i in range(MAX_PARTS)}))
    assert (reply["verdict"], len(reply["parts"])) == ("CORRECT", MAX_PARTS)


def test_the_other_numbers_of_verls_dict_are_parts():
    returned = {"score": 1.0, "acc": True, "format_reward": 0.5, "pred": "42", "is_long": True, "odd name": 1.0}
    assert score_of(returned, "mine") == Score(1.0, correct=True, parts={"format_reward": 0.5})


def test_no_worker_of_a_part_outlives_it():
    config = rewards(length=function("length"))
    with VerifierPool("exact", workers=1) as pool:
        judge = PartsJudge(pool, config)
        judged(judge, "42")
        pids = judge.pools["length"].worker_pids()
        judge.close()
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
