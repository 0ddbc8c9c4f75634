"""Judging many responses: the exact rules at once in the caller, everything else in workers with limits."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dapo.errors import ConfigError, VerifierStopped
from dapo.rewards.decision import Decision
from dapo.rewards.limits import MAX_WORKERS, Limits
from dapo.rewards.verifiers import is_judge, named
from dapo.rewards.workers import WorkerPool
from dapo.types import Judgement, StopReason, Task, Verdict
from dapo.waiting.registry import NEVER, waiting

if TYPE_CHECKING:
    from dapo.rewards.judging.asking import JudgeThreads

Item = tuple[str, str] | Task


_LOOK_SECONDS = 1.0  # between two looks whether somebody wants to stop, while verdicts are waited for


def to_standard_error(text: str) -> None:
    sys.stderr.write(f"{text}\n")


class VerifierPool:
    """A verifier with its workers. Safe to use from several threads; `close` leaves no process behind.

    `truncated_may_be_correct` is for reproducing the released DAPO run, whose script lets the text of a truncated
    response decide; it needs verifier "dapo-published". Everywhere else stop reason LENGTH is never CORRECT.
    `folder` is where a judge keeps its verdicts (none: beside its file), `rank` whose they are; `on_notice` is told, in
    a thread that waits, what it has to say meanwhile.
    """

    def __init__(
        self,
        verifier: str = "math",
        *,
        workers: int = 2,
        seconds: float | None = None,
        memory_mb: int | None = None,
        truncated_may_be_correct: bool = False,
        folder: Path | None = None,
        rank: int = 0,
    ) -> None:
        self.verifier = named(verifier)
        if truncated_may_be_correct and verifier != "dapo-published":
            raise ConfigError(
                f"truncated_may_be_correct with verifier {verifier!r}: a truncated response is never correct.",
                remedy='Use it with "dapo-published" only, to reproduce the released run.',
            )
        if workers < 1:
            raise ConfigError(f"workers = {workers}: at least one worker is needed.", remedy="Use 1 or more.")
        if workers > MAX_WORKERS:
            raise ConfigError(
                f"workers = {workers}: each is a process of its own.", remedy=f"Use {MAX_WORKERS:,} or fewer."
            )
        if verifier == "code":
            _demand_isolation()
        self.limits = Limits(seconds or self.verifier.seconds, memory_mb or self.verifier.memory_mb)
        self._truncated_may_be_correct = truncated_may_be_correct
        self._n_workers = workers
        self._done: dict[int, Judgement] = {}
        self._pending: dict[int, str] = {}  # ticket -> reference
        self._changed = threading.Condition()
        self._next_ticket = 0
        self._is_closed = False
        self._workers: WorkerPool | JudgeThreads | None = None
        self._cache = (folder, rank)
        self._notices: list[str] = []
        self._stopped = ""  # why a judge cannot be asked any more
        self.on_notice: Callable[[str], None] = to_standard_error
        self.is_interrupted: Callable[[], bool] = lambda: False
        self.pid = os.getpid()

    def submit(self, task: Task) -> int:
        """Hand in a response; the ticket names its judgement in `wait`. It judges by one verifier alone."""
        assert task.verifier in ("", self.verifier.name), f"{self.verifier.name} was asked for {task.verifier}"
        judgement = self._decide(task)
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the verifier pool is closed")
            ticket = self._next_ticket
            self._next_ticket += 1
            if judgement is not None:
                self._done[ticket] = judgement
                self._changed.notify_all()
                return ticket
            self._pending[ticket] = task.answer
            if self._workers is None:
                self._workers = self._start()
                _OPEN.add(self)
        self._workers.submit(
            {
                "ticket": ticket,
                "response": task.response,
                "answer": task.answer,
                "stop_reason": task.stop_reason.value if task.stop_reason else None,
                "meta": dict(task.meta),
            }
        )
        return ticket

    def wait(self, tickets: Iterable[int]) -> dict[int, Judgement]:
        """The judgements of these tickets, waiting for those that are still being worked on."""
        wanted = list(tickets)
        with self._changed:
            unknown = [ticket for ticket in wanted if ticket not in self._done and ticket not in self._pending]
            if unknown:
                raise KeyError(f"tickets {unknown[:5]} are unknown or were already collected")
        with self._waiting(wanted) as wait:
            while not self._is_settled(wanted, wait):
                pass
        with self._changed:
            return {ticket: self._done.pop(ticket) for ticket in wanted}

    def _waiting(self, wanted: list[int]) -> waiting:
        """This wait by name. A judge's server has a limit of its own, budget.wait_s."""

        def what() -> str:
            missing = sum(ticket not in self._done for ticket in wanted)
            return f"{missing} of {len(wanted)} verdicts by {self.verifier.name}"

        is_judged = is_judge(self.verifier.name)
        return waiting(what, patience=NEVER if is_judged else 1.0, can_stop=True, holders=self._worker_stacks)

    def _worker_stacks(self) -> list[str]:
        return self._workers.stacks() if isinstance(self._workers, WorkerPool) else []

    def _is_settled(self, wanted: list[int], wait: waiting) -> bool:
        """Wait for these tickets, or for something to say meanwhile; raises where they will never come."""
        before = len(self._done)
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._stopped or self._notices or self._are_done(wanted), _LOOK_SECONDS
            )
            notices, self._notices = self._notices, []
            is_done, is_closed = self._are_done(wanted), self._is_closed
        for notice in notices:
            self.on_notice(notice)
        if is_closed:
            raise RuntimeError("the verifier pool was closed while it was waited for")
        if len(self._done) != before:
            wait.moved()
        if not is_done:
            self._stopped = self._stopped or wait.expired  # for those too who wait later
            self._check_judge()
        return is_done

    def _are_done(self, wanted: list[int]) -> bool:
        return all(ticket in self._done for ticket in wanted)

    def _check_judge(self) -> None:
        """Raise where its verdicts will not come; a signal ends the waiting for a server that is down."""
        assert self._workers is not None, "somebody waits for a verdict"
        if not self._stopped and self.is_interrupted() and getattr(self._workers, "is_down", False):
            self._stopped = f"{self.verifier.name}: stopped by a signal while its server did not answer."
        if self._stopped:
            raise VerifierStopped(
                self._stopped, remedy="No verdict is lost; once it can be asked again, resume: dapo resume RUN"
            )

    def _start(self) -> WorkerPool | JudgeThreads:
        if is_judge(self.verifier.name):
            from dapo.rewards.judging.asking import JudgeThreads, cache_beside

            folder, rank = self._cache
            folder = folder or cache_beside(self.verifier.name)
            return JudgeThreads(self.verifier.name, self._deliver, self._notice, self._stop, folder=folder, rank=rank)
        return WorkerPool(self.verifier, self.limits, self._n_workers, self._deliver)

    def _notice(self, text: str) -> None:
        with self._changed:
            self._notices.append(text)
            self._changed.notify_all()

    def _stop(self, why: str) -> None:
        with self._changed:
            self._stopped = why
            self._changed.notify_all()

    @property
    def each(self) -> tuple[VerifierPool, ...]:
        return (self,)

    def spent(self) -> str:
        """What a judge was asked and what that has cost, in words; empty for any other verifier."""
        return "" if self._workers is None or isinstance(self._workers, WorkerPool) else self._workers.summary()

    def judge_all(self, items: Sequence[Item]) -> list[Judgement]:
        """Judgements in the order of the items, each a (response, answer) pair or a Task."""
        tickets = [self.submit(item if isinstance(item, Task) else Task(*item)) for item in items]
        judgements = self.wait(tickets)
        return [judgements[ticket] for ticket in tickets]

    def worker_pids(self) -> list[int]:
        """The processes at work; for tests and `dapo doctor`."""
        return self._workers.worker_pids() if self._workers is not None else []

    def close(self) -> None:
        """Kill and reap the workers. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._workers is not None:
            self._workers.close()
        _OPEN.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _decide(self, task: Task) -> Judgement | None:
        """What needs no worker: truncated responses and whatever the exact rules settle."""
        start = time.perf_counter()
        if task.stop_reason is StopReason.LENGTH and not self._truncated_may_be_correct:
            return Judgement(Verdict.WRONG, -1.0, None, task.answer, 0.0, "truncated: stop reason LENGTH")
        try:
            decision = self.verifier.decide(task)
        except Exception as error:  # one response must not end a run: the fault is counted and named instead
            decision = Decision(Verdict.CRASH, None, f"{type(error).__name__} in the exact rules: {error}"[:2_000])
        if decision is None:
            return None
        return Judgement(
            decision.verdict,
            1.0 if decision.verdict is Verdict.CORRECT else -1.0,
            decision.extracted,
            task.answer,
            time.perf_counter() - start,
            decision.message,
        )

    def _deliver(self, reply: dict[str, Any]) -> None:
        with self._changed:
            ticket = reply["ticket"]
            reference = self._pending.get(ticket)
            if reference is None:
                return
            self._done[ticket] = Judgement(
                Verdict(reply["verdict"]),
                reply["value"],
                reply["extracted"],
                reference,
                reply["seconds"],
                reply["message"],
                reply["graded"],
                reply.get("parts", {}),
            )
            del self._pending[ticket]  # only now: a reply that cannot be read leaves its task pending, not lost
            self._changed.notify_all()


class VerifierPools:
    """A pool for each verifier of a run, each with its own workers and limits; responses go to their problem's."""

    def __init__(self, own: VerifierPool, others: Iterable[VerifierPool]) -> None:
        self.own = own
        self.pools = {"": own, own.verifier.name: own} | {pool.verifier.name: pool for pool in others}
        self.each = tuple(dict.fromkeys(self.pools.values()))
        self._handed: dict[int, tuple[VerifierPool, int]] = {}  # ticket -> whose, and its ticket there
        self._n_tickets = 0

    def submit(self, task: Task) -> int:
        pool = self.pools[task.verifier]
        handed = pool, pool.submit(task)
        self._n_tickets += 1
        self._handed[self._n_tickets] = handed
        return self._n_tickets

    def wait(self, tickets: Iterable[int]) -> dict[int, Judgement]:
        handed = {ticket: self._handed.pop(ticket) for ticket in tickets}
        judgements: dict[int, Judgement] = {}
        for pool in self.each:
            mine = {ticket: own for ticket, (whose, own) in handed.items() if whose is pool}
            judged = pool.wait(mine.values())
            judgements |= {ticket: judged[own] for ticket, own in mine.items()}
        return judgements

    def spent(self) -> str:
        return "; ".join(filter(None, (pool.spent() for pool in self.each)))

    def close(self) -> None:
        for pool in self.each:
            pool.close()


_OPEN: weakref.WeakSet[VerifierPool] = weakref.WeakSet()


def _demand_isolation() -> None:
    from dapo.rewards import code

    if why := code.isolation_error():
        raise ConfigError(f"rewards.verifier (--verifier) = 'code': {why}", remedy=code.ISOLATION_REMEDY)


_SHARED: dict[tuple[object, ...], VerifierPool] = {}
_SHARED_LOCK = threading.Lock()


@atexit.register
def close_open_pools() -> None:
    for pool in list(_OPEN):
        if pool.pid == os.getpid():
            pool.close()


def _forget_shared_pools() -> None:
    """In a forked child: the parent's pools, their thread and locks are not ours."""
    global _SHARED_LOCK
    _SHARED_LOCK = threading.Lock()
    _SHARED.clear()


os.register_at_fork(after_in_child=_forget_shared_pools)


def shared_pool(verifier: str, *, seconds: float | None, memory_mb: int | None, truncated: bool) -> VerifierPool:
    """One pool per process and kind, for single judgements; a forked child makes its own."""
    key = (os.getpid(), verifier, seconds, memory_mb, truncated)
    with _SHARED_LOCK:
        if key not in _SHARED:
            _SHARED[key] = VerifierPool(
                verifier, workers=2, seconds=seconds, memory_mb=memory_mb, truncated_may_be_correct=truncated
            )
        return _SHARED[key]
