"""Programs in the jail: honest ones pass, hostile ones are contained, and none passes by a trick."""

import os
import selectors
import time
from pathlib import Path

import pytest
from endings import is_running
from hostile_programs import CHOSEN, HOSTILE, OUTSIDE
from late_looks import NeverLook, OnlyWhenReady

from dapo import rewards
from dapo.rewards import VerifierPool, code
from dapo.rewards.process_tree import tree
from dapo.types import Task, Verdict

pytestmark = pytest.mark.skipif(code.isolation_error() is not None, reason=f"no jail here: {code.isolation_error()}")

SECONDS = 0.8  # of CPU time: what spins uses all of it
ADD = {"tests": [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "40 2\n", "stdout": "42\n"}]}
FUNCTION = {"function": "add", "tests": [{"args": [2, 3], "expected": 5}, {"args": [40, 2], "expected": 42}]}


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\n"


@pytest.fixture(scope="module")
def pool():
    with VerifierPool("code", workers=2, seconds=SECONDS) as pool:
        yield pool


@pytest.mark.parametrize(
    ("program", "meta", "expected"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", ADD, "CORRECT"),
        ("import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))", ADD, "CORRECT"),
        ("a, b = map(int, input().split())\nprint(a - b)", ADD, "WRONG"),
        ("def add(a, b):\n    return a + b", FUNCTION, "CORRECT"),
        ("def add(a, b):\n    print('noise')\n    return a + b", FUNCTION, "CORRECT"),
        ("import math, collections, heapq, json, itertools\ndef add(a, b):\n    return a + b", FUNCTION, "CORRECT"),
        ("def add(a, b):\n    return str(a + b)", FUNCTION, "WRONG"),
        ("def add(a, b):\n    return float(a + b)", FUNCTION, "CORRECT"),
        ("def plus(a, b):\n    return a + b", FUNCTION, "WRONG"),
        ("def add(a, b):\n    return a + c", FUNCTION, "WRONG"),
        ("def add(a, b)\n    return a + b", FUNCTION, "WRONG"),
        ("import threading\nr = []\nt = threading.Thread(target=lambda: r.append(1))\nt.start(); t.join()\n"
         "def add(a, b):\n    return a + b if r else 0", FUNCTION, "CORRECT"),
    ],
)  # fmt: skip
def test_honest_programs(pool: VerifierPool, program: str, meta: dict, expected: str):
    ticket = pool.submit(Task(block(program), "", meta=meta))
    judgement = pool.wait([ticket])[ticket]
    assert judgement.verdict == expected, judgement


def test_tests_may_stand_in_the_reference():
    reference = '[{"stdin": "2 3", "stdout": "5"}]'
    program = "print(sum(map(int, input().split())))"
    for said in (reference, reference[1:-1]):  # one test alone is how a data file's list of one arrives
        assert rewards.judge(block(program), said, verifier="code").verdict is Verdict.CORRECT


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"tests": []}, "a list of 1"),
        ({"tests": [{"stdin": "1"}]}, "test 1 needs the keys"),
        ({"no": "tests"}, "not JSON"),
        ({"function": "add", "tests": [{"stdin": "1", "stdout": "1"}]}, "args and expected"),
    ],
)
def test_unusable_tests_are_a_crash_and_never_a_pass(pool: VerifierPool, meta: dict, message: str):
    ticket = pool.submit(Task(block("print(5)"), "five", meta=meta))
    judgement = pool.wait([ticket])[ticket]
    assert judgement.verdict is Verdict.CRASH
    assert message in judgement.message


@pytest.mark.parametrize(
    ("said", "expected", "is_same"),
    [
        (5.0, 5, True),
        (4.9999999999, 5, True),
        (1000000000000.0, 10**12, True),
        (1000000000500.0, 10**12, False),
        (1000000000001.0, 10**12, False),
        (10**12 + 500, 1e12, False),
        (float(2**53), 2**53 + 1, False),
        (1e300, 10**400, False),
        (0.3000000000000001, 0.3, True),
        (1000000000500.0, 1e12, True),
        ([5.0, [1000000000500.0]], [5, [10**12]], False),
        (True, 1, False),
    ],
)
def test_a_float_for_an_integer_is_that_integer(said: object, expected: object, is_same: bool):
    assert code.same_value(said, expected) is is_same


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx\n```", "x"),
        ("```\nx\n```", "x"),
        ("a ```py\nx\ny\n``` b ```\nz\n```", "x\ny"),
        ("```python\nx\n```\n```python\ny\n```", "y"),
        ("```python\nx", "x"),
        ("```bash\nls\n```", None),
        ("```python x", None),
        ("``\nx\n``", None),
        ("```\n\n```", ""),
    ],
)
def test_the_last_python_block_is_the_program(response: str, program: str | None):
    assert code.program_in(response) == program


def test_no_program_is_unparseable(pool: VerifierPool):
    assert pool.judge_all([("I would add the numbers.", "[]")])[0].verdict is Verdict.UNPARSEABLE


def test_there_are_enough_hostile_programs():
    assert len(HOSTILE) >= 30


@pytest.mark.parametrize(
    "name", [name if name in CHOSEN else pytest.param(name, marks=pytest.mark.slow) for name in HOSTILE]
)
def test_hostile_programs_are_contained_and_never_pass(pool: VerifierPool, name: str):
    program = block(HOSTILE[name])
    items = [pool.submit(Task(program, "", meta=meta)) for meta in (ADD, FUNCTION)]
    neighbour = pool.submit(Task(block("print(sum(map(int, input().split())))"), "", meta=ADD))
    judgements = pool.wait([*items, neighbour])
    for ticket in items:
        assert judgements[ticket].verdict in (Verdict.WRONG, Verdict.TIMEOUT), judgements[ticket]
        assert judgements[ticket].seconds < SECONDS + 1.5  # of CPU time: its limit, and what looking late costs
    assert judgements[neighbour].verdict is Verdict.CORRECT, judgements[neighbour]
    assert not Path(OUTSIDE).exists()


@pytest.mark.parametrize(
    ("program", "counted"),
    [("while True:\n    pass", "of CPU time"), ("import time\ntime.sleep(600)", "asleep")],
)
def test_what_was_counted_is_said(program: str, counted: str):
    with VerifierPool("code", workers=1, seconds=0.5) as pool:
        judgement = pool.judge_all([rewards.Task(block(program), "", None, ADD)])[0]
    assert judgement.verdict is Verdict.TIMEOUT
    assert judgement.message == f"test 1: stopped after 0.5 s {counted}"  # the jail's words: the pool stops it later


def test_what_has_just_said_something_is_not_asleep(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selectors, "DefaultSelector", OnlyWhenReady)
    monkeypatch.setattr(code, "Sleep", NeverLook)
    monkeypatch.setattr(code, "_LOOK_SECONDS", 0.0)
    assert code.run_jailed("print(5)", allowance=code.Allowance(60)).stdout == b"5\n"


def test_the_tests_of_a_response_share_its_time():
    program = block("import time\nwhile time.process_time() < 0.25:\n    pass\nprint(5)")
    tests = [{"stdin": "", "stdout": "5"}] * 8
    with VerifierPool("code", workers=1, seconds=1.0) as pool:
        judgement = pool.judge_all([rewards.Task(program, "", None, {"tests": tests})])[0]
    assert judgement.verdict is Verdict.TIMEOUT
    assert "of CPU time" in judgement.message


def test_nothing_runs_on_afterwards(pool: VerifierPool):
    programs = [block(HOSTILE[name]) for name in ("daemon", "thread bomb")]
    judgements = pool.judge_all([rewards.Task(program, "", None, ADD) for program in programs])
    assert all(judgement.verdict in (Verdict.WRONG, Verdict.TIMEOUT) for judgement in judgements), (
        judgements
    )  # they ran
    while any(is_running(pid) for worker in pool.worker_pids() for pid in tree(worker)[1:]):
        time.sleep(0.05)  # pytest's own time limit ends this
    assert not list(Path("/mnt").glob("work"))  # what was mounted is gone with its namespace


@pytest.mark.slow
def test_the_program_sees_an_empty_world(pool: VerifierPool):
    program = (
        "import os\n"
        "print(dict(os.environ), os.listdir('.'), sorted(os.listdir('/tmp')), os.path.exists('/proc/1'), "
        "os.path.exists('/etc/passwd'), os.getuid() == 0 and os.geteuid() == 0)"
    )
    root = os.geteuid() == 0
    expected = f"{{}} [] [] False False {not root}"
    judgement = pool.judge_all(
        [rewards.Task(block(program), "", None, {"tests": [{"stdin": "", "stdout": expected}]})]
    )[0]
    assert judgement.verdict is Verdict.CORRECT, judgement
