"""A worker process: reads tasks as JSON lines from standard input, writes decisions as JSON lines. No torch, no pickle.

It leaves when its input ends. The kernel ends it when its parent is gone (Linux), and anywhere when a task uses more
CPU time than it may or sleeps too long, even if no process is left to kill it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from dapo.processes import imported_module
from dapo.rewards.command import program_pids
from dapo.rewards.decision import Outcome
from dapo.rewards.limits import STACK_SIGNAL
from dapo.rewards.process_tree import adopt_orphans, die_with_parent, own_seconds, reap_orphans
from dapo.rewards.verifiers import COMMAND_PREFIX, named
from dapo.types import CORRECT, PART_NAME, Score, StopReason, Task, Verdict

MAX_PARTS = 32  # that one Score may carry
_GRACE_S = 2.0  # after which the worker ends itself; its parent should have done so before


Order = dict[str, Any]
Work = Callable[[Order], dict[str, Any]]


def main(settings: dict[str, Any]) -> None:
    """Verify until standard input ends."""

    def prepared() -> Work:
        verifier = named(settings["verifier"])
        preload(settings["verifier"])
        return lambda order: encoded(
            verifier.work(
                Task(
                    order["response"],
                    order["answer"],
                    StopReason(order["stop_reason"]) if order["stop_reason"] else None,
                    order["meta"],
                    seconds=settings["seconds"],
                )
            )
        )

    is_program = settings["verifier"] in ("code", "command") or settings["verifier"].startswith(COMMAND_PREFIX)
    serve(settings, prepared, starts_programs=is_program)


def serve(settings: dict[str, Any], prepared: Callable[[], Work], *, starts_programs: bool) -> None:
    """Do what each line of standard input asks for, until it ends; `prepared` loads what is needed for that."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogatepass")
    os.dup2(2, 1)  # what a verifier prints must not look like a reply
    tasks = os.fdopen(os.dup(0), "r", encoding="utf-8", errors="surrogatepass", newline="\n")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # The terminal and batch systems send them to every process of a run; they are the parent's to handle.
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    if "stack_file" in settings:
        os.set_inheritable(settings["stack_file"], False)  # no program that it starts
        faulthandler.register(STACK_SIGNAL, settings["stack_file"], all_threads=False)
    die_with_parent()
    if starts_programs:
        adopt_orphans()
    work = prepared()
    limit_memory(settings["memory_mb"])

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    reply({"ready": True})
    for line in tasks:
        order = json.loads(line)
        start = own_seconds()
        reply({"started": order["ticket"], "cpu": start})
        limit_time(settings["seconds"] + _GRACE_S, settings["wall_seconds"] + _GRACE_S)
        out_of_memory = False
        try:
            outcome = work(order)
        except MemoryError:
            out_of_memory = True
            outcome = crash(f"out of memory ({settings['memory_mb']} MB)")
        except RecursionError:
            outcome = crash("nested too deeply")
        except Exception as error:  # a verifier is anybody's code: its fault is this response's verdict, CRASH
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome = crash(f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})")
        limit_time(0, 0)
        outcome |= {"ticket": order["ticket"], "seconds": own_seconds() - start, "leaving": out_of_memory}
        reply(outcome)
        if starts_programs:
            reap_orphans(program_pids())
        if out_of_memory:
            return  # what the task left behind is not worth keeping


def preload(verifier: str) -> None:
    """Import what tasks will need, so that no task pays for it."""
    if verifier in ("math", "math-verify"):
        import math_verify  # noqa: F401

        logging.disable(logging.CRITICAL)  # math-verify announces on every call that its time-outs are off
    elif verifier in ("gym", "gym-graded"):
        with contextlib.suppress(ImportError):  # two tasks need it not, and the others say so
            import reasoning_gym  # noqa: F401
    elif verifier == "code":
        from dapo.rewards import code  # noqa: F401
    elif ":" in verifier and not verifier.startswith(COMMAND_PREFIX):
        import dapo.rewards.functions  # noqa: F401

        with contextlib.suppress(Exception):  # the first task meets the same error, and its judgement says so
            imported_module(verifier.rpartition(":")[0])


def limit_time(cpu_s: float, wall_s: float) -> None:
    """SIGPROF after that much CPU time of this process (all its threads), SIGALRM by the clock; 0 switches them off."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def limit_memory(memory_mb: int) -> None:
    limit = memory_mb * 2**20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def encoded(outcome: Outcome) -> dict[str, Any]:
    """A decision as it goes over the pipe: rule verifiers score +1 or −1 (DAPO eq. 7), functions what they say."""
    if isinstance(outcome, Score):
        value = float(outcome.value)
        if value != value or value in (float("inf"), float("-inf")):
            return crash(f"the reward is {value}")
        try:
            parts = parts_of(outcome.parts)
        except (TypeError, ValueError, AttributeError) as error:
            return crash(f"Score.parts: {error}")
        correct = outcome.correct
        verdict = Verdict.CORRECT if correct else Verdict.WRONG
        said = {"verdict": verdict.value, "value": value, "extracted": None, "message": "", "graded": correct is None}
        return said | {"parts": parts}
    value = 1.0 if outcome.verdict is Verdict.CORRECT else -1.0
    return {
        "verdict": outcome.verdict.value,
        "value": value,
        "extracted": outcome.extracted,
        "message": outcome.message,
        "graded": False,
    }


def parts_of(parts: Mapping[str, Any]) -> dict[str, float]:
    """Names and finite numbers, or ValueError."""
    if len(parts) > MAX_PARTS:
        raise ValueError(f"{len(parts)} parts, and {MAX_PARTS} are the most")
    values = {}
    for name, value in parts.items():
        if not isinstance(name, str) or not PART_NAME.fullmatch(name) or name == CORRECT:
            raise ValueError(f"{name!r} is no name for a part: up to 40 letters, digits, - and _, not {CORRECT!r}")
        values[name] = float(value)
        if not math.isfinite(values[name]):
            raise ValueError(f"{name} is {values[name]}")
    return values


def crash(message: str) -> dict[str, Any]:
    return {"verdict": "CRASH", "value": -1.0, "extracted": None, "message": message[:2_000], "graded": False}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
