"""A Python session in the jail of verifier `code`: blocks share their variables, and one that goes too far ends it.

Nothing that a block says is trusted: its output is text for the model, and the only thing decided by it is when the
block has ended. Between two blocks the jailed process is stopped, so that what a block left running gets no time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import selectors
import signal
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from subprocess import Popen

from dapo.errors import EngineError
from dapo.rewards import code
from dapo.rewards.code import Allowance
from dapo.rewards.process_tree import Sleep, tree, tree_seconds

MEMORY_MB = code.PROGRAM_MEMORY_MB
MAX_OUTPUT_BYTES = code.MAX_OUTPUT_BYTES
SESSION_SECONDS = 120  # CPU time of all blocks together: the kernel's limit, should nobody else look
_LOOK_SECONDS = 0.1
_READ_BYTES = 65_536
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a block. `ended` says why the session is over, and with it every variable; mostly empty."""

    output: str
    failed: bool = False
    ended: str = ""


class Interpreter:
    """Starts its process with the first block, and another one after a block that ended it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._session: Session | None = None

    def run(self, block: str, allowance: Allowance) -> Ran:
        """One block; its allowance may be shared with others."""
        session = self._session or Session(self._seed)
        self._session = session
        ran = session.run(block, allowance)
        if ran.ended:
            self.close()
        return ran

    def close(self) -> None:
        """End the process, if there is one."""
        if self._session is not None:
            self._session.close()
            self._session = None


class Session:
    """One jailed process with its pipes. It ends with `close`, with this object, or with our process."""

    def __init__(self, seed: int) -> None:
        process, pipes = code.start_jail()
        assert process.stdin is not None, "a pipe was asked for"
        assert process.stdout is not None, "a pipe was asked for"
        self._process = process
        self._blocks, self._output = process.stdin.fileno(), process.stdout.fileno()
        self._status, self._marks = pipes["status"], pipes["result"]
        self.close = weakref.finalize(self, end, process, (self._status, self._marks))
        job = {
            "session": seed,
            "seconds": SESSION_SECONDS,
            "memory_mb": MEMORY_MB,
            "uid": code.user_id(next(_numbers)),
        }
        with contextlib.suppress(BrokenPipeError), os.fdopen(pipes["job"], "w") as file:
            json.dump(job, file)
        for descriptor in (self._blocks, self._output, self._status, self._marks):
            os.set_blocking(descriptor, False)

    def run(self, block: str, allowance: Allowance) -> Ran:
        """Run one block until its mark comes back, its process ends, or a limit is reached."""
        mark = secrets.token_hex(16)
        self._signal(signal.SIGCONT)
        read_all(self._output)  # what a thread of an earlier block wrote in the meantime
        before, sleep = self._seconds(), Sleep(self._process.pid, _LOOK_SECONDS)
        try:
            unsent = json.dumps({"mark": mark, "code": block}).encode() + b"\n"
            return self._exchange(
                unsent, mark, lambda: allowance.why_stopped(self._seconds() - before, sleep.seconds), sleep
            )
        finally:
            allowance.used += max(0.0, self._seconds() - before)
            allowance.asleep += sleep.seconds
            self._signal(signal.SIGSTOP)

    def _exchange(self, unsent: bytes, mark: str, why_stopped: Callable[[], str], sleep: Sleep) -> Ran:
        received = dict.fromkeys((self._output, self._marks, self._status), b"")
        look_at = time.monotonic() + _LOOK_SECONDS
        with selectors.DefaultSelector() as selector:
            for descriptor in received:
                selector.register(descriptor, selectors.EVENT_READ)
            selector.register(self._blocks, selectors.EVENT_WRITE)
            while True:
                ready = [key.fd for key, _ in selector.select(max(0.0, look_at - time.monotonic()))]
                if time.monotonic() >= look_at:
                    if not ready:
                        sleep.look()
                    if why := why_stopped():
                        return Ran(text_of(received[self._output]), True, why)
                    look_at = time.monotonic() + _LOOK_SECONDS
                for descriptor in ready:
                    if descriptor == self._blocks:
                        unsent = send(descriptor, unsent)
                        is_done = not unsent
                    else:
                        data = read(descriptor)
                        received[descriptor] += data or b""
                        is_done = data == b""
                    if is_done:
                        selector.unregister(descriptor)
                ran = self._outcome(received, mark, is_over=self._status not in selector.get_map())
                if ran is not None:
                    return ran

    def _outcome(self, received: dict[int, bytes], mark: str, *, is_over: bool) -> Ran | None:
        """What is known of the block by now; None while it runs."""
        output = received[self._output]
        *lines, received[self._marks] = received[self._marks].split(b"\n")
        for line in lines:
            if (failed := failed_of(line, mark)) is not None:
                return Ran(text_of(output + read_all(self._output)), failed)
        if is_over:
            return Ran(text_of(output + read_all(self._output)), True, why_ended(received[self._status]))
        if max(map(len, received.values())) > MAX_OUTPUT_BYTES:
            return Ran(text_of(output), True, f"stopped after {MAX_OUTPUT_BYTES:,} bytes of output")
        return None

    def _seconds(self) -> float:
        return tree_seconds(self._process.pid) or 0.0

    def _signal(self, number: signal.Signals) -> None:
        """To the program alone: the jail's own two processes wait for it, and would not notice our end."""
        for pid in tree(self._process.pid)[2:]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def why_ended(report: bytes) -> str:
    """The jail's report in words; an error where there never was a session."""
    message = json.loads(report.splitlines()[-1]) if report else {"setup_error": "it ended without a report"}
    if "setup_error" in message:
        raise EngineError(
            f"environment python: the jail could not be built: {message['setup_error']}.",
            remedy=code.ISOLATION_REMEDY,
        )
    status = int(message["code"])
    how = f"signal {signal.Signals(status - 128).name}" if status > 128 else f"exit code {status}"
    return f"the interpreter ended ({how})"


def end(process: Popen[bytes], descriptors: tuple[int, ...]) -> None:
    """The supervisor's death ends all within the jail."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None, "pipes were asked for"
        with contextlib.suppress(OSError):
            pipe.close()
    for descriptor in descriptors:
        os.close(descriptor)


def failed_of(line: bytes, mark: str) -> bool | None:
    """Whether the block with this mark failed; None for any other line, whoever wrote it."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(message, dict) and message.get("mark") == mark
    return bool(message.get("failed")) if is_ours else None


def send(descriptor: int, data: bytes) -> bytes:
    """What could not be written yet; nothing, where nobody reads any more."""
    try:
        return data[os.write(descriptor, data[:_READ_BYTES]) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return b""


def read(descriptor: int) -> bytes | None:
    """What is there: empty at the end, None for nothing yet."""
    try:
        return os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return None


def read_all(descriptor: int) -> bytes:
    """What is there now, to the limit of a block's output."""
    found = b""
    while len(found) <= MAX_OUTPUT_BYTES and (data := read(descriptor)):
        found += data
    return found


def text_of(output: bytes) -> str:
    return output.decode("utf-8", "replace")
