"""Threads that ask the judge: each question once, at a bounded rate, waiting while the server is down.

It stands where the worker processes of other verifiers stand, and answers with replies of their form. What stops it
(a server that stays away, a budget that is spent, a refused key) is told once, and nothing becomes a verdict by it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dapo.chat_client import ChatReply, ChatServer, NoReply, Refused, WrongSettings
from dapo.rewards.judging.cache import VerdictCache
from dapo.rewards.judging.dialogue import (
    Unreadable,
    asked_again,
    messages_for,
    quoted,
    schema_of,
    scores_in,
    verdict_key,
)
from dapo.rewards.judging.rubric import Rubric, file_of, read_rubric
from dapo.types import Task

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # between two tries of a server that is down
SILENT_S = 5.0  # without a reply before a word about it: a server may be busy for a moment
CHARS_PER_TOKEN = 3  # where a server does not count, and money is
Reply = dict[str, Any]


class JudgeThreads:
    """Questions go in by `submit`; `deliver` gets a reply for each, `notice` a sentence, `stop` why it ended."""

    def __init__(
        self,
        name: str,
        deliver: Callable[[Reply], None],
        notice: Callable[[str], None],
        stop: Callable[[str], None],
        *,
        folder: Path | None = None,
        rank: int = 0,
    ) -> None:
        self.name = name
        self.rubric = read_rubric(name)
        self.server = server_of(self.rubric, name)
        self.cache = VerdictCache(folder, self.rubric, rank=rank)
        self.n_asked = self.n_recalled = 0
        self._deliver, self._notice, self._stop = deliver, notice, stop
        self._changed = threading.Condition()
        self._questions: deque[tuple[str, dict[str, str]]] = deque()
        self._tickets: dict[str, list[int]] = {}  # of questions that are being asked, by key
        self._is_closing = False
        self._down_since: float | None = None
        self._is_told = False  # that it is down
        self._next_start = 0.0
        self._threads = [
            threading.Thread(target=self._serve, name=f"judge {number}", daemon=True)
            for number in range(self.rubric.budget.concurrency)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, order: dict[str, Any]) -> None:
        """A task as workers get it. The same question twice is asked once."""
        texts = quoted(Task(order["response"], order["answer"], None, order["meta"]), self.rubric)
        key = verdict_key(texts, self.rubric)
        with self._changed:
            scores = self.cache.known.get(key)
            if scores is None:
                waiting = self._tickets.setdefault(key, [])
                waiting.append(order["ticket"])
                if len(waiting) == 1:
                    self._questions.append((key, texts))
                    self._changed.notify()
        if scores is not None:
            self.n_recalled += 1
            self._deliver(self._verdict(order["ticket"], scores, 0.0))

    @property
    def is_down(self) -> bool:
        """Whether the server has not answered for a while."""
        return self._is_told

    def worker_pids(self) -> list[int]:
        return []

    def close(self) -> None:
        """Requests under way are given up, with what they would have said."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def summary(self) -> str:
        spent = self.cache.spent
        money = f", {spent.usd:.4f} USD" if spent.usd else ""
        return (
            f"{self.name}: {self.n_asked:,} verdicts asked for, {self.n_recalled:,} from the cache; "
            f"{spent.requests:,} requests and {spent.seconds:,.0f} s of them in all{money}"
        )

    # ------------------------------------------------------------------ the threads

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._questions or self._is_closing)
                if self._is_closing:
                    return
                key, texts = self._questions.popleft()
            try:
                self._settle(key, texts)
            except Exception as error:  # a fault of ours; those who wait for the verdict must be told
                self._halt(f"its thread ended: {type(error).__name__}: {error}")
                return

    def _settle(self, key: str, texts: dict[str, str]) -> None:
        """Ask until a reply can be read, the tries are used up, or nobody wants to know any more."""
        messages, why = messages_for(texts, self.rubric), ""
        for _ in range(self.rubric.tries):
            try:
                reply, seconds = self._reply(messages)
            except Refused as error:
                self._fault(key, f"the judge's server refuses the question: {error}")
                return
            if reply is None:
                return
            usd = cost_of(reply, messages, self.rubric)
            try:
                scores = scores_in(reply.text, self.rubric)
            except Unreadable as error:
                why = str(error)
                self.cache.note(key, None, seconds=seconds, usd=usd, model=self.rubric.model)
                messages = asked_again(messages_for(texts, self.rubric), reply.text, why)
                continue
            with self._changed:
                self.cache.note(key, scores, seconds=seconds, usd=usd, model=self.rubric.model)
                tickets = self._tickets.pop(key, [])
                self.n_asked += 1
            for ticket in tickets:
                self._deliver(self._verdict(ticket, scores, seconds))
            return
        self._fault(key, f"the judge's reply could not be read {self.rubric.tries} times: {why}")

    def _reply(self, messages: list[dict[str, str]]) -> tuple[ChatReply | None, float]:
        """A reply and how long it took; None once everything has stopped. Waits for a server that is down."""
        wait = FIRST_WAIT_S
        while True:
            if not self._may_start():
                return None, 0.0
            began = time.monotonic()
            try:
                reply = self.server.reply(messages)
            except NoReply as error:
                if not self._is_worth_waiting(str(error)):
                    return None, 0.0
                self._sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT_S)
                continue
            except WrongSettings as error:
                self._halt(str(error))
                return None, 0.0
            self._is_up()
            return reply, time.monotonic() - began

    def _may_start(self) -> bool:
        """Wait for this request's turn; False where the budget is spent or everything has stopped."""
        budget, spent = self.rubric.budget, self.cache.spent
        if budget.max_usd is not None and spent.usd >= budget.max_usd:
            self._halt(
                f"budget.max_usd = {budget.max_usd:g} is spent: {spent.usd:.4f} USD for {spent.requests:,} requests"
            )
        elif budget.max_request_hours is not None and spent.seconds >= 3600 * budget.max_request_hours:
            self._halt(f"budget.max_request_hours = {budget.max_request_hours:g} is spent: {spent.requests:,} requests")
        if self._is_closing:
            return False
        if budget.requests_per_s is not None:
            with self._changed:
                start = max(time.monotonic(), self._next_start)
                self._next_start = start + 1 / budget.requests_per_s
            self._sleep(start - time.monotonic())
        return not self._is_closing

    def _sleep(self, seconds: float) -> None:
        """Until then, or until it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, max(0.0, seconds))

    def _is_worth_waiting(self, why: str) -> bool:
        """After a request without a reply: whether the server may still come back in time."""
        with self._changed:
            now, limit = time.monotonic(), self.rubric.budget.wait_s
            if self._down_since is None:
                self._down_since = now
            waited = now - self._down_since
            is_news = waited >= min(SILENT_S, limit) and not self._is_told
            self._is_told |= is_news
            is_closing = self._is_closing
        if is_closing:
            return False
        if waited >= limit:
            self._halt(f"{self.rubric.url} has not answered for {waited:.0f} s ({why}); budget.wait_s = {limit:g}")
            return False
        if is_news:
            self._notice(f"{self.name}: {self.rubric.url} does not answer ({why}); waiting for it, {limit:g} s at most")
        return True

    def _is_up(self) -> None:
        with self._changed:
            down, self._down_since = self._down_since, None
            was_told, self._is_told = self._is_told, False
        if down is not None and was_told:
            self._notice(f"{self.name}: {self.rubric.url} answers again after {time.monotonic() - down:.1f} s")

    def _halt(self, why: str) -> None:
        """Once: nothing is asked any more, and who waits is told why."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
        self._stop(f"{self.name}: {why}.")

    def _fault(self, key: str, why: str) -> None:
        with self._changed:
            tickets = self._tickets.pop(key, [])
        for ticket in tickets:
            self._deliver({**self._verdict(ticket, None, 0.0), "message": why})

    def _verdict(self, ticket: int, scores: dict[str, float] | None, seconds: float) -> Reply:
        """As a worker's reply: the mean as −1 to +1; a fault where there are no scores."""
        mean = self.rubric.mean(scores) if scores is not None else 0.0
        verdict = "CRASH" if scores is None else "CORRECT" if round(mean - self.rubric.pass_at, 9) >= 0 else "WRONG"
        return {
            "ticket": ticket,
            "verdict": verdict,
            "value": 2.0 * mean - 1.0,
            "extracted": None,
            "message": "" if scores is None else ", ".join(f"{name} {score:g}" for name, score in scores.items()),
            "graded": False,
            "seconds": seconds,
        }


def cache_beside(name: str) -> Path:
    """Where verdicts are kept that belong to no run: rubric.verdicts beside rubric.toml."""
    return file_of(name).with_suffix(".verdicts")


def server_of(rubric: Rubric, name: str) -> ChatServer:
    return ChatServer(
        rubric.url, rubric.model, timeout_s=rubric.budget.timeout_s, tries=1, max_tokens=rubric.max_tokens,
        temperature=rubric.temperature, label=name,
        options={"response_format": schema_of(rubric)} if rubric.json_schema else {},
    )  # fmt: skip


def cost_of(reply: ChatReply, messages: list[dict[str, str]], rubric: Rubric) -> float:
    """In USD, by the server's own count of tokens, else by one that rather counts too many."""
    asked = sum(len(message["content"]) for message in messages) // CHARS_PER_TOKEN + 1
    n_in = asked if reply.input_tokens is None else reply.input_tokens
    n_out = len(reply.text) // CHARS_PER_TOKEN + 1 if reply.output_tokens is None else reply.output_tokens
    price = rubric.price
    return (n_in * price.usd_per_million_input_tokens + n_out * price.usd_per_million_output_tokens) / 1e6
