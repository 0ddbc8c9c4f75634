"""Verifiers by name. Each turns a task into a decision; what may hang or run untrusted code runs in a worker only."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dapo.errors import ConfigError
from dapo.rewards.decision import JUDGE_PREFIX, Decision, Outcome
from dapo.types import Task, Verdict

Judge = Callable[[Task], Outcome]


@dataclass(frozen=True, slots=True)
class Verifier:
    """`decide` is cheap, exact and safe in any process, None where it cannot tell; `work` runs in a worker."""

    name: str
    decide: Callable[[Task], Decision | None]
    work: Judge
    seconds: float = 1.5  # default limits of its tasks
    memory_mb: int = 768
    grace_seconds: float = 0.0  # beyond the limit, for a verifier that counts itself and says what it stopped


BUILT_IN = ("math", "dapo-published", "exact", "choice", "code", "command", "math-verify", "gym", "gym-graded")
COMMAND_PREFIX = "command:"
KEY = "rewards.verifier (--verifier)"
_FUNCTION = re.compile(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_]\w*")


def named(name: str, key: str = KEY) -> Verifier:
    """The verifier of that name, or ConfigError about `key`. A user's function is imported in workers only.

    Each imports its own rules: a worker for a function then starts in half of the time.
    """
    match name:
        case "math":
            from dapo.rewards.math import rule

            return Verifier(
                name,
                lambda task: rule.decide(task.response, task.answer),
                lambda task: rule.decide_fully(task.response, task.answer),
            )
        case "dapo-published":
            from dapo.rewards import published

            return _cheap(name, lambda task: published.decide(task.response, task.answer))
        case "exact":
            from dapo.rewards import exact

            return _cheap(name, exact.decide)
        case "choice":
            from dapo.rewards import choice

            return _cheap(name, choice.decide)
        case "math-verify":
            return Verifier(name, _undecided, _math_verify, seconds=10.0)
        case "code":
            return Verifier(name, _undecided, _code, seconds=10.0, memory_mb=1024, grace_seconds=1.0)
        case "gym" | "gym-graded":
            return Verifier(name, _undecided, _gym(graded=name == "gym-graded"), seconds=10.0, memory_mb=4096)
        case "command":
            return Verifier(name, _undecided, _command, seconds=30.0, memory_mb=8192)
    if is_judge(name):
        from dapo.rewards.judging.rubric import read_rubric

        read_rubric(name)  # refuses what is none
        return Verifier(name, _undecided, _asked_elsewhere)
    if name.startswith(COMMAND_PREFIX) and name[len(COMMAND_PREFIX) :].strip():
        return Verifier(name, _undecided, _command_line(name[len(COMMAND_PREFIX) :]), seconds=30.0, memory_mb=8192)
    if is_function(name):
        return Verifier(name, _undecided, _function(name), seconds=10.0, memory_mb=4096)
    raise ConfigError(
        f"{key} = {name!r}: no such verifier.",
        remedy=f"Use one of {', '.join(BUILT_IN)}, judge:FILE.toml, command:PROGRAM, or your own "
        "function as package.module:function or FILE.py:function.",
    )


def _cheap(name: str, judge: Callable[[Task], Decision]) -> Verifier:
    return Verifier(name, judge, judge)


def _undecided(_task: Task) -> None:
    return None


def _asked_elsewhere(_task: Task) -> Decision:
    raise AssertionError("a judge is asked by threads, not by a worker")


def _math_verify(task: Task) -> Decision:
    """math-verify alone, on the whole response: a second opinion for audits."""
    from dapo.rewards.math import symbolic

    extracted, is_same = symbolic.judged(task.response, task.answer)
    if extracted is None:
        return Decision(Verdict.UNPARSEABLE, None, "math-verify finds no answer")
    return Decision(Verdict.CORRECT if is_same else Verdict.WRONG, extracted)


def _code(task: Task) -> Decision:
    from dapo.rewards import code

    return code.decide(task.response, task.answer, task.meta, seconds=task.seconds)


def _gym(*, graded: bool) -> Judge:
    def work(task: Task) -> Outcome:
        from dapo.rewards.gym import score

        return score.decide(task, graded=graded)

    return work


def _command(task: Task) -> Outcome:
    from dapo.rewards import command

    return command.decide(task)


def _command_line(line: str) -> Judge:
    """`command:PROGRAM ARGUMENTS`: the program stands in the verifier's name."""
    return lambda task: _command(replace(task, meta={**task.meta, "command": line}))


def _function(name: str) -> Judge:
    @functools.cache
    def loaded() -> Judge:
        from dapo.rewards import functions

        return functions.load(name)

    return lambda task: loaded()(task)


def is_judge(verifier: str) -> bool:
    """Whether it is `judge:FILE.toml`, a model behind a server."""
    return verifier.startswith(JUDGE_PREFIX)


def is_own(verifier: str) -> bool:
    """Whether it is the user's: a program, a function, or a server that gets every response."""
    return verifier == "command" or ":" in verifier


def is_function(verifier: str) -> bool:
    """Whether it is `package.module:function` or `FILE.py:function`."""
    return bool(_FUNCTION.fullmatch(verifier)) and not verifier.startswith((COMMAND_PREFIX, JUDGE_PREFIX))


def needs_reference(verifier: str) -> bool:
    """Whether it compares with a reference. Code, command and functions may judge by `meta` alone."""
    return verifier in ("math", "dapo-published", "exact", "choice", "math-verify")


def reference_error(answer: str, *, verifier: str = "math", meta: Mapping[str, object] | None = None) -> str | None:
    """Why a problem cannot be judged by its reference, or by its tests where `meta` is known; None where it can.

    Integers cost a regular expression.
    """
    if verifier == "math":
        from dapo.rewards.math import rule

        return rule.reference_error(answer)
    if verifier == "choice":
        from dapo.rewards.choice import letter_in

        return None if letter_in(answer) else "it is not one letter from A to E"
    if verifier in ("dapo-published", "exact"):
        return None if answer.strip() else "it is empty"
    if verifier in ("gym", "gym-graded") and meta is not None:
        from dapo.rewards.gym.score import problem_error

        return problem_error(meta)
    if verifier == "code" and meta is not None:
        from dapo.rewards.code import tests_error

        return tests_error(answer, meta)
    return None
