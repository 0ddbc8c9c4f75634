"""Does a verifier of the user's own work at all? Asked before a run starts: a typing mistake is not a wrong answer."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Collection
from importlib.machinery import PathFinder

from dapo.errors import ConfigError
from dapo.processes import python_command, python_environment, search_working_folder
from dapo.rewards.functions import CALLS
from dapo.rewards.pool import VerifierPool
from dapo.rewards.verifiers import COMMAND_PREFIX, KEY, is_judge, is_own, named
from dapo.types import Task, Verdict

SECONDS = 120.0  # a module may import torch
OUR_CALL = CALLS["ours"]
_PASSED: set[str] = set()  # verifiers and tasks that have been tried by this process


def check_verifier(name: str, key: str = KEY) -> None:
    """ConfigError for a name that is none, a missing program or a missing module. Nothing of the user's is imported."""
    named(name, key)
    if is_judge(name):
        return
    if name.startswith(COMMAND_PREFIX):
        program = next(iter(shlex.split(name[len(COMMAND_PREFIX) :])), "")
        if shutil.which(program) is None:
            raise ConfigError(
                f"{key} = {name!r}: there is no program {program!r}.",
                remedy="Give its path, or put it where the shell finds it.",
            )
    elif ":" in name:
        module = name.rpartition(":")[0]
        if module.endswith(".py"):
            if not os.path.isfile(module):
                raise ConfigError(f"{key} = {name!r}: there is no file {module!r}.", remedy="Name a Python file.")
        elif not is_found(module) and (why := import_error(module)):  # it may be found in a way of its own
            raise ConfigError(
                f"{key} = {name!r}: {why}",
                remedy=f"Start where its module can be imported; it is called as {OUR_CALL}.",
            )


def is_found(module: str) -> bool:
    """Whether a module's file is where Python looks, or in the working folder; it and its packages are not imported."""
    search_working_folder()
    importlib.invalidate_caches()
    top, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        return False
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec is not None


def import_error(module: str) -> str:
    """Python's own words, from a process of its own, as workers import it; empty where it can be imported."""
    try:
        done = python("import importlib, sys; importlib.import_module(sys.argv[1])", module)
    except subprocess.TimeoutExpired:
        return f"importing {module} took more than {SECONDS:g} seconds."
    if not done.returncode:
        return ""
    return (done.stderr.strip().splitlines() or ["its import ended the process"])[-1]


def called_as(name: str) -> str:
    """How a function is called, by its parameters; as ours where it cannot be imported."""
    program = (
        "import sys; from dapo.rewards.functions import called_as; said = called_as(sys.argv[1]); print(); print(said)"
    )
    try:
        done = python(program, name)
    except subprocess.TimeoutExpired:
        return OUR_CALL
    return OUR_CALL if done.returncode else done.stdout.strip().splitlines()[-1]


def python(program: str, argument: str) -> subprocess.CompletedProcess[str]:
    """Run it as workers would."""
    return subprocess.run(
        python_command("-c", program, argument),
        env=python_environment(with_working_folder=True), capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def check_call(
    pool: VerifierPool, answer: str, meta: dict[str, object], *, key: str = KEY, parts: Collection[str] = ()
) -> None:
    """Let the pool judge a plain response to a real problem; ConfigError where its own verifier fails on that.

    `parts` are named rewards that its Score must carry.
    """
    name = pool.verifier.name
    task = Task(f"Answer: {answer}", answer, None, meta)
    limits = [pool.limits.seconds, pool.limits.memory_mb]
    tried = json.dumps([name, *limits, answer, meta, *parts], sort_keys=True, default=str)
    if not is_own(name) or is_judge(name) or tried in _PASSED:  # a judge's server may be down for now
        return
    judgement = pool.judge_all([task])[0]
    if judgement.verdict in (Verdict.CRASH, Verdict.TIMEOUT):
        raise ConfigError(
            f"{key} = {name!r}: tried on the response {task.response[:60]!r} to the first problem: "
            f"{judgement.verdict.value}: {judgement.message[:600]}",
            remedy='It gets one JSON line per response and answers with one: {"verdict": "CORRECT"} or {"value": 0.5}.'
            if name.startswith("command")
            else f"It is called as {called_as(name)} and returns a number, True or False, or dapo.Score.",
        )
    if missing := [part for part in parts if part not in judgement.parts]:
        raise ConfigError(
            f"rewards.parts.{missing[0]}: names neither a function nor a verifier, and the Score of {name!r} has no "
            f"such part (its parts: {', '.join(judgement.parts) or 'none'}).",
            remedy=f'Add function = "pkg.mod:function", or return dapo.Score(value, correct, '
            f"parts={{{missing[0]!r}: ...}}).",
        )
    _PASSED.add(tried)
