"""Any program as a verifier. It is started once and kept: one JSON line in for each response, one JSON line out.

In: `{"id", "response", "answer", "stop_reason", "meta"}`. Out: `{"verdict": "CORRECT"}` (WRONG, UNPARSEABLE) with
optional `"extracted"` and `"message"`; or a graded `{"value": 0.5}`, with `"correct": true` where that is known. A line
without a verdict or a value is no answer and is passed over. An `"id"` in the answer must be the request's.

A program that answers once and leaves is started again for the next response. One that waits for the end of its input,
or keeps its answer in a buffer until then, is noticed by its being asleep: its input is closed, and from then on it
gets one response each time it is started.

The program is named with the verifier (`command:PROGRAM ARGUMENTS`), in `meta["command"]`, or by the environment
variable DAPO_VERIFIER_COMMAND.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import signal
import subprocess
import time
from typing import Any

from dapo.processes import users_environment
from dapo.rewards.decision import Decision, Outcome
from dapo.rewards.process_tree import Sleep, die_with_parent, tree
from dapo.types import Score, Task, Verdict

VARIABLE = "DAPO_VERIFIER_COMMAND"
_ALLOWED = ("CORRECT", "WRONG", "UNPARSEABLE")
_MAX_OUTPUT_BYTES = 1_000_000
_MAX_ALIVE = 4  # programs of one worker; problems may name programs of their own
_PATIENCE_SECONDS = 2.0  # asleep without an answer, before the input is closed
_LOOK_SECONDS = 0.1  # between two looks whether it is asleep
_END_SECONDS = 0.005  # between two looks whether it has ended, once that is likely
_CHUNK = 65_536


class CommandError(RuntimeError):
    """The program failed or answered something else than a verdict."""


def decide(task: Task) -> Outcome:
    """Ask the program about one task. The worker around it has the limits, and is killed with its children."""
    program = program_of(command_of(task))
    answer = program.ask(
        {
            "response": task.response,
            "answer": task.answer,
            "stop_reason": task.stop_reason.value if task.stop_reason else None,
            "meta": {key: value for key, value in task.meta.items() if key != "command"},
        }
    )
    return outcome_of(answer, program.name)


def command_of(task: Task) -> list[str]:
    command = task.meta.get("command") or os.environ.get(VARIABLE)
    if isinstance(command, str):
        return shlex.split(command)
    if isinstance(command, list) and command and all(isinstance(part, str) for part in command):
        return [str(part) for part in command]
    raise CommandError(f'no command: give meta {{"command": ["program", "argument"]}} or set {VARIABLE}')


def outcome_of(answer: dict[str, Any], program: str) -> Outcome:
    """The verdict or the value of an answer."""
    if answer.get("verdict") in _ALLOWED:
        extracted = answer.get("extracted")
        return Decision(
            Verdict(answer["verdict"]),
            None if extracted is None else str(extracted)[:200],
            str(answer.get("message", "")),
        )
    if isinstance(answer.get("value"), int | float) and answer.get("correct") in (True, False, None):
        return Score(float(answer["value"]), answer.get("correct"), answer.get("parts") or {})
    raise CommandError(f"{program} answered {json.dumps(answer)[:200]}, which is neither a verdict nor a value")


class Program:
    """One program of the user's, alive from response to response where it can be."""

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.name = argv[0]
        self.answers_once = False  # learnt: it leaves after an answer, or answers at the end of its input only
        self.process: subprocess.Popen[bytes] | None = None
        self._n_asked = 0  # of all its lives: the ids of requests
        self._n_answered = 0  # of this life
        self._said = b""
        self._errors = b""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Its answer, or CommandError. After an error a fresh process gets the next request."""
        self._n_asked += 1
        line = json.dumps({"id": self._n_asked, **request}).encode() + b"\n"
        try:
            self._dismiss_if_gone()
            was_running = self.process is not None
            answer = self._exchange(line)
            if answer is None and was_running:
                answer = self._try_afresh(line)
            if answer is None:
                raise CommandError(self._how_it_ended())
            if answer.get("id", self._n_asked) != self._n_asked:
                raise CommandError(f"{self.name} answered request {answer['id']} when asked {self._n_asked}")
        except BaseException:
            self.stop()
            raise
        self._n_answered += 1
        if self.answers_once:
            self._see_off()
        return answer

    def stop(self) -> None:
        if self.process is None:
            return
        for pid in tree(self.process.pid) if self.process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.process, self._n_answered, self._said = None, 0, b""

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**users_environment(), "PYTHONUNBUFFERED": "1"},  # a forgotten flush is the commonest mistake
                preexec_fn=die_with_parent,
            )  # fmt: skip
        except OSError as error:
            raise CommandError(f"{self.name}: {error.strerror}") from None
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None, "pipes were asked for"
            os.set_blocking(pipe.fileno(), False)
        self._said = self._errors = b""
        return self.process

    def _dismiss_if_gone(self) -> None:
        """Forget a process that has left; what it wrote since its last answer belongs to no request."""
        if self.process is None:
            return
        self._drain()
        if self.process.poll() is not None:
            self.answers_once |= self._n_answered == 1
            self.stop()
        elif answer_in(self._said)[0] is not None:
            raise CommandError(f"{self.name} answered twice; one line for each line it reads")
        self._said = b""

    def _try_afresh(self, line: bytes) -> dict[str, Any] | None:
        """It ended over the line, or was about to leave when it got it: a fresh one tells, whatever the exit code."""
        had_answered_once = self._n_answered == 1
        self.stop()
        answer = self._exchange(line)
        self.answers_once |= had_answered_once and answer is not None
        return answer

    def _see_off(self) -> None:
        """Let it end by itself, with what it may have to tidy up, unless it only sleeps."""
        assert self.process is not None, "it has just answered"
        self._close_input()
        sleep = Sleep(self.process.pid, _END_SECONDS)
        while self.process.poll() is None and sleep.seconds < _PATIENCE_SECONDS:
            self._drain()
            self._said = b""
            time.sleep(_END_SECONDS)
            sleep.look()
        self.stop()

    def _close_input(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def _exchange(self, line: bytes) -> dict[str, Any] | None:
        """Send the line, wait for an answer; None when the program has ended without one."""
        process = self.process or self._start()
        assert process.stdin is not None, "a pipe was asked for"
        assert process.stdout is not None, "a pipe was asked for"
        assert process.stderr is not None, "a pipe was asked for"
        unsent = line
        pause = _LOOK_SECONDS
        sleep, look_at = Sleep(process.pid, _LOOK_SECONDS), time.monotonic() + pause
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdin, selectors.EVENT_WRITE)
            for pipe in (process.stdout, process.stderr):
                selector.register(pipe, selectors.EVENT_READ)
            while True:
                ready = selector.select(max(0.0, look_at - time.monotonic()))
                for key, _ in ready:
                    if key.fileobj is process.stdin:
                        unsent = self._feed(unsent)
                        if not unsent:
                            selector.unregister(process.stdin)
                            if self.answers_once:
                                self._close_input()
                    elif not self._read(key.fd):
                        selector.unregister(key.fileobj)
                        if key.fileobj is process.stdout:  # it is about to end; without stderr it may go on for long
                            pause, look_at = _END_SECONDS, time.monotonic()
                has_ended = process.poll() is not None
                if has_ended:
                    self._drain()
                    self._said += b"\n"  # the last line may lack its end
                answer, rest = answer_in(self._said)
                if answer is not None:
                    self._said = rest
                    self.answers_once |= bool(unsent)  # it has not read its line: another would run into this one
                    return answer
                if has_ended:
                    return None
                if len(self._said) > _MAX_OUTPUT_BYTES:
                    raise CommandError(f"{self.name} wrote {_MAX_OUTPUT_BYTES:,} bytes without an answer")
                if not ready and time.monotonic() >= look_at:
                    sleep.look()
                    look_at = time.monotonic() + pause
                    is_first = not self._n_answered  # one that has answered before is only slow
                    if sleep.seconds >= _PATIENCE_SECONDS and is_first and not self.answers_once and not unsent:
                        self.answers_once = True
                        self._close_input()

    def _feed(self, unsent: bytes) -> bytes:
        assert self.process is not None, "it is being fed"
        assert self.process.stdin is not None, "a pipe was asked for"
        try:
            return unsent[os.write(self.process.stdin.fileno(), unsent[:_CHUNK]) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError:
            return b""  # it reads no more; it may have answered all the same

    def _read(self, descriptor: int) -> bool:
        """Take what there is on one of its outputs; False at the end."""
        assert self.process is not None, "it is being read from"
        assert self.process.stdout is not None, "a pipe was asked for"
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        if descriptor == self.process.stdout.fileno():
            self._said += data
        else:
            self._errors = (self._errors + data)[-4_000:]
        return bool(data)

    def _drain(self) -> None:
        """Everything that has arrived on both outputs by now, up to the limit."""
        assert self.process is not None, "it is being read from"
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None, "a pipe was asked for"
            before = -1
            while before != (before := len(self._said) + len(self._errors)) and len(self._said) <= _MAX_OUTPUT_BYTES:
                self._read(pipe.fileno())

    def _exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def _how_it_ended(self) -> str:
        code = self._exit_code() or 0
        complaint = (self._errors.decode("utf-8", "replace").strip().splitlines() or [""])[-1][
            -300:
        ]  # the cause stands at the end
        if code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            return f"{self.name} {how}" + (f": {complaint}" if complaint else "")
        last = (self._said.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:200]
        return f"{self.name} answered no JSON line with a verdict or a value" + (f", but {last!r}" if last else "")


def answer_in(said: bytes) -> tuple[dict[str, Any] | None, bytes]:
    """The first whole line that is an answer, and what follows it; a prompt before it on the line does not matter."""
    *lines, unfinished = said.split(b"\n")
    for number, line in enumerate(lines, 1):
        start = line.find(b"{")
        try:
            answer = json.loads(line[start:].decode("utf-8", "replace")) if start >= 0 else None
        except (ValueError, RecursionError):
            continue
        if isinstance(answer, dict) and answer.keys() & {"verdict", "value"}:
            return answer, b"\n".join([*lines[number:], unfinished])
    return None, b""


_PROGRAMS: dict[tuple[str, ...], Program] = {}  # of this worker, the one asked last at the end


def program_of(argv: list[str]) -> Program:
    program = _PROGRAMS.pop(tuple(argv), None) or Program(argv)
    while len(_PROGRAMS) >= _MAX_ALIVE:
        _PROGRAMS.pop(next(iter(_PROGRAMS))).stop()
    _PROGRAMS[tuple(argv)] = program
    return program


def program_pids() -> set[int]:
    return {program.process.pid for program in _PROGRAMS.values() if program.process is not None}
