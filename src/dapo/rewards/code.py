"""Programs against a problem's tests. They run jailed (`jail.py`); what they print or return is compared here.

A program sees its inputs and never what is expected, and neither its exit code nor anything it says about itself
makes it correct. Off unless a run names the verifier `code`.

`meta["tests"]` (or the reference itself, as JSON) is a list of `{"stdin": "2 3", "stdout": "5"}` for programs, or of
`{"args": [2, 3], "expected": 5}` with `meta["function"]` for functions.
"""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from dapo.rewards.decision import Decision
from dapo.rewards.process_tree import Sleep, children_seconds, tree_seconds
from dapo.types import Verdict

MAX_PROGRAM_CHARS = 200_000
MAX_OUTPUT_BYTES = 1_000_000
MAX_TESTS = 1_000
PROGRAM_MEMORY_MB = 512
_JAIL = Path(__file__).with_name("jail.py")
_FENCE = "```"
_LANGUAGE = re.compile(r"[ \t]*([A-Za-z0-9+_-]*)")
_NEAR_INTEGER = 1e-6  # what rounding leaves: nine digits alone would take 1000000000500.0 for 10^12
_LOOK_SECONDS = 0.1  # between two looks at what a program has used
_UID_BASE = 1_500_000_000
_MAX_PIDS, _SESSIONS = 1 << 22, 512
ISOLATION_REMEDY = (
    "Programs run only where Linux namespaces isolate them: run as root, or allow unprivileged user namespaces "
    "(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0)."
)


class TestsError(ValueError):
    """The problem's tests cannot be used."""


@dataclass(frozen=True, slots=True)
class JailedRun:
    """What a jailed program did."""

    code: int | None = None  # exit code, 128 + signal
    stdout: bytes = b""
    results: bytes = b""
    stderr: bytes = b""
    stopped: str = ""  # at which limit, in words
    is_overflow: bool = False
    setup_error: str = ""


class Allowance:
    """What a response's programs may use together: CPU time, and as much time asleep.

    In the jail there is nothing to wait for, so what sleeps is stopped long before the wall-clock limit of a task; what
    is only kept waiting for a core does not count as asleep.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.used = self.asleep = 0.0  # by programs that have ended

    def left(self) -> float:
        """CPU time for the next one."""
        return max(0.1, self.seconds - self.used)

    def why_stopped(self, used: float, asleep: float) -> str:
        """Which limit is reached with what the present program has used; empty while none is."""
        if self.used + used >= self.seconds:
            return f"stopped after {self.seconds:g} s of CPU time"
        return f"stopped after {self.seconds:g} s asleep" if self.asleep + asleep >= self.seconds else ""


def decide(response: str, answer: str, meta: Mapping[str, object], *, seconds: float) -> Decision:
    """CORRECT when the program passes every test."""
    program = program_in(response)
    if program is None:
        return Decision(Verdict.UNPARSEABLE, None, "no code block in the response")
    shown = program.strip()[:200]
    if len(program) > MAX_PROGRAM_CHARS:
        return Decision(Verdict.WRONG, shown, f"a program of more than {MAX_PROGRAM_CHARS} characters")
    function, tests = tests_in(answer, meta)
    allowance = Allowance(seconds)
    if function is not None:
        return _judge_function(program, function, tests, allowance)
    for number, test in enumerate(tests, 1):
        run = run_jailed(program, stdin=str(test["stdin"]), allowance=allowance)
        decision = _failure(run, shown, number)
        if decision is not None:
            return decision
        if run.code != 0:
            return Decision(Verdict.WRONG, shown, f"test {number}: exit code {run.code}: {_last_line(run.stderr)}")
        if not same_output(run.stdout, str(test["stdout"])):
            return Decision(Verdict.WRONG, shown, f"test {number}: another output")
    return Decision(Verdict.CORRECT, shown)


def program_in(response: str) -> str | None:
    """The last Python block, else the last block of any kind; None when there is none."""
    blocks = list(fenced_blocks(response[-1_000_000:]))
    python = [body for language, body in blocks if language.lower() in ("python", "py", "python3")]
    chosen = python or [body for language, body in blocks if language == ""]
    return chosen[-1] if chosen else None


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Language and body of every fenced block, the last one perhaps unclosed. Each sign is looked at once."""
    start = text.find(_FENCE)
    while start >= 0 and (newline := text.find("\n", start)) >= 0:
        language = _LANGUAGE.match(text, start + len(_FENCE))
        assert language is not None, "the pattern matches nothing as well"
        close = text.find("\n" + _FENCE, newline + 1)
        yield language[1], text[newline + 1 :] if close < 0 else text[newline + 1 : close]
        start = -1 if close < 0 else text.find(_FENCE, close + 1 + len(_FENCE))


def tests_error(answer: str, meta: Mapping[str, object]) -> str | None:
    """Why a problem's tests cannot be used, or None."""
    try:
        tests_in(answer, meta)
    except TestsError as error:
        return str(error)
    return None


def tests_in(answer: str, meta: Mapping[str, object]) -> tuple[str | None, list[Mapping[str, Any]]]:
    """The function's name, None for a program, and its tests. TestsError when there are none to fail."""
    source: Any = meta
    if "tests" not in meta:
        try:
            source = json.loads(answer)
        except json.JSONDecodeError as error:
            raise TestsError(f"no meta.tests, and the reference is not JSON: {error}") from None
        if isinstance(source, Mapping) and "tests" not in source:
            source = [source]  # a data file's list of one test
        source = {"tests": source} if isinstance(source, list) else source
    tests = source.get("tests") if isinstance(source, Mapping) else None
    function = source.get("function", meta.get("function")) if isinstance(source, Mapping) else None
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests or len(tests) > MAX_TESTS:
        raise TestsError(f"tests must be a list of 1 to {MAX_TESTS}")
    wanted = ("args", "expected") if function is not None else ("stdin", "stdout")
    for number, test in enumerate(tests, 1):
        if not isinstance(test, Mapping) or any(key not in test for key in wanted):
            raise TestsError(f"test {number} needs the keys {' and '.join(wanted)}")
    return (None if function is None else str(function)), list(tests)


def _judge_function(program: str, function: str, tests: list[Mapping[str, Any]], allowance: Allowance) -> Decision:
    shown = program.strip()[:200]
    calls = [{"args": test["args"], "kwargs": test.get("kwargs", {})} for test in tests]
    run = run_jailed(program, function=function, calls=calls, allowance=allowance)
    decision = _failure(run, shown, 0)
    if decision is not None:
        return decision
    lines = run.results.split(b"\n")[:-1]
    if len(lines) != len(tests):
        return Decision(Verdict.WRONG, shown, f"{len(lines)} of {len(tests)} results: {_last_line(run.stderr)}")
    for number, (line, test) in enumerate(zip(lines, tests, strict=True), 1):
        try:
            result = json.loads(line)["result"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return Decision(Verdict.WRONG, shown, f"test {number}: a result that is no value")
        if not same_value(result, test["expected"]):
            return Decision(Verdict.WRONG, shown, f"test {number}: another result")
    return Decision(Verdict.CORRECT, shown)


def _failure(run: JailedRun, shown: str, number: int) -> Decision | None:
    where = f"test {number}: " if number else ""
    if run.setup_error:
        return Decision(Verdict.CRASH, shown, f"the jail could not be built: {run.setup_error}")
    if run.stopped:
        return Decision(Verdict.TIMEOUT, shown, f"{where}{run.stopped}")
    if run.is_overflow:
        return Decision(Verdict.WRONG, shown, f"{where}more than {MAX_OUTPUT_BYTES} bytes of output")
    return None


def same_output(said: bytes, expected: str) -> bool:
    """Equal text, but for white space at line ends and at the end."""
    try:
        text = said.decode("utf-8")
    except UnicodeDecodeError:
        return False
    lines = [[line.rstrip() for line in side.rstrip().split("\n")] for side in (text, expected)]
    return lines[0] == lines[1]


def same_value(said: Any, expected: Any) -> bool:
    """Equal JSON values; true is not 1, floats agree to nine digits, and a float for an integer is that integer.

    Both sides are plain data by now.
    """
    if isinstance(said, bool) or isinstance(expected, bool):
        return said is expected
    if isinstance(said, int | float) and isinstance(expected, int | float):
        if isinstance(said, int) and isinstance(expected, int):
            return said == expected
        try:
            is_close = math.isclose(said, expected, rel_tol=1e-9, abs_tol=1e-12)
            if is_close and (isinstance(said, int) or isinstance(expected, int)):
                return abs(Fraction(said) - Fraction(expected)) < _NEAR_INTEGER
            return is_close
        except OverflowError:
            return False
    if isinstance(said, list) and isinstance(expected, list | tuple):
        return len(said) == len(expected) and all(map(same_value, said, expected))
    if isinstance(said, dict) and isinstance(expected, Mapping):
        return said.keys() == expected.keys() and all(same_value(said[key], expected[key]) for key in said)
    return type(said) is type(expected) and bool(said == expected)


def run_jailed(
    program: str,
    *,
    allowance: Allowance,
    stdin: str = "",
    function: str | None = None,
    calls: Sequence[Mapping[str, Any]] = (),
) -> JailedRun:
    """Run a program in the jail until it ends, has used its allowance or writes too much."""
    job = {
        "program": program,
        "function": function,
        "calls": list(calls),
        "seconds": math.ceil(allowance.left()),  # of CPU time: the kernel's limit, in case the parent misses it
        "memory_mb": PROGRAM_MEMORY_MB,
        "uid": user_id(),
    }
    before = children_seconds()
    process, pipes = start_jail()
    try:
        run = _exchange(process, pipes, json.dumps(job).encode(), stdin.encode("utf-8", "replace"), allowance)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        allowance.used += children_seconds() - before
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None, "pipes were asked for"
            pipe.close()
        for descriptor in (pipes["status"], pipes["result"]):
            os.close(descriptor)
    return run if run.stopped else replace(run, stopped=allowance.why_stopped(0.0, 0.0))  # it may end between two looks


def user_id(session: int = 0) -> int:
    """An unused user, one per process of ours and session: the limit on its processes is then its own."""
    return _UID_BASE + os.getpid() + session % _SESSIONS * _MAX_PIDS if os.geteuid() == 0 else 0


def start_jail() -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    """The jail's process, and our ends of the pipes: to write its job, to read its status and the results."""
    pipes = {name: os.pipe() for name in ("job", "status", "result")}
    theirs = (pipes["job"][0], pipes["status"][1], pipes["result"][1])
    process = subprocess.Popen(
        [sys.executable, "-P", "-s", "-S", "-B", str(_JAIL), *map(str, theirs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=theirs,
        env={"PYTHONHASHSEED": "0"},  # sets print in the same order each time
        cwd="/",
    )
    for descriptor in theirs:
        os.close(descriptor)
    return process, {"job": pipes["job"][1], "status": pipes["status"][0], "result": pipes["result"][0]}


def _exchange(
    process: subprocess.Popen[bytes],
    pipes: Mapping[str, int],
    job: bytes,
    stdin: bytes,
    allowance: Allowance,
) -> JailedRun:
    """Feed the job and the input, collect the outputs, each within its bound."""
    assert process.stdin is not None, "a pipe was asked for"
    assert process.stdout is not None, "a pipe was asked for"
    assert process.stderr is not None, "a pipe was asked for"
    unsent = {pipes["job"]: job, os.dup(process.stdin.fileno()): stdin}
    process.stdin.close()
    reading = {
        process.stdout.fileno(): "stdout",
        pipes["result"]: "results",
        process.stderr.fileno(): "stderr",
        pipes["status"]: "status",
    }
    received = dict.fromkeys(reading.values(), b"")
    code: int | None = None
    is_overflow, stopped = False, ""
    sleep, look_at = Sleep(process.pid, _LOOK_SECONDS), time.monotonic() + _LOOK_SECONDS
    with selectors.DefaultSelector() as selector:
        for descriptor in unsent:
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_WRITE)
        for descriptor in reading:
            selector.register(descriptor, selectors.EVENT_READ)
        while reading and not is_overflow and not stopped:
            ready = selector.select(max(0.0, look_at - time.monotonic()))
            if time.monotonic() >= look_at:
                if not ready:
                    sleep.look()
                stopped = allowance.why_stopped(tree_seconds(process.pid) or 0.0, sleep.seconds)
                look_at = time.monotonic() + _LOOK_SECONDS
            for key, _ in ready:
                if key.fd in unsent:
                    _feed(selector, key.fd, unsent)
                    continue
                name = reading[key.fd]
                data = os.read(key.fd, 65_536)
                if not data:
                    selector.unregister(key.fd)
                    del reading[key.fd]
                elif name == "stderr":
                    received[name] = (received[name] + data)[-4_000:]
                else:
                    received[name] += data
                    is_overflow |= len(received[name]) > MAX_OUTPUT_BYTES
        for descriptor in unsent:
            os.close(descriptor)
    allowance.asleep += sleep.seconds
    setup_error = ""
    for line in received["status"].splitlines():
        message = json.loads(line)
        code = message.get("code", code)
        setup_error = message.get("setup_error", setup_error)
    if code is None and not (stopped or is_overflow or setup_error):
        setup_error = f"it ended without a report; {_last_line(received['stderr'])}"
    return JailedRun(
        code, received["stdout"], received["results"], received["stderr"], stopped, is_overflow, setup_error
    )


def _feed(selector: selectors.BaseSelector, descriptor: int, unsent: dict[int, bytes]) -> None:
    try:
        unsent[descriptor] = unsent[descriptor][os.write(descriptor, unsent[descriptor][:65_536]) :]
    except BlockingIOError:
        return
    except BrokenPipeError:
        unsent[descriptor] = b""
    if not unsent[descriptor]:
        selector.unregister(descriptor)
        os.close(descriptor)
        del unsent[descriptor]


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:200] if lines else ""


@functools.lru_cache(maxsize=1)
def isolation_error() -> str | None:
    """Why programs cannot be isolated on this machine, or None."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"programs cannot be isolated on {sys.platform} {platform.machine()}."
    run = run_jailed("print(6 * 7)", allowance=Allowance(30))
    if run.stdout == b"42\n" and run.code == 0:
        return None
    return f"programs cannot be isolated on this machine ({run.setup_error or _last_line(run.stderr)})."
