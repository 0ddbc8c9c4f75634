"""Killable worker processes and the thread that feeds them. One task at a time each; counting starts when work starts.

The thread owns every process and pipe, so that callers in any thread only touch a queue. A worker whose task has used
its CPU time (its children's included) or sleeps beyond the wall-clock limit is killed with all its descendants and
replaced; the tasks of its neighbours are not touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from dapo.processes import python_command, python_environment
from dapo.rewards.limits import STACK_SIGNAL, Limits
from dapo.rewards.process_tree import tree, tree_seconds
from dapo.rewards.verifiers import Verifier, is_function

PROGRAM = "dapo.rewards.worker"
_START_SECONDS = 120.0  # for a worker to import its libraries, on a busy machine
_RETRY_SECONDS = 0.5  # before a process that could not be made is tried again
_MAX_FAILED_STARTS = 3
_READ_BYTES = 1 << 16
_MAX_REPLY_BYTES = 1 << 22
_LEAST_LOOK_SECONDS = 0.1  # between two readings of a task's CPU time
_STACK_SECONDS = 1.0  # for a worker to write its stack
_STACK_BYTES, _STACK_LINES = 1 << 16, 24
_MOST_STACKS = 4
_CORES = os.cpu_count() or 1

Order = dict[str, Any]
Reply = dict[str, Any]


class WorkerProcess:
    """One child with its pipes. `ticket` is the task it holds."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.stack_file = tempfile.TemporaryFile()  # noqa: SIM115  closed by `kill`
        settings = {**settings, "stack_file": self.stack_file.fileno()}
        self.process = subprocess.Popen(
            python_command("-m", settings["program"], json.dumps(settings)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if ":" in settings["verifier"] else subprocess.DEVNULL,
            env=python_environment(with_working_folder=is_function(settings["verifier"])) | fixed(settings),
            pass_fds=[self.stack_file.fileno()],
            start_new_session=True,  # its own process group: killing the group takes its children along
        )
        assert self.process.stdin is not None, "a pipe was asked for"
        assert self.process.stdout is not None, "a pipe was asked for"
        self.inbox = self.process.stdin.fileno()
        self.outbox = self.process.stdout.fileno()
        os.set_blocking(self.inbox, False)
        os.set_blocking(self.outbox, False)
        self.is_ready = False
        self.ticket: int | None = None
        self.has_started = False  # with that task
        self.unsent = b""
        self.received = b""
        self.deadline = time.monotonic() + _START_SECONDS  # by the clock
        self.look_at = float("inf")  # when the CPU time is read next
        self.since = time.monotonic()
        self.cpu_before = 0.0  # what the process and its descendants had used when the task began

    def used_seconds(self) -> float | None:
        """CPU time of the task so far; None where it cannot be read."""
        total = tree_seconds(self.process.pid)
        return None if total is None else max(0.0, total - self.cpu_before)  # read in ticks

    def stack(self) -> list[str]:
        """Ask it to write its stack, which it does whatever it is doing."""
        began = os.fstat(self.stack_file.fileno()).st_size
        if self.process.returncode is None:  # else another may have its number
            os.kill(self.process.pid, STACK_SIGNAL)
        end = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < end and os.fstat(self.stack_file.fileno()).st_size == began:
            time.sleep(0.01)
        time.sleep(0.01)  # it may be in the middle of it
        text = os.pread(self.stack_file.fileno(), _STACK_BYTES, began).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
        return [f"process {self.process.pid}:", *(f"  {line}" for line in lines[:_STACK_LINES])]

    def idle(self) -> None:
        """Nothing to count or to wait for."""
        self.ticket, self.has_started = None, False
        self.deadline = self.look_at = float("inf")

    def kill(self) -> None:
        """SIGKILL to the whole group and to descendants that have left it, then reap."""
        descendants = tree(self.process.pid)[1:] if self.process.returncode is None else []
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.stack_file):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class WorkerPool:
    """Feeds orders to up to `n_workers` processes and calls `deliver(reply)` from its own thread for each."""

    def __init__(
        self,
        verifier: Verifier,
        limits: Limits,
        n_workers: int,
        deliver: Callable[[Reply], None],
        *,
        program: str = PROGRAM,
    ) -> None:
        self._settings: dict[str, Any] = {
            "program": program,
            "verifier": verifier.name,
            "seconds": limits.seconds,
            "wall_seconds": limits.wall_seconds,
            "memory_mb": limits.memory_mb,
        }
        self._seconds = limits.seconds + verifier.grace_seconds  # of CPU time
        self._wall_seconds = limits.wall_seconds
        self._n_workers = n_workers
        self._deliver = deliver
        self._lock = threading.Lock()
        self._orders: deque[tuple[int, bytes]] = deque()
        self._workers: list[WorkerProcess] = []
        self._failed_starts = 0
        self._retry_at = 0.0
        self._stopped = ""  # why the thread ended by itself
        self._is_closing = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._thread = threading.Thread(target=self._serve, name=f"verifier {verifier.name}", daemon=True)
        self._thread.start()

    def submit(self, order: Order) -> None:
        """Queue an order, a JSON object with a `ticket`."""
        line = json.dumps(order).encode() + b"\n"  # here, where what cannot be encoded is the caller's error
        with self._lock:
            if self._is_closing:
                raise RuntimeError("the verifier pool is closed")
            stopped = self._stopped
            if not stopped:
                self._orders.append((order["ticket"], line))
        if stopped:
            self._deliver(failure(order["ticket"], "CRASH", stopped, 0.0))
        else:
            self._wake()

    def stacks(self) -> list[str]:
        """Where the workers are that have a task: the stack of each, innermost first."""
        busy = [worker for worker in list(self._workers) if worker.has_started]
        lines: list[str] = []
        for worker in busy[:_MOST_STACKS]:
            with contextlib.suppress(OSError, ValueError):  # it was killed meanwhile, and its file closed
                lines += worker.stack()
        return lines

    def worker_pids(self) -> list[int]:
        return [worker.process.pid for worker in list(self._workers)]

    def close(self) -> None:
        """Kill and reap every worker. Orders still waiting are dropped."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        os.close(self._wake_writer)
        os.close(self._wake_reader)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_writer, b"x")

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                self._hand_out()
                self._watch()
        except Exception as error:  # otherwise the waiting callers would never be answered
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(place.filename)}:{place.lineno}"
            self._stop(f"the verifier's thread ended: {type(error).__name__}: {error} ({where})")
        finally:
            for worker in self._workers:
                worker.kill()
            self._workers.clear()

    def _stop(self, why: str) -> None:
        """CRASH for what is worked on and what waits; what comes later gets it at once."""
        with self._lock:
            self._stopped = why
        for worker in self._workers:
            if worker.ticket is not None:
                self._deliver(failure(worker.ticket, "CRASH", why, time.monotonic() - worker.since))
        self._fail_waiting(why)

    def _fail_waiting(self, why: str) -> None:
        with self._lock:
            waiting, self._orders = list(self._orders), deque()
        for ticket, _ in waiting:
            self._deliver(failure(ticket, "CRASH", why, 0.0))

    def _hand_out(self) -> None:
        """Start workers while there is more to do than idle hands, and give each idle one an order."""
        with self._lock:
            n_waiting = len(self._orders)
        n_free = sum(worker.ticket is None for worker in self._workers)
        while n_free < n_waiting and len(self._workers) < self._n_workers and time.monotonic() >= self._retry_at:
            try:
                self._workers.append(WorkerProcess(self._settings))
            except OSError as error:  # no file descriptors, processes or memory left: perhaps for a moment only
                self._retry_at = time.monotonic() + _RETRY_SECONDS
                if not self._workers:  # else those there are do the work
                    self._start_failed(f"{type(error).__name__}: {error}")
                break
            n_free += 1
        for worker in self._workers:
            if not worker.is_ready or worker.ticket is not None:
                continue
            with self._lock:
                if not self._orders:
                    return
                worker.ticket, worker.unsent = self._orders.popleft()
            worker.deadline = time.monotonic() + _START_SECONDS  # replaced when the worker says it has started
            worker.since = time.monotonic()

    def _watch(self) -> None:
        """Wait for bytes, for room to write, for a wake-up, for the next deadline or the next look at CPU time."""
        busy = [worker for worker in self._workers if worker.ticket is not None or not worker.is_ready]
        now = time.monotonic()
        pause = min((min(worker.deadline, worker.look_at) - now for worker in busy), default=3600.0)
        if self._retry_at > now and self._orders:
            pause = min(pause, self._retry_at - now)
        with selectors.PollSelector() as selector:  # needs no file descriptor of its own
            selector.register(self._wake_reader, selectors.EVENT_READ, None)
            for worker in self._workers:
                selector.register(worker.outbox, selectors.EVENT_READ, worker)
                if worker.unsent:
                    selector.register(worker.inbox, selectors.EVENT_WRITE, worker)
            ready = selector.select(max(0.0, pause))
        for key, _ in ready:
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_reader, 4096)
            elif key.fd == key.data.outbox:
                self._receive(key.data)
            elif key.data in self._workers:
                self._send(key.data)
        now = time.monotonic()
        for worker in [worker for worker in busy if worker in self._workers]:
            if now >= worker.deadline:
                self._overslept(worker)
            elif now >= worker.look_at:
                self._look(worker)

    def _send(self, worker: WorkerProcess) -> None:
        try:
            sent = os.write(worker.inbox, worker.unsent[:_READ_BYTES])
            worker.unsent = worker.unsent[sent:]
        except BlockingIOError:
            return
        except BrokenPipeError:
            worker.unsent = b""  # it died; its output ends as well, and that is handled there

    def _receive(self, worker: WorkerProcess) -> None:
        try:
            data = os.read(worker.outbox, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._died(worker)
            return
        worker.received += data
        *lines, worker.received = worker.received.split(b"\n")
        for line in lines:
            self._message(worker, json.loads(line))
        if len(worker.received) > _MAX_REPLY_BYTES:
            self._replace(worker, "CRASH", "its reply was too long")

    def _message(self, worker: WorkerProcess, message: Reply) -> None:
        if "ready" in message:
            worker.is_ready, self._failed_starts = True, 0
            worker.idle()
        elif "started" in message:
            worker.has_started = True
            worker.since, worker.cpu_before = time.monotonic(), message["cpu"]
            worker.deadline = worker.since + self._wall_seconds
            worker.look_at = self._next_look(0.0)
        elif worker.ticket is not None and message.get("ticket") == worker.ticket:
            worker.idle()  # before the caller is notified: once it has the judgement, no worker is busy with it
            self._deliver(self._within_limit(message))
            if message["leaving"]:
                self._replace(worker, "CRASH", "")

    def _within_limit(self, reply: Reply) -> Reply:
        """The reply; TIMEOUT where it took too long and nothing checked in time: no verdict depends on luck."""
        if reply["seconds"] < self._seconds or reply["verdict"] == "TIMEOUT":
            return reply
        return failure(reply["ticket"], "TIMEOUT", self._overrun_message(), reply["seconds"])

    def _next_look(self, used: float) -> float:
        """When a task can have used up its CPU time at the earliest: with every core at work for it."""
        return time.monotonic() + max(_LEAST_LOOK_SECONDS, (self._seconds - used) / _CORES)

    def _look(self, worker: WorkerProcess) -> None:
        used = worker.used_seconds()
        if used is None:
            worker.look_at = float("inf")  # no /proc: the clock alone
        elif used >= self._seconds:
            self._overrun(worker, used)
        else:
            worker.look_at = self._next_look(used)

    def _overrun(self, worker: WorkerProcess, used: float) -> None:
        self._replace(worker, "TIMEOUT", self._overrun_message(), used)

    def _overrun_message(self) -> str:
        return f"stopped after {self._seconds:g} s of CPU time"

    def _overslept(self, worker: WorkerProcess) -> None:
        if not worker.is_ready:
            self._replace(worker, "CRASH", f"the worker did not start within {_START_SECONDS:.0f} s")
            return
        if not worker.has_started:
            self._replace(worker, "CRASH", f"the worker did not take up the task within {_START_SECONDS:.0f} s")
            return
        used = worker.used_seconds()
        spent = "" if used is None else f" ({used:.3f} s of CPU time)"
        self._replace(worker, "TIMEOUT", f"stopped after {self._wall_seconds:g} s by the clock{spent}")

    def _died(self, worker: WorkerProcess) -> None:
        code = worker.process.wait()
        if worker.ticket is not None and code == -signal.SIGPROF:  # its own CPU limit, where we did not look in time
            self._overrun(worker, self._seconds)
            return
        if worker.ticket is not None and code == -signal.SIGALRM:  # likewise, by the clock
            self._overslept(worker)
            return
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if worker.is_ready:
            self._replace(worker, "CRASH", f"the worker died ({how})")
            return
        self._replace(worker, "CRASH", f"the worker could not start ({how})")
        self._start_failed(how)

    def _start_failed(self, how: str) -> None:
        """After three in a row it never will: say so for everything that waits, instead of trying for ever."""
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self._fail_waiting(f"the verifier's workers could not start ({how})")
            self._failed_starts = 0

    def _replace(self, worker: WorkerProcess, verdict: str, message: str, seconds: float | None = None) -> None:
        """Drop a worker; the order it held gets the verdict, and the next round starts a fresh one."""
        self._workers.remove(worker)
        worker.kill()
        if worker.ticket is not None:
            elapsed = time.monotonic() - worker.since if seconds is None else seconds
            self._deliver(failure(worker.ticket, verdict, message, elapsed))


def fixed(settings: dict[str, Any]) -> dict[str, str]:
    """Of the process's environment variables: the order of sets, for what must come out the same a second time.

    reasoning-gym makes its entries by it, and makes them again to score them; an episode may be replayed.
    """
    is_repeated = settings["verifier"] in ("gym", "gym-graded") or settings["program"] != PROGRAM
    return {"PYTHONHASHSEED": "0"} if is_repeated else {}


def failure(ticket: int, verdict: str, message: str, seconds: float) -> Reply:
    return {
        "ticket": ticket,
        "verdict": verdict,
        "value": -1.0,
        "extracted": None,
        "message": message,
        "graded": False,
        "seconds": seconds,
    }
