"""Programs as verifiers: kept alive from response to response, started again when they leave, never out of step."""

import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from endings import await_end
from late_looks import NeverLook, OnlyWhenReady

from dapo.rewards import VerifierPool, command
from dapo.rewards.command import CommandError, Program, outcome_of
from dapo.types import Score, Verdict

LOOP = "import json, os, sys\nfor line in sys.stdin:\n    task = json.loads(line)\n"
ONCE = "import json, os, sys\ntask = json.loads(sys.stdin.readline())\n"
PID = "print(json.dumps({'value': os.getpid()}), flush=True)\n"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "_PATIENCE_SECONDS", 0.2)


@pytest.fixture
def program(tmp_path: Path) -> Iterator:
    made: list[Program] = []

    def make(body: str) -> Program:
        path = tmp_path / f"checker{len(made)}.py"
        path.write_text(body)
        made.append(Program([sys.executable, "-S", str(path)]))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def ask(program: Program, response: str = "") -> dict:
    return program.ask({"response": response, "answer": "", "stop_reason": None, "meta": {}})


def test_a_program_that_reads_lines_is_kept(program):
    checker = program(
        LOOP + "    print(json.dumps({'value': os.getpid(), 'id': task['id'], 'n': len(task['response'])}))"
    )
    answers = [ask(checker, "x" * n) for n in (1, 0, 300_000, 2)]
    assert len({answer["value"] for answer in answers}) == 1
    assert [answer["n"] for answer in answers] == [1, 0, 300_000, 2]
    assert [answer["id"] for answer in answers] == [1, 2, 3, 4]


def test_a_program_that_answers_once_is_started_again(program):
    checker = program(ONCE + PID)
    assert len({ask(checker)["value"] for _ in range(4)}) == 4
    assert checker.answers_once
    assert checker.process is None  # it was let go


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_answers_once_may_exit_with_any_code(program, code: int):
    """Gone before the next line comes, or only when it has come: the same answers."""
    gone = program(ONCE + PID + f"sys.exit({code})")
    first = ask(gone)
    gone.process.wait()
    assert ask(gone) != first
    assert gone.answers_once
    leaving = program(ONCE + PID + f"sys.stdin.readline()\nsys.exit({code})")
    assert len({ask(leaving)["value"] for _ in range(3)}) == 3
    assert leaving.answers_once


@pytest.mark.parametrize(
    "body",
    [
        "import json, os, sys\ntask = json.load(sys.stdin)\n" + PID,
        LOOP + "    held = os.fdopen(os.dup(1), 'w')\n    held.write(json.dumps({'value': os.getpid()}) + '\\n')\n",
        LOOP + "    sys.stdout.write(json.dumps({'value': os.getpid()}))\n    sys.stdout.flush()\n",
    ],
    ids=["reads to the end", "does not flush", "ends no line"],
)
def test_a_program_that_waits_for_the_end_of_its_input_gets_it(program, body: str):
    checker = program(body)
    assert len({ask(checker)["value"] for _ in range(3)}) == 3
    assert checker.answers_once


def test_a_slow_program_that_works_is_not_taken_for_one_that_waits(program):
    checker = program(LOOP + "    import time\n    end = time.process_time() + 0.4\n"
                      "    while time.process_time() < end: pass\n    " + PID)  # fmt: skip
    assert ask(checker) == ask(checker)
    assert not checker.answers_once


def test_a_program_that_has_answered_may_sleep_over_a_later_line(program):
    checker = program(LOOP + "    import time\n    time.sleep(0.6 if task['response'] == 'slow' else 0)\n    " + PID)
    assert len({ask(checker, response)["value"] for response in ("", "slow", "")}) == 1
    assert not checker.answers_once


@pytest.mark.parametrize("said", ["thinking", "{}", '{"step": 1}', "[1, 2]", '"verdict"', "{" * 5_000, "\\xff"])
def test_lines_that_are_no_answer_are_passed_over(program, said: str):
    checker = program(LOOP + f"    print({said!r}); " + PID)
    assert ask(checker) == ask(checker)


def test_a_prompt_before_the_answer_does_no_harm(program):
    body = "import json\nwhile True:\n    task = json.loads(input('? > '))\n    "
    checker = program(body + "print(json.dumps({'value': 0, 'id': task['id']}))")
    assert [ask(checker) for _ in range(3)] == [{"value": 0, "id": n} for n in (1, 2, 3)]


def test_a_program_that_dies_costs_one_response_and_says_why(program):
    body = (
        LOOP
        + "    print('on', file=sys.stderr)\n    if task['response'] == 'bad': raise ValueError('bad proof')\n    "
        + PID
    )
    checker = program(body)
    first = ask(checker)
    with pytest.raises(CommandError, match=r"exited with code 1: ValueError: bad proof$"):
        ask(checker, "bad")
    second = ask(checker)
    assert second != first
    assert ask(checker) == second
    assert not checker.answers_once


def test_a_program_that_is_killed_says_by_what(program):
    checker = program(LOOP + "    os.kill(os.getpid(), 11)")
    with pytest.raises(CommandError, match="SIGSEGV"):
        ask(checker)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (ONCE + "sys.exit(3)", "exited with code 3"),
        (ONCE + "print('yes')", "no JSON line with a verdict or a value, but 'yes'"),
        (LOOP + "    print('yes', flush=True)", "but 'yes'"),
        (LOOP + "    print(json.dumps({'value': 1, 'id': task['id'] - 1}))", "answered request 0 when asked 1"),
        (LOOP + "    print('x' * 1_100_000, flush=True)", "without an answer"),
        (LOOP + "    while True: print('x' * 50_000, flush=True)", "1,000,000 bytes without an answer"),
        (LOOP + "    while True: print('x' * 50_000, flush=True, file=sys.stderr, end=sys.exit(4))", "code 4"),
    ],
)  # fmt: skip
def test_failures(program, body: str, message: str):
    with pytest.raises(CommandError, match=message):
        ask(program(body))


def test_its_children_are_stopped_with_it(program, monkeypatch: pytest.MonkeyPatch):
    checker = program(
        LOOP + "    child = os.fork()\n    if child == 0:\n        import time\n        time.sleep(600)\n"
        "    print(json.dumps({'value': child}))"
    )
    child = ask(checker)["value"]
    kill, killed = os.kill, []
    monkeypatch.setattr(os, "kill", lambda pid, number: (killed.append((pid, number)), kill(pid, number)))
    checker.stop()
    assert (child, signal.SIGKILL) in killed


def test_the_end_of_stderr_is_no_reason_to_look_often(program, monkeypatch: pytest.MonkeyPatch):
    looks: list[float] = []

    class Noted(command.Sleep):
        def look(self) -> None:
            looks.append(time.monotonic())
            super().look()

    monkeypatch.setattr(command, "Sleep", Noted)
    monkeypatch.setattr(command, "_PATIENCE_SECONDS", 600.0)
    ask(program(LOOP + "    os.close(2)\n    import time\n    time.sleep(0.5)\n    " + PID))
    assert all(after - before > 0.09 for before, after in pairwise(looks))


def test_what_has_just_said_something_is_not_asleep(program, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selectors, "DefaultSelector", OnlyWhenReady)
    monkeypatch.setattr(command, "Sleep", NeverLook)
    monkeypatch.setattr(command, "_LOOK_SECONDS", 0.0)
    assert ask(program(LOOP + "    print('on', flush=True)\n    print(json.dumps({'value': 1}))")) == {"value": 1}


def test_two_answers_to_one_line_are_noticed(program):
    checker = program(LOOP + '    os.write(1, b\'{"value": 1}\\n{"value": 2}\\n\')\n')
    assert ask(checker) == {"value": 1}
    with pytest.raises(CommandError, match="answered twice"):
        ask(checker)
    assert ask(checker) == {"value": 1}


def test_a_program_that_does_not_read_may_answer(program):
    checker = program("print('{\"value\": 1}', flush=True)\nimport time\ntime.sleep(600)")
    assert [ask(checker, "x" * 300_000) for _ in range(2)] == [{"value": 1}] * 2


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [({"value": 0.5}, Score(0.5, None)), ({"value": 1, "correct": True}, Score(1.0, True))],
)
def test_values(answer: dict, outcome: Score):
    assert outcome_of(answer, "checker") == outcome


@pytest.mark.parametrize(
    "answer", [{"verdict": "SUPER"}, {"value": "1"}, {"value": 1, "correct": "yes"}, {"verdict": []}]
)
def test_answers_that_are_none(answer: dict):
    with pytest.raises(CommandError, match="neither a verdict nor a value"):
        outcome_of(answer, "checker")


def test_only_some_programs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "_PROGRAMS", {})
    path = tmp_path / "checker.py"
    path.write_text(LOOP + "    " + PID)
    programs = []
    for name in "abcdaef":
        programs.append(command.program_of([sys.executable, "-S", str(path), name]))
        ask(programs[-1])
    alive = [one for one in dict.fromkeys(programs) if one.process is not None]
    assert [one.argv[-1] for one in alive] == ["a", "d", "e", "f"]  # asked last
    assert command.program_pids() == {one.process.pid for one in alive}
    for one in alive:
        one.stop()


def judged(body: str, responses: list[str], tmp_path: Path, *, seconds: float) -> list:
    path = tmp_path / "checker.py"
    path.write_text(body)
    with VerifierPool(f"command:{sys.executable} -S {path}", workers=1, seconds=seconds) as pool:
        return pool.judge_all([(response, "") for response in responses])


def test_the_program_is_counted_and_replaced_when_it_hangs(tmp_path: Path):
    body = LOOP + "    while task['response'] == 'hang': pass\n    " + PID
    before, hanging, after = judged(body, ["", "hang", ""], tmp_path, seconds=0.5)
    assert (hanging.verdict, hanging.message) == (Verdict.TIMEOUT, "stopped after 0.5 s of CPU time")
    assert before.graded
    assert after.graded
    assert before.value != after.value


def test_time_of_earlier_responses_is_not_counted(tmp_path: Path):
    work = "    import time\n    end = time.process_time() + 0.2\n    while time.process_time() < end: pass\n    "
    judgements = judged(LOOP + work + PID, [""] * 4, tmp_path, seconds=0.5)
    assert len({judgement.value for judgement in judgements}) == 1  # one process, alive all the time
    assert all(judgement.graded and judgement.seconds < 0.5 for judgement in judgements)


def test_orphans_are_counted_and_end_with_the_worker(tmp_path: Path):
    """A program that leaves its work to a grandchild in a session of its own, whose parent is gone."""
    body = (
        "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n        while True: pass\n"
        "    os._exit(0)\nos.wait()\ntime.sleep(600)\n"
    )
    (judgement,) = judged(body, [""], tmp_path, seconds=0.5)
    assert (judgement.verdict, judgement.message) == (Verdict.TIMEOUT, "stopped after 0.5 s of CPU time")
    await_end([int((tmp_path / "pid").read_text())])


def test_orphans_that_have_ended_are_not_kept(tmp_path: Path):
    """A daemon for each response; the worker has adopted them and waits for them."""
    body = LOOP + (
        "    if os.fork() == 0:\n        os.fork()\n        os._exit(0)\n    os.wait()\n    worker = os.getppid()\n"
        "    children = open(f'/proc/{worker}/task/{worker}/children').read().split()\n"
        "    print(json.dumps({'value': len(children)}), flush=True)\n"
    )
    assert max(judgement.value for judgement in judged(body, [""] * 12, tmp_path, seconds=5)) < 6


def test_the_environment_and_the_request(program, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CHECKER_KEY", "k")
    checker = program(LOOP + "    print(json.dumps({'value': 0, 'task': task, 'key': os.environ['CHECKER_KEY']}))")
    request = {"response": "a\n", "answer": "b", "stop_reason": "EOS", "meta": {"level": 3}}
    assert checker.ask(request) == {"value": 0, "task": {"id": 1, **request}, "key": "k"}
