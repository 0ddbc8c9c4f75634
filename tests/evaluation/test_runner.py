"""Evaluation on a virtual engine: every problem k times, paired noise, nothing asked twice."""

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dapo.errors import DataError
from dapo.evaluation.journal import AnswerJournal
from dapo.evaluation.runner import Answered, answered, evaluate, summarise
from dapo.planning.virtual import VirtualEngine, VirtualJudge
from dapo.rollout.engine import NoiseKey, Request
from dapo.types import Completion, Judgement, Problem, StopReason, Verdict

PROBLEMS = [Problem(str(i), "", "", source="a" if i < 3 else "b", meta={"pass_rate": i / 5}) for i in range(6)]
PROMPTS = [(0,)] * 6


def engine(asked: list[Request]) -> VirtualEngine:
    def length_of(request: Request) -> int:
        asked.append(request)
        return 3 + request.id % 5

    return VirtualEngine(max_concurrent=7, length_of=length_of)


def test_every_problem_is_answered_k_times_and_summed_up():
    asked: list[Request] = []
    answers = evaluate(engine(asked), VirtualJudge(), PROBLEMS, PROMPTS, k=8, max_new_tokens=50, seed=0)
    assert len(answers) == len(asked) == 48
    assert {request.key.stream for request in asked} == {"eval"}
    line = summarise("set", PROBLEMS, answers, k=8)
    right = sum(a.verdict is Verdict.CORRECT for a in answers.values())
    assert line["avg@k"] == right / 48
    assert line["avg@k_interval"][0] <= line["avg@k"] <= line["avg@k_interval"][1]
    assert set(line["by_source"]) == {"a", "b"}
    assert line["pass@k"] >= line["avg@k"]


def test_a_line_by_hand():
    """Three problems, two of one source; of the six responses one was cut off, one given up, one not readable."""
    right, wrong, unread = Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE
    rows = [
        ("0", right, "1", 3, False, 1.0), ("0", wrong, "2", 50, True, 0.0),
        ("1", unread, None, 5, False, 0.0), ("1", wrong, "1", 0, False, 0.0),
        ("5", right, "7", 8, False, 0.5), ("5", right, "7", 6, False, 1.5),
    ]  # fmt: skip
    answers = {
        (name, at % 2): Answered(name, at % 2, verdict, text, n, is_truncated, value=value, is_graded=value == 1.5)
        for at, (name, verdict, text, n, is_truncated, value) in enumerate(rows)
    }
    answers["1", 1] = replace(answers["1", 1], is_aborted=True)
    line = summarise("set", [PROBLEMS[0], PROBLEMS[1], PROBLEMS[5]], answers, k=2)
    told = {name: value for name, value in line.items() if not name.endswith("_interval")}
    assert told.pop("by_source") == pytest.approx({"a": (1 / 2 + 0) / 2, "b": 1.0})
    assert told == pytest.approx(
        {
            "set": "set", "problems": 3, "k": 2,
            "avg@k": 3 / 6, "pass@k": 2 / 3, "maj@k": (1 / 2 + 0 + 1) / 3,  # two answers of "0" have a vote each
            "unparseable": 1 / 6, "truncated": 1 / 6, "faults": 1,
            "mean_tokens": (3 + 50 + 5 + 0 + 8 + 6) / 6, "mean_value": (1 + 0.5 + 1.5) / 6,
        }
    )  # fmt: skip


def test_an_episode_is_as_long_as_what_the_model_drew_of_it():
    four = np.zeros(4, np.int32)
    own = np.array([True, False, False, True])
    completion = Completion(four, four.astype(np.float32), four, StopReason.EOS, "", own)
    request = Request(0, (0,), NoiseKey(0, "eval", "0", 0, 0), 9, group=0)
    assert answered(PROBLEMS[0], request, completion, Judgement(Verdict.WRONG, -1.0)).n_tokens == 2


def test_what_is_known_is_not_asked_again():
    asked: list[Request] = []
    whole = evaluate(engine([]), VirtualJudge(), PROBLEMS, PROMPTS, k=4, max_new_tokens=50, seed=0)
    half = {key: answer for key, answer in whole.items() if int(key[0]) % 2}
    again = evaluate(engine(asked), VirtualJudge(), PROBLEMS, PROMPTS, k=4, max_new_tokens=50, seed=0, known=half)
    assert again == whole
    assert {request.key.problem for request in asked} == {"0", "2", "4"}


def test_of_a_problem_that_was_left_in_the_middle_the_other_responses_are_asked():
    asked: list[Request] = []
    whole = evaluate(engine([]), VirtualJudge(), PROBLEMS, PROMPTS, k=4, max_new_tokens=50, seed=0)
    known = {key: answer for key, answer in whole.items() if key not in (("0", 2), ("3", 0))}
    again = evaluate(engine(asked), VirtualJudge(), PROBLEMS, PROMPTS, k=4, max_new_tokens=50, seed=0, known=known)
    assert again == whole
    assert [(request.key.problem, request.key.response_index) for request in asked] == [("0", 2), ("3", 0)]


def test_the_responses_to_a_problem_are_one_group():
    asked: list[Request] = []
    evaluate(engine(asked), VirtualJudge(), PROBLEMS, PROMPTS, k=3, max_new_tokens=50, seed=0)
    assert sorted({(request.key.problem, request.group) for request in asked}) == [(str(i), i) for i in range(6)]


def test_a_truncated_answer_is_counted_and_never_right():
    slow = VirtualEngine(max_concurrent=4, length_of=lambda _: 99)
    sure = [Problem("x", "", "", meta={"pass_rate": 1.0})]
    answers = evaluate(slow, VirtualJudge(), sure, [(0,)], k=3, max_new_tokens=10, seed=0)
    assert all(isinstance(a, Answered) and a.is_truncated for a in answers.values())
    line = summarise("set", sure, answers, k=3)
    assert (line["avg@k"], line["truncated"]) == (0.0, 1.0)


class FaultyEngine(VirtualEngine):
    """Gives up every response with an odd index, after it has written the right answer."""

    def advance(self, meanwhile=lambda: None):
        return [
            (
                request,
                replace(completion, stop_reason=StopReason.ABORTED) if request.key.response_index % 2 else completion,
            )
            for request, completion in super().advance(meanwhile)
        ]


def test_a_response_that_the_engine_gave_up_is_counted_not_judged_and_never_right():
    judged = []

    class CountingJudge(VirtualJudge):
        def submit(self, task):
            judged.append(task.stop_reason)
            assert {"question", "data_source"} <= task.meta.keys()  # a reward function may ask for them
            return super().submit(task)

    sure = [Problem("x", "", "", meta={"pass_rate": 1.0})]
    faulty = FaultyEngine(max_concurrent=4, length_of=lambda _: 3)
    answers = evaluate(faulty, CountingJudge(), sure, [(0,)], k=6, max_new_tokens=10, seed=0)
    assert judged == [StopReason.EOS] * 3
    assert [answers["x", i].verdict for i in range(6)] == [Verdict.CORRECT, Verdict.CRASH] * 3
    assert [answers["x", i].is_aborted for i in range(6)] == [False, True] * 3
    line = summarise("set", sure, answers, k=6)
    assert (line["avg@k"], line["faults"], line["truncated"]) == (0.5, 3, 0.0)


def test_a_disk_that_is_full_is_said_and_the_journal_goes_on(tmp_path: Path):
    def answer(i: int) -> Answered:
        return Answered("p", i, Verdict.CORRECT, "42", 3, False, "x" * 1000)

    path = tmp_path / "answers.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = rf"{path}: cannot be written: .*\.\nName another file, or free space"
    try:
        with AnswerJournal(path, {"k": 4}) as journal:
            journal.add(answer(0))
            # Half of a line more: what a volume without space does to a write.
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 500, before[1]))
            with pytest.raises(DataError, match=said):
                journal.add(answer(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(AnswerJournal(path, {"k": 4}).known) == [("p", 0)]
    with pytest.raises(DataError, match="cannot be written"), AnswerJournal(Path("/proc/answers.jsonl"), {"k": 4}):
        pass


@pytest.mark.parametrize("n_problems", [0, 1, 6, 7, 8, 15])
@pytest.mark.parametrize("k", [1, 2])
def test_border_every_problem_is_answered_by_its_own_responses_once(n_problems: int, k: int):
    """By seven at a time; a virtual response says its own name."""
    problems = [Problem(str(i), "", "", meta={"pass_rate": 0.5}) for i in range(n_problems)]
    told: list[tuple[int, int]] = []
    answers = evaluate(
        engine([]), VirtualJudge(), problems, [(0,)] * n_problems, k=k, max_new_tokens=50, seed=0,
        on_answer=lambda _answer, done, total: told.append((done, total)),
    )  # fmt: skip
    assert sorted(answers) == sorted((problem.id, i) for problem in problems for i in range(k))
    assert all(answer.text == f"{name}/0/{i}" for (name, i), answer in answers.items())
    assert told == [(done, n_problems * k) for done in range(1, n_problems * k + 1)]


@pytest.mark.parametrize("n_lines", [0, 1, 2, 5])
def test_border_a_journal_torn_in_its_last_line_keeps_every_whole_answer(n_lines: int, tmp_path: Path):
    path, settings = tmp_path / "answers.jsonl", {"k": 4}
    answers = [Answered("p", i, Verdict.CORRECT, "4\u20282", 3, False, "text\n") for i in range(n_lines)]
    with AnswerJournal(path, settings) as journal:
        for answer in answers:
            journal.add(answer)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1 if n_lines < 2 else whole[:-1].rindex(b"\n")
    for n_bytes in (*range(first, first + 3), *range(first + 3, len(whole) - 2, 17), len(whole) - 1, len(whole)):
        path.write_bytes(whole[:n_bytes])
        known = list(AnswerJournal(path, settings).known.values())
        n_whole = max(0, whole[:n_bytes].count(b"\n") - 1)
        assert known[:n_whole] == answers[:n_whole]
        assert len(known) <= n_whole + 1  # a last line that lacks its end alone may count
