"""The harness: threads, kills, limits, order, and nothing left behind."""

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from endings import await_end

from dapo import rewards
from dapo.errors import ConfigError
from dapo.rewards import VerifierPool, limits, workers
from dapo.rewards.limits import Limits
from dapo.rewards.workers import WorkerPool
from dapo.types import Score, StopReason, Task, Verdict

MIXED = [
    ("Answer: 42", "42"),
    ("Answer: 41", "42"),
    ("nothing", "42"),
    ("Answer: 2\\sqrt{2}", "\\sqrt{8}"),
    ("Answer: 3\\sqrt{2}", "\\sqrt{8}"),
    ("Answer: 9**9**9**9", "42"),
    ("Answer: x^2+2x+1", "(x+1)^2"),
]
EXPECTED = [
    Verdict.CORRECT,
    Verdict.WRONG,
    Verdict.UNPARSEABLE,
    Verdict.CORRECT,
    Verdict.WRONG,
    Verdict.WRONG,
    Verdict.CORRECT,
]
HERE = f"{__name__}"


# Reward functions of a user, imported by the workers.
def sleepy(response: str, answer: str, meta: dict) -> Score:  # noqa: ARG001
    time.sleep(float(response))
    return Score(1.0, True)


def waiting(response: str, answer: str, meta: dict) -> Score:  # noqa: ARG001
    """Waits until there is a file of that name."""
    while not Path(response).exists():
        time.sleep(0.05)
    return Score(1.0, True)


def busy(response: str, answer: str, meta: dict) -> Score:  # noqa: ARG001
    """Works for that many seconds of CPU time, however long they take."""
    end = time.process_time() + float(response)
    while time.process_time() < end:
        pass
    return Score(1.0, True)


def forking(response: str, answer: str, meta: dict) -> Score:  # noqa: ARG001
    """One child after the other works a little and is waited for; the parent does nothing."""
    for _ in range(20):
        child = os.fork()
        if child == 0:
            busy("0.02", "", {})
            os._exit(0)
        os.waitpid(child, 0)
    time.sleep(600)
    return Score(1.0, True)


def delegating(response: str, answer: str, meta: dict) -> Score:  # noqa: ARG001
    """Children in sessions of their own do the work; their parent sleeps. Their ids go to the file `response`."""
    children = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(2)]
    Path(response).write_text(" ".join(str(child.pid) for child in children))
    time.sleep(600)
    return Score(1.0, True)


def greedy(response: str, answer: str, meta: dict) -> Score:  # noqa: ARG001
    if response == "eat":
        return Score(float(len(bytearray(8 * 2**30))), True)
    return Score(1.0, True)


def graded(response: str, answer: str, meta: dict) -> Score:  # noqa: ARG001
    return Score(float(response), None)


def faulty(response: str, answer: str, meta: dict) -> Score:  # noqa: ARG001
    raise RuntimeError(f"no opinion on {response}")


def untyped(response: str, answer: str, meta: dict) -> float:  # noqa: ARG001
    return 1.0


def chatty(response: str, answer: str, meta: dict) -> Score:
    print('{"ticket": 0, "verdict": "CORRECT"}', flush=True)
    return Score(meta["bonus"], response == answer)


@pytest.fixture(autouse=True)
def functions_are_importable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def verdicts_of(items: list[tuple[str, str]]) -> list[Verdict]:
    return [rewards.verify(response, answer) for response, answer in items]


def test_same_verdicts_in_main_thread_pool_asyncio_and_subprocess():
    assert verdicts_of(MIXED) == EXPECTED
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda item: rewards.verify(*item), MIXED * 5)) == EXPECTED * 5

    async def gather() -> list[Verdict]:
        return await asyncio.gather(*(asyncio.to_thread(rewards.verify, *item) for item in MIXED))

    assert asyncio.run(gather()) == EXPECTED

    async def directly() -> list[Verdict]:
        return verdicts_of(MIXED)

    assert asyncio.run(directly()) == EXPECTED
    program = (
        "import json, sys; from dapo.rewards import verify;"
        "print(json.dumps([verify(*item).value for item in json.load(sys.stdin)]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(MIXED),
        text=True,
        capture_output=True,
        check=True,
        env=environment,
    )
    assert json.loads(done.stdout) == [verdict.value for verdict in EXPECTED]


def test_same_verdicts_in_a_forked_child():
    rewards.verify(*MIXED[3])  # the parent's workers exist
    child = os.fork()
    if child == 0:
        os._exit(0 if verdicts_of(MIXED) == EXPECTED else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_truncated_is_never_correct_but_for_the_published_rule():
    assert rewards.verify("Answer: 42", "42", stop_reason=StopReason.LENGTH) is Verdict.WRONG
    assert rewards.verify("Answer: 42", "42", stop_reason=StopReason.EOS) is Verdict.CORRECT
    published = rewards.judge("Answer: 42", "42", verifier="dapo-published", stop_reason=StopReason.LENGTH)
    assert published.verdict is Verdict.WRONG
    as_released = rewards.judge(
        "Answer: 42", "42", verifier="dapo-published", stop_reason=StopReason.LENGTH, truncated_may_be_correct=True
    )
    assert as_released.verdict is Verdict.CORRECT
    with pytest.raises(ConfigError, match="never correct"):
        VerifierPool("math", truncated_may_be_correct=True)


def test_unknown_verifier_is_refused_with_the_list():
    with pytest.raises(ConfigError, match=r"'mth'.*no such verifier") as error:
        VerifierPool("mth")
    assert "dapo-published" in error.value.remedy


def test_each_response_goes_to_its_problems_verifier_and_tickets_never_mix():
    """The same response and reference under three verifiers; the run's own where none is named."""
    pools = rewards.VerifierPools(VerifierPool("math"), [VerifierPool("exact"), VerifierPool("choice")])
    try:
        asked = [("1/2", ""), ("1/2", "math"), ("1/2", "exact"), ("A", "choice"), ("1/2", ""), ("0.5", "exact")]
        tickets = [pools.submit(Task("Answer: 0.5", answer, verifier=name)) for answer, name in asked]
        judged = pools.wait(reversed(tickets))
        right = [judged[ticket].verdict is Verdict.CORRECT for ticket in tickets]
        assert right == [True, True, False, False, True, True]
        assert len(set(tickets)) == len(tickets)
        with pytest.raises(KeyError):
            pools.wait(tickets[:1])
    finally:
        pools.close()


def test_order_is_kept_and_tickets_are_collected_once():
    with VerifierPool("math", workers=2) as pool:
        assert [judgement.verdict for judgement in pool.judge_all(MIXED * 3)] == EXPECTED * 3
        ticket = pool.submit(Task(*MIXED[3]))
        assert pool.wait([ticket])[ticket].verdict is Verdict.CORRECT
        with pytest.raises(KeyError, match="already collected"):
            pool.wait([ticket])
        tickets = {pool.submit(Task(*item)): verdict for item, verdict in zip(MIXED, EXPECTED, strict=True)}
        assert {ticket: judgement.verdict for ticket, judgement in pool.wait(reversed(tickets)).items()} == tickets


@pytest.mark.slow
def test_a_stuck_worker_is_killed_and_its_neighbours_lose_nothing():
    with VerifierPool(f"{HERE}:busy", workers=2, seconds=0.4) as pool:
        pool.judge_all([("0", "")] * 2)  # workers are up
        judgements = pool.judge_all([("60", ""), ("0", ""), ("0.1", ""), ("60", ""), *[("0.05", "")] * 6])
    assert [judgement.verdict for judgement in judgements] == [
        Verdict.TIMEOUT, Verdict.CORRECT, Verdict.CORRECT, Verdict.TIMEOUT, *[Verdict.CORRECT] * 6
    ]  # fmt: skip
    for row in (0, 3):
        assert judgements[row].message == "stopped after 0.4 s of CPU time"
        assert 0.4 <= judgements[row].seconds < 3  # CPU time, whatever the clock said


def test_a_reply_beyond_the_limit_is_a_timeout_where_nobody_looked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "_LEAST_LOOK_SECONDS", 1_000.0)
    with VerifierPool(f"{HERE}:busy", workers=1, seconds=0.2) as pool:
        late, after = pool.judge_all([("0.3", ""), ("0", "")])
    assert (late.verdict, late.value, late.message) == (Verdict.TIMEOUT, -1.0, "stopped after 0.2 s of CPU time")
    assert late.seconds >= 0.3
    assert after.verdict is Verdict.CORRECT


def test_counting_starts_when_work_starts():
    with VerifierPool(f"{HERE}:busy", workers=1, seconds=0.4) as pool:
        judgements = pool.judge_all([("0.2", "")] * 4)  # the last waits longer than its limit, and is not the first
    assert [judgement.verdict for judgement in judgements] == [Verdict.CORRECT] * 4
    assert all(0.2 <= judgement.seconds < 0.4 for judgement in judgements)


def test_time_asleep_is_not_counted_until_the_wall_limit(monkeypatch: pytest.MonkeyPatch):
    with VerifierPool(f"{HERE}:sleepy", workers=1, seconds=0.1) as pool:
        judgement = pool.judge_all([("0.5", "")])[0]
    assert judgement.verdict is Verdict.CORRECT
    assert judgement.seconds < 0.1
    assert pool.limits.wall_seconds == 30
    assert Limits(seconds=10).wall_seconds == 200
    monkeypatch.setattr(limits, "LEAST_WALL_SECONDS", 0.3)
    with VerifierPool(f"{HERE}:sleepy", workers=1, seconds=0.015) as pool:
        judgement = pool.judge_all([("600", "")])[0]
    assert judgement.verdict is Verdict.TIMEOUT
    assert re.fullmatch(r"stopped after 0\.3 s by the clock \(0\.0\d\d s of CPU time\)", judgement.message)
    assert judgement.seconds >= 0.3


def test_a_task_that_is_never_taken_up_is_no_timeout_of_its_own(monkeypatch: pytest.MonkeyPatch):
    message = WorkerPool._message
    monkeypatch.setattr(WorkerPool, "_message", lambda *args: None if "started" in args[2] else message(*args))
    with VerifierPool(f"{HERE}:sleepy", workers=1) as pool:
        pool.judge_all([("0", "")])  # the worker is up
        monkeypatch.setattr(workers, "_START_SECONDS", 0.2)
        judgement = pool.judge_all([("600", "")])[0]
    assert judgement.verdict is Verdict.CRASH
    assert judgement.message == "the worker did not take up the task within 0 s"


def test_without_proc_the_clock_alone_decides(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "tree_seconds", lambda _pid: None)
    monkeypatch.setattr(limits, "LEAST_WALL_SECONDS", 0.3)
    with VerifierPool(f"{HERE}:sleepy", workers=1, seconds=0.01) as pool:
        judgement = pool.judge_all([("600", "")])[0]
    assert (judgement.verdict, judgement.message) == (Verdict.TIMEOUT, "stopped after 0.3 s by the clock")


def test_children_gain_no_time():
    with VerifierPool(f"{HERE}:forking", workers=1, seconds=0.3) as pool:
        judgement = pool.judge_all([("", "")])[0]
    assert (judgement.verdict, judgement.message) == (Verdict.TIMEOUT, "stopped after 0.3 s of CPU time")


def test_descendants_in_other_sessions_are_counted_and_end_with_the_worker(tmp_path: Path):
    with VerifierPool(f"{HERE}:delegating", workers=1, seconds=0.3) as pool:
        judgement = pool.judge_all([(str(tmp_path / "pids"), "")])[0]
    assert (judgement.verdict, judgement.message) == (Verdict.TIMEOUT, "stopped after 0.3 s of CPU time")
    await_end([int(pid) for pid in (tmp_path / "pids").read_text().split()])


@pytest.mark.parametrize(("function", "ended_by"), [("busy", signal.SIGPROF), ("sleepy", signal.SIGALRM)])
def test_a_worker_that_nobody_looks_after_ends_itself(function: str, ended_by: signal.Signals):
    settings = {"verifier": f"{HERE}:{function}", "seconds": 0.1, "wall_seconds": 0.3, "memory_mb": 4096}
    if ended_by is signal.SIGPROF:
        settings["wall_seconds"] = 600
    program = f"from dapo.rewards import worker; worker._GRACE_S = 0.0; worker.main({settings!r})"
    order = {"ticket": 0, "response": "600", "answer": "", "stop_reason": None, "meta": {}}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(order) + "\n", text=True, stdout=subprocess.PIPE, check=False,
        env=environment,
    )  # fmt: skip
    assert done.returncode == -ended_by


@pytest.mark.parametrize(
    ("number", "message"),
    [(signal.SIGPROF, "stopped after 5 s of CPU time"), (signal.SIGALRM, "stopped after 100 s by the clock")],
)
def test_a_worker_that_was_quicker_to_end_itself_is_a_timeout(number: signal.Signals, message: str):
    """Where nobody could look in time, or there is no /proc."""
    with VerifierPool(f"{HERE}:sleepy", workers=1, seconds=5) as pool:
        pool.judge_all([("0", "")])
        ticket = pool.submit(Task("600", ""))
        assert pool._workers is not None
        await_work(pool, 1)
        (worker,) = pool._workers._workers
        os.kill(worker.process.pid, number)  # what its own timer sends
        judgement = pool.wait([ticket])[ticket]
    assert (judgement.verdict, judgement.message) == (Verdict.TIMEOUT, message)


@pytest.mark.slow
def test_a_busy_machine_changes_no_verdict():
    """More endless loops than cores, each in a session of its own, for which some kernels share out cores."""
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
        for _ in range(8 * (os.cpu_count() or 1))
    ]
    try:
        assert verdicts_of(MIXED) == EXPECTED
        with VerifierPool(f"{HERE}:busy", workers=2, seconds=0.5) as pool:
            judgements = pool.judge_all([("0.3", "")] * 6 + [("600", "")])
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert [judgement.verdict for judgement in judgements] == [*[Verdict.CORRECT] * 6, Verdict.TIMEOUT]


def await_work(pool: VerifierPool, n_workers: int) -> None:
    """Until so many workers have started on a task."""
    assert pool._workers is not None
    while sum(worker.has_started for worker in list(pool._workers._workers)) < n_workers:
        time.sleep(0.01)


def test_kill_9_of_a_worker_costs_its_own_task_only(tmp_path: Path):
    (tmp_path / "there").touch()
    with VerifierPool(f"{HERE}:waiting", workers=2, seconds=20) as pool:
        first = pool.judge_all([(str(tmp_path / "there"), "")] * 2)
        victims = [pool.submit(Task(str(tmp_path / "later"), "")) for _ in range(2)]
        await_work(pool, 2)
        os.kill(pool.worker_pids()[0], signal.SIGKILL)
        (tmp_path / "later").touch()
        later = pool.submit(Task(str(tmp_path / "there"), ""))
        verdicts = pool.wait([*victims, later])
    assert all(judgement.verdict is Verdict.CORRECT for judgement in first)
    assert sorted(verdicts[ticket].verdict for ticket in victims) == [Verdict.CORRECT, Verdict.CRASH]
    assert "SIGKILL" in next(j.message for j in verdicts.values() if j.verdict is Verdict.CRASH)
    assert verdicts[later].verdict is Verdict.CORRECT


def test_a_worker_that_cannot_be_made_for_a_moment_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    real, attempts = subprocess.Popen, []

    def scarce(*args, **options) -> subprocess.Popen:
        attempts.append(time.monotonic())
        if len(attempts) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*args, **options)

    with VerifierPool(f"{HERE}:sleepy", workers=2, seconds=20) as pool:
        monkeypatch.setattr(subprocess, "Popen", scarce)
        assert pool.judge_all([("0", "")])[0].verdict is Verdict.CORRECT
    assert attempts[2] - attempts[0] > 0.5  # not in one burst


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EAGAIN, errno.ENOMEM])
def test_workers_that_can_never_be_made_are_a_crash_that_says_why(monkeypatch: pytest.MonkeyPatch, code: int):
    def none(*_args, **_options) -> None:
        raise OSError(code, os.strerror(code))

    with VerifierPool(f"{HERE}:sleepy", workers=2, seconds=20) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", none)
            judgements = pool.judge_all([("0", "")] * 3)
        assert [judgement.verdict for judgement in judgements] == [Verdict.CRASH] * 3
        assert os.strerror(code) in judgements[0].message
        assert pool.judge_all([("0", "")])[0].verdict is Verdict.CORRECT  # when there is room again


def test_a_missing_second_worker_leaves_the_work_to_the_first(monkeypatch: pytest.MonkeyPatch):
    real, made = subprocess.Popen, []

    def one(*args, **options) -> subprocess.Popen:
        if made:
            raise OSError(errno.EAGAIN, "no more processes")
        made.append(real(*args, **options))
        return made[0]

    with VerifierPool(f"{HERE}:sleepy", workers=2, seconds=20) as pool:
        monkeypatch.setattr(subprocess, "Popen", one)
        judgements = pool.judge_all([("0.5", "")] * 6)  # longer than three attempts at a second worker
    assert [judgement.verdict for judgement in judgements] == [Verdict.CORRECT] * 6


def test_no_file_descriptors_left_is_not_waited_for_for_ever():
    program = (
        f"import os, resource, sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        "from dapo.rewards import Task, VerifierPool;"
        f"pool = VerifierPool('{HERE}:sleepy', workers=2); held = [];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "try:\n"
        "    while True: held.append(os.open('/dev/null', 0))\n"
        "except OSError: pass\n"
        "for descriptor in held[:3]: os.close(descriptor)\n"  # the pool's own pipe opens, a worker's do not
        "judgement = pool.judge_all([('0', '')])[0]\n"
        "print(judgement.verdict.value, judgement.message); os._exit(0)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], text=True, stdout=subprocess.PIPE, check=True, env=environment
    )
    assert done.stdout.startswith("CRASH")
    assert "Too many open files" in done.stdout


def test_when_the_thread_ends_everybody_is_told_why(monkeypatch: pytest.MonkeyPatch):
    with VerifierPool(f"{HERE}:sleepy", workers=1, seconds=20) as pool:
        pool.judge_all([("0", "")])
        tickets = [pool.submit(Task("600", "")) for _ in range(3)]
        await_work(pool, 1)  # two wait

        def broken(_pool: WorkerPool) -> None:
            raise KeyError("a defect")

        monkeypatch.setattr(WorkerPool, "_hand_out", broken)
        tickets.append(pool.submit(Task("0", "")))
        judgements = pool.wait(tickets)
        later = pool.judge_all([("0", "")])[0]
    for judgement in (*judgements.values(), later):
        assert judgement.verdict is Verdict.CRASH
        assert "KeyError: 'a defect' (test_pool.py:" in judgement.message
    assert pool.worker_pids() == []


def test_memory_is_bounded():
    with VerifierPool(f"{HERE}:greedy", workers=1, seconds=20, memory_mb=512) as pool:
        eater, neighbour = pool.judge_all([("eat", ""), ("fast", "")])
    assert eater.verdict is Verdict.CRASH
    assert "memory" in eater.message
    assert neighbour.verdict is Verdict.CORRECT


def test_user_functions_give_values_and_their_errors_are_crashes():
    assert rewards.judge("0.25", "", verifier=f"{HERE}:graded").value == 0.25
    assert rewards.judge("0.25", "", verifier=f"{HERE}:graded").graded
    crash = rewards.judge("this", "", verifier=f"{HERE}:faulty")
    assert (crash.verdict, crash.value) == (Verdict.CRASH, -1.0)
    assert "no opinion on this" in crash.message
    untyped = rewards.judge("", "", verifier=f"{HERE}:untyped")
    assert (untyped.value, untyped.graded) == (1.0, True)
    chat = rewards.judge("a", "a", verifier=f"{HERE}:chatty", meta={"bonus": 0.5})
    assert (chat.verdict, chat.value) == (Verdict.CORRECT, 0.5)
    missing = rewards.judge("a", "a", verifier="no_such_module:function")
    assert missing.verdict is Verdict.CRASH
    assert "no_such_module" in missing.message


def test_nan_is_not_a_reward():
    assert rewards.judge("nan", "", verifier=f"{HERE}:graded").verdict is Verdict.CRASH


def test_meta_that_is_no_json_is_the_callers_error():
    with VerifierPool(f"{HERE}:graded", workers=1) as pool:
        with pytest.raises(TypeError):
            pool.submit(Task("1", "", meta={"set": {1}}))
        assert pool.judge_all([("1", "")])[0].value == 1.0


def test_close_leaves_no_process():
    pool = VerifierPool(f"{HERE}:sleepy", workers=2, seconds=30)
    pool.judge_all([("0", "")] * 4)
    pool.submit(Task("600", ""))
    await_work(pool, 1)
    pids = pool.worker_pids()
    assert pids
    pool.close()
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # a zombie would still be found
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(Task("Answer: 1", "1"))


def test_workers_leave_with_their_parent():
    program = (
        f"import os, sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r});"
        "from dapo.rewards import Task, VerifierPool;"
        f"pool = VerifierPool('{HERE}:sleepy', workers=2, seconds=1); pool.judge_all([('0', '')] * 2);"
        "pool.submit(Task('600', ''))\n"
        "while not any(worker.has_started for worker in pool._workers._workers): time.sleep(0.01)\n"
        "print(*pool.worker_pids(), flush=True); os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], text=True, stdout=subprocess.PIPE, check=False, env=environment
    )
    await_end([int(pid) for pid in done.stdout.split()])


def test_a_pool_made_in_a_short_lived_thread_keeps_its_workers():
    made: list[VerifierPool] = []

    def make() -> None:
        made.append(VerifierPool("math", workers=1))
        made[0].judge_all([MIXED[3]])

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    time.sleep(0.2)
    with made[0] as pool:
        pids = pool.worker_pids()
        assert pool.judge_all(MIXED)[3].verdict is Verdict.CORRECT
        assert pool.worker_pids() == pids


def test_rewards_and_workers_do_not_import_torch():
    code = "import sys, dapo.rewards, dapo.rewards.worker; sys.exit('torch' in sys.modules or 'sympy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


def length(response: str, answer: str, meta: dict) -> Score:  # noqa: ARG001
    return Score(float(len(response)), response.endswith("end"))


@pytest.mark.parametrize("room", [65_536, 1_000])
def test_border_a_task_longer_than_a_pipe_holds_arrives_whole(room: int, monkeypatch: pytest.MonkeyPatch):
    """65,536 bytes are written to a worker at a time, or as many as its pipe has room for."""
    write = os.write
    monkeypatch.setattr("os.write", lambda pipe, data: write(pipe, data[:room]))
    sizes = [*range(65_300, 65_600, 37), 65_535, 65_536, 65_537, 131_073, 3]
    with VerifierPool(f"{HERE}:length", workers=1) as pool:
        judgements = pool.judge_all([("x" * (n - 3) + "end", "") for n in sizes])
    assert [(judgement.value, judgement.verdict) for judgement in judgements] == [(n, Verdict.CORRECT) for n in sizes]


def test_border_two_workers_judge_every_task_once_in_order():
    with VerifierPool(f"{HERE}:graded", workers=2) as pool:
        for n in (0, 1, 2, 3, 5):
            judgements = pool.judge_all([(str(i), "") for i in range(n)])
            assert [judgement.value for judgement in judgements] == list(range(n))
