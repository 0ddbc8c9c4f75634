"""Environments in killable worker processes, asked asynchronously.

Each episode's environment stays in one worker. When that worker dies, or another one has more time, the environment is
made again from what was said; one that then answers differently is found, and its episode ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dapo.environments.builtin import BUILTIN, KEY
from dapo.environments.conversation import Answer, Conversation
from dapo.errors import ConfigError
from dapo.rewards.decision import Decision
from dapo.rewards.limits import Limits
from dapo.rewards.verifiers import Verifier
from dapo.rewards.workers import Reply, WorkerPool
from dapo.types import Judgement, Problem, Task, Verdict
from dapo.waiting.registry import waiting

SECONDS, MEMORY_MB = 10.0, 4096  # of an answer, unless the config says otherwise
STUCK_SECONDS = 0.2  # without an answer, after which others do not wait behind it
LOOK_SECONDS = 1.0  # between two looks whether an answer is waited for too long
MOST_REBUILDS = 3  # of one environment for one answer
FAILURES = ("TIMEOUT", "CRASH")


@dataclass(frozen=True, slots=True)
class Described:
    """What a class says of itself."""

    answer_after_ticks: int
    stop: tuple[tuple[str, str], ...] = ()  # (begin, end): `end` after `begin` ends a turn as the end token does


@dataclass(eq=False, slots=True)
class Desk:
    """One worker, and whose environments it has."""

    workers: WorkerPool
    names: set[str] = field(default_factory=set)
    over: list[str] = field(default_factory=list)  # episodes to be forgotten with the next order
    n_out: int = 0  # orders without a reply
    last_reply: float = 0.0

    @property
    def is_stuck(self) -> bool:
        return self.n_out > 0 and time.monotonic() - self.last_reply > STUCK_SECONDS


@dataclass(slots=True)
class Pending:
    """A question under way. `turn` is the one that the worker has: an earlier one while the episode is replayed."""

    desk: Desk
    order: dict[str, Any]
    conversation: Conversation | None = None
    turn: int = 0
    rebuilds: int = 0
    is_wanted: bool = True


class EnvironmentPool:
    """Implements `Environments` for the classes of a run. `on_notice` is told of what a user should know.

    `keys` are what messages call each class: the key of the config, or the option, that names it.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        workers: int = 2,
        seconds: float | None = None,
        memory_mb: int | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        self.waited_s = 0.0  # by those who asked
        self.on_notice: Callable[[str], None] = lambda _text: None
        limits = Limits(seconds or SECONDS, memory_mb or MEMORY_MB)
        self._changed = threading.Condition()
        self._pending: dict[int, Pending] = {}
        self._done: dict[int, Reply] = {}
        self._tickets: dict[str, int] = {}  # of episodes
        self._next_ticket = 0
        self._desks = {name: [self._desk(name, limits) for _ in range(workers)] for name in dict.fromkeys(names)}
        self.described = {name: self._describe(name, (keys or {}).get(name, KEY)) for name in self._desks}

    def _desk(self, name: str, limits: Limits) -> Desk:
        nobody = Verifier(BUILTIN.get(name, name), lambda _task: None, refuse)
        return Desk(WorkerPool(nobody, limits, 1, self._deliver, program="dapo.environments.worker"))

    def _describe(self, name: str, key: str) -> Described:
        """Its class's own settings; ConfigError where there is no such class."""
        reply = self._ask_and_wait(name, {"kind": "describe"})
        if reply["verdict"] in FAILURES:
            self.close()
            why = reply["message"].removeprefix(f"{KEY} = {name!r}: ")
            raise ConfigError(
                f"{key} = {name!r}: {why}",
                remedy="Write it as package.module:Class, or use one of " + ", ".join(BUILTIN) + ".",
            )
        return Described(reply["answer_after_ticks"], tuple((begin, end) for begin, end in reply["stop"]))

    def answer_after_ticks(self, environment: str) -> int:
        return self.described[environment].answer_after_ticks

    def stop(self, environment: str) -> tuple[tuple[str, str], ...]:
        return self.described[environment].stop

    def opening(self, problem: Problem, seed: int) -> str:
        """One that fails here adds nothing: it will fail in its episodes too, and these are counted."""
        order = {"kind": "open", "problem": asdict(problem), "seed": seed}
        return str(self._ask_and_wait(problem.environment, order).get("text", ""))

    def ask(self, conversation: Conversation) -> int:
        said = list(conversation.said)
        order = {"kind": "turn", "name": conversation.name, "said": said, "seed": conversation.seed}
        if len(said) == 1:
            order["problem"] = asdict(conversation.problem)
        with self._changed:
            desk = self._desk_for(conversation)
            ticket = self._send(Pending(desk, order, conversation, len(said)))
            self._tickets[conversation.name] = ticket
        return ticket

    def wait(self, tickets: list[int]) -> dict[int, Answer]:
        began = time.perf_counter()
        with self._waiting(tickets) as wait, self._changed:
            self._until(lambda: all(ticket in self._done for ticket in tickets), wait)
            replies = {ticket: self._done.pop(ticket) for ticket in tickets}
        self.waited_s += time.perf_counter() - began
        for reply in replies.values():
            if "notice" in reply:
                self.on_notice(reply["notice"])
        return {ticket: answer_of(reply) for ticket, reply in replies.items()}

    def end(self, name: str) -> None:
        with self._changed:
            ticket = self._tickets.pop(name, None)
            if ticket in self._pending:
                self._pending[ticket].is_wanted = False
            elif ticket is not None:
                self._done.pop(ticket, None)
            for desk in self._all_desks():
                if name in desk.names:
                    desk.names.discard(name)
                    desk.over.append(name)

    def close(self) -> None:
        for desk in self._all_desks():
            desk.workers.close()

    def worker_pids(self) -> list[int]:
        return [pid for desk in self._all_desks() for pid in desk.workers.worker_pids()]

    def _all_desks(self) -> list[Desk]:
        return [desk for desks in self._desks.values() for desk in desks]

    # ------------------------------------------------------------------ orders and replies

    def _desk_for(self, conversation: Conversation) -> Desk:
        """Where the environment is; the least busy worker where it is nowhere, or where that one is stuck."""
        desks = self._desks[conversation.problem.environment]
        home = next((desk for desk in desks if conversation.name in desk.names), None)
        chosen = home
        if home is None or home.is_stuck:
            chosen = min(desks, key=lambda desk: desk.n_out)
        assert chosen is not None, "there is at least one worker"
        if chosen is not home and home is not None:
            home.names.discard(conversation.name)
            home.over.append(conversation.name)
        chosen.names.add(conversation.name)
        return chosen

    def _ask_and_wait(self, name: str, order: dict[str, Any]) -> Reply:
        with self._changed:
            ticket = self._send(Pending(min(self._desks[name], key=lambda desk: desk.n_out), order))
            with self._waiting([ticket]) as wait:
                self._until(lambda: ticket in self._done, wait)
            return self._done.pop(ticket)

    def _waiting(self, tickets: list[int]) -> waiting:
        def what() -> str:
            missing = [self._pending[ticket] for ticket in tickets if ticket in self._pending]
            episodes = [pending.conversation for pending in missing if pending.conversation is not None]
            first = f", first problem {episodes[0].problem.id}, turn {len(episodes[0].said)}" if episodes else ""
            return f"{len(missing)} of {len(tickets)} answers of {', '.join(self._desks)}{first}"

        return waiting(what, can_stop=True, holders=self._worker_stacks)

    def _worker_stacks(self) -> list[str]:
        return [line for desk in self._all_desks() for line in desk.workers.stacks()]

    def _until(self, is_there: Callable[[], bool], wait: waiting) -> None:
        """Wait for it with the lock; each reply counts as progress, and the watchdog may end it."""
        n_done = len(self._done)
        while not self._changed.wait_for(is_there, LOOK_SECONDS):
            if len(self._done) != n_done:
                n_done = len(self._done)
                wait.moved()
            wait.check()

    def _send(self, pending: Pending, ticket: int | None = None) -> int:
        """Hand an order to its worker; the caller holds the lock."""
        if ticket is None:
            ticket = self._next_ticket
            self._next_ticket += 1
        self._pending[ticket] = pending
        desk = pending.desk
        if desk.n_out == 0:
            desk.last_reply = time.monotonic()
        desk.n_out += 1
        over, desk.over = [name for name in desk.over if name not in desk.names], []
        desk.workers.submit({**pending.order, "over": over, "ticket": ticket})
        return ticket

    def _deliver(self, reply: Reply) -> None:
        """In the thread of a worker: an answer, or one step of a replay."""
        ticket = reply["ticket"]
        with self._changed:
            pending = self._pending.pop(ticket)
            pending.desk.n_out -= 1
            pending.desk.last_reply = time.monotonic()
            if not pending.is_wanted:
                return
            following = self._following(pending, reply)
            if isinstance(following, Pending):
                self._send(following, ticket)
            else:
                self._done[ticket] = following
                self._changed.notify_all()

    def _following(self, pending: Pending, reply: Reply) -> Pending | Reply:
        """What an answer leads to: the next turn of a replay, or a reply for whoever waits."""
        conversation = pending.conversation
        if conversation is None or reply["verdict"] in FAILURES:
            return reply
        if reply.get("lost"):
            if pending.rebuilds == MOST_REBUILDS:
                return failed(reply, f"its worker was lost {MOST_REBUILDS} times while it was made again")
            return replayed(pending, conversation, 1, pending.rebuilds + 1)
        if pending.turn == len(conversation.said):
            return reply
        before = conversation.answers[pending.turn - 1]
        if (again := answer_of(reply)) != before:
            why = (
                f"answered otherwise when its episode was replayed (problem {conversation.problem.id}, turn "
                f"{pending.turn}): {again.text[:80]!r}, before that {before.text[:80]!r}. Its answers may depend on "
                "the problem, the seed and what was said, on nothing else"
            )
            notice = f"data.environment = {conversation.problem.environment}: {why}."
            return failed(reply, f"{why}.") | {"notice": notice}
        return replayed(pending, conversation, pending.turn + 1, pending.rebuilds)


def replayed(pending: Pending, conversation: Conversation, turn: int, rebuilds: int) -> Pending:
    """The order for a turn of an episode that is made again."""
    order = {
        "kind": "turn",
        "name": conversation.name,
        "said": list(conversation.said[:turn]),
        "seed": conversation.seed,
        **({"problem": asdict(conversation.problem)} if turn == 1 else {}),
    }
    return Pending(pending.desk, order, conversation, turn, rebuilds)


def failed(reply: Reply, why: str) -> Reply:
    return reply | {"verdict": "CRASH", "message": why}


def answer_of(reply: Reply) -> Answer:
    if reply["verdict"] in FAILURES:
        return Answer(judgement=judgement_of(reply, reply["seconds"]))
    score = reply["score"]
    judged = None if score is None else judgement_of(score, reply["seconds"])
    return Answer(reply["text"], reply["role"], reply["called"], reply["failed"], judged)


def judgement_of(reply: Reply, seconds: float) -> Judgement:
    is_failure = reply["verdict"] in FAILURES
    return Judgement(
        Verdict(reply["verdict"]),
        -1.0 if is_failure else reply["value"],
        seconds=seconds if is_failure else 0.0,
        message=reply["message"],
        graded=not is_failure and reply["graded"],
        parts=reply.get("parts", {}),
    )


def refuse(_task: Task) -> Decision:
    raise AssertionError("an environment answers turns, it verifies nothing")
