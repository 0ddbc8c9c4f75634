"""A worker process with the environments of some episodes: each lives here between its turns.

An episode that this process does not have, or has in another state, is said to be lost: whoever asks makes it again,
turn by turn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dapo.environments.builtin import environment_class
from dapo.environments.protocol import Environment, Turn
from dapo.errors import ConfigError
from dapo.rewards.worker import Order, Work, crash, encoded, serve
from dapo.types import Problem

DEFAULT_TICKS = 4  # enough for what answers at once, while others decode
MAX_TEXT_CHARS = 1_000_000


@dataclass(slots=True)
class Hosted:
    """An environment, and what it was told."""

    environment: Environment
    said: list[str] = field(default_factory=list)


class Host:
    """The environments in this process, by the names of their episodes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._hosted: dict[str, Hosted] = {}
        with suppress(ConfigError):  # loaded here, so that no answer pays for it; the first order meets the error
            environment_class(name)

    def work(self, order: Order) -> dict[str, Any]:
        """The reply to an order; what raises becomes a CRASH of that order."""
        for name in order["over"]:
            self._end(name)
        try:
            match order["kind"]:
                case "describe":
                    return self._described()
                case "open":
                    return self._opened(order)
                case _:
                    return self._answered(order)
        except ConfigError as error:
            return crash(error.message)

    def _described(self) -> dict[str, Any]:
        kind = environment_class(self._name)
        ticks, stop = getattr(kind, "answer_after_ticks", DEFAULT_TICKS), getattr(kind, "stop", ())
        if type(ticks) is not int or ticks < 0:
            raise ValueError(f"answer_after_ticks is {ticks!r}, not a whole number from 0 on")
        pairs = [("", mark) if isinstance(mark, str) else mark for mark in stop]
        if isinstance(stop, str) or not all(is_stop(pair) for pair in pairs):
            raise ValueError(f"stop is {stop!r}, not some strings or pairs of strings")
        return {"verdict": "", "answer_after_ticks": ticks, "stop": pairs}

    def _opened(self, order: Order) -> dict[str, Any]:
        """What an environment adds to the prompt; those of the episodes themselves are made when they are asked."""
        environment, text = self._started(order)
        close(environment)
        return {"verdict": "", "text": checked(text or "", "start")}

    def _answered(self, order: Order) -> dict[str, Any]:
        name, said = order["name"], order["said"]
        if len(said) == 1:
            self._end(name)
            self._hosted[name] = Hosted(self._started(order)[0])
        hosted = self._hosted.get(name)
        if hosted is None or hosted.said != said[:-1]:
            return {"verdict": "", "lost": True}
        hosted.said = said
        try:
            return reply_of(hosted.environment.respond(said[-1]))
        except Exception:
            self._end(name)
            raise

    def _started(self, order: Order) -> tuple[Environment, str | None]:
        environment = environment_class(self._name)()
        return environment, environment.start(problem_of(order["problem"]), order["seed"])

    def _end(self, name: str) -> None:
        if (hosted := self._hosted.pop(name, None)) is not None:
            close(hosted.environment)


def is_stop(pair: Any) -> bool:
    """(begin, end), both strings, and something to end with."""
    return isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, str) for part in pair) and bool(pair[1])


def close(environment: Environment) -> None:
    """It may have something to close, and trouble with that is nobody's."""
    with suppress(Exception):
        getattr(environment, "close", lambda: None)()


def problem_of(raw: Mapping[str, Any]) -> Problem:
    return Problem(**{**raw, "turns": tuple((role, text) for role, text in raw["turns"])})


def reply_of(turn: Turn) -> dict[str, Any]:
    if not isinstance(turn, Turn):
        raise TypeError(f"respond returned a {type(turn).__name__}, not a dapo.environments.protocol.Turn")
    return {
        "verdict": "",
        "text": checked(turn.text, "respond"),
        "role": str(turn.role),
        "called": bool(turn.called),
        "failed": bool(turn.failed),
        "score": None if turn.score is None else encoded(turn.score),
    }


def checked(text: str, method: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{method} gave a {type(text).__name__} for a text")
    if len(text) > MAX_TEXT_CHARS:
        raise ValueError(f"{method} gave {len(text):,} characters; {MAX_TEXT_CHARS:,} are the most")
    return text


def main(settings: dict[str, Any]) -> None:
    def prepared() -> Work:
        return Host(settings["verifier"]).work

    serve(settings, prepared, starts_programs=False)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
