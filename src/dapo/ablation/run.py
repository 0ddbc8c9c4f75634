"""Runs the jobs of a ladder as concurrent `dapo train` processes; however it stops, the runs can be resumed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from dapo.ablation.plan import Job, State
from dapo.config.machine import gpu_memory_gib
from dapo.config.schema import Config
from dapo.errors import EXIT_BAD_INPUT, ConfigError
from dapo.files import own_file
from dapo.processes import python_command, python_environment

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_EVERY_S = 0.2
SHOWN_LOG_LINES = 6


@dataclass(slots=True)
class LadderOutcome:
    """What became of the jobs."""

    done: list[Job] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # job -> the end of what it printed
    is_stopped: bool = False
    seconds: dict[str, float] = field(default_factory=dict)  # job -> clock time in this call


@dataclass(slots=True)
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    started: float


# Called on every change and periodically, with the running jobs and what happened.
Progress = Callable[[Sequence[Job], LadderOutcome, str], None]


def default_jobs(config: Config) -> int:
    """One process per core this process may use; on a GPU one in all."""
    device = config.model.device
    if device == "cuda" or (device == "auto" and gpu_memory_gib()):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def claimed(folder: Path) -> Iterator[int]:
    """Lock the folder: one ladder at a time. Its runs hold the lock too, so it outlives a killed ladder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be written: {error.strerror}.", remedy="Name another.") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out {folder}: in use by another ladder or one of its runs.",
                remedy="Wait for it to end, or name another folder.",
            ) from None
        yield handle
    finally:
        os.close(handle)


def run_jobs(jobs: Sequence[Job], recipe: str, *, at_once: int, lock: int, progress: Progress) -> LadderOutcome:
    """Run what is not done, `at_once` processes at a time. A signal stops them at a checkpoint; a second one kills."""
    outcome = LadderOutcome(done=[job for job in jobs if job.state is State.DONE])
    waiting = deque(job for job in jobs if job not in outcome.done)
    running: list[Running] = []
    with stop_on_signals(running) as asked:
        try:
            while running or (waiting and not asked):
                while waiting and len(running) < at_once and not asked:
                    running.append(start(waiting.popleft(), recipe, lock))
                    if asked:  # it was just being started and has not got the signal yet
                        running[-1].process.send_signal(signal.SIGINT)
                    progress([r.job for r in running], outcome, f"{running[-1].job.name}: started")
                for ended in [r for r in running if r.process.poll() is not None]:
                    running.remove(ended)
                    what = settle(ended, outcome, is_stopping=bool(asked))
                    progress([r.job for r in running], outcome, f"{ended.job.name}: {what}")
                    if ended.process.returncode == EXIT_BAD_INPUT and not asked:
                        raise ConfigError(
                            f"{ended.job.name}: dapo train refused it:\n{outcome.failed[ended.job.name]}",
                            remedy=f"Once fixed, resume with the same command. Full output: {ended.job.log}",
                        )
                progress([r.job for r in running], outcome, "")
                time.sleep(LOOK_EVERY_S)
        finally:
            for left in running:  # an error in this process: stop the runs at a checkpoint
                left.process.send_signal(signal.SIGINT)
            for left in running:
                left.process.wait()
                left.log.close()
    outcome.is_stopped = bool(asked)
    return outcome


def start(job: Job, recipe: str, lock: int) -> Running:
    """`dapo train` or `dapo resume` with one thread, in a session of its own: Ctrl-C reaches it through us, once."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    log = open(job.log, "ab", opener=own_file)  # noqa: SIM115 closed when the run ends
    os.set_inheritable(lock, True)
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if on_cpu(job.config) else {}
    process = subprocess.Popen(
        python_command("-m", "dapo", *job.arguments(recipe)),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=(lock,),
        env=python_environment() | one_thread,
    )
    return Running(job, process, log, time.monotonic())


def on_cpu(config: Config) -> bool:
    return config.model.device == "cpu" or (config.model.device == "auto" and not gpu_memory_gib())


def settle(ended: Running, outcome: LadderOutcome, *, is_stopping: bool) -> str:
    """Note what became of a run that ended."""
    ended.log.close()
    job = ended.job
    outcome.seconds[job.name] = time.monotonic() - ended.started
    if job.state is State.DONE:
        outcome.done.append(job)
        return f"done in {outcome.seconds[job.name]:.0f} s"
    if is_stopping:
        return f"stopped after step {job.steps_done}"
    outcome.failed[job.name] = end_of(job.log)
    return f"failed with exit code {ended.process.returncode}"


def end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-SHOWN_LOG_LINES:])


@contextmanager
def stop_on_signals(running: list[Running]) -> Iterator[list[int]]:
    """The list gets every signal that came. The first is passed on as Ctrl-C; from the second on runs are killed."""
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        for run in running:
            run.process.send_signal(signal.SIGINT if len(asked) == 1 else signal.SIGKILL)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
