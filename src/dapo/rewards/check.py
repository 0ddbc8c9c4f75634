"""Is a verifier of the user's own there at all? Asked before a run starts: a typing mistake is not a wrong answer."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys

from dapo.errors import ConfigError
from dapo.rewards.verifiers import COMMAND_PREFIX, named
from dapo.rewards.workers import worker_environment

SECONDS = 120.0  # a module may import torch

# Run apart, as workers do: a user's module is not imported into our process.
LOOK = """
import importlib, inspect, sys
module, name = sys.argv[1:]
try:
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    inspect.signature(function).bind("response", "answer", {})
except BaseException as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def check_verifier(name: str) -> None:
    """ConfigError for a function that cannot be imported or called with three arguments, or a missing program."""
    named(name)
    if name.startswith(COMMAND_PREFIX):
        program = next(iter(shlex.split(name[len(COMMAND_PREFIX) :])), "")
        if shutil.which(program) is None:
            raise ConfigError(
                f"rewards.verifier (--verifier) = {name!r}: there is no program {program!r}.",
                remedy="Give its path, or put it where the shell finds it.",
            )
    elif ":" in name:
        module, _, function = name.partition(":")
        try:
            done = subprocess.run(
                [sys.executable, "-c", LOOK, module, function],
                env=worker_environment(), capture_output=True, text=True, timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise refusal(name, f"importing {module} took more than {SECONDS:g} seconds.") from None
        if done.returncode:
            raise refusal(name, (done.stderr.strip().splitlines() or ["its import ended the process"])[-1])


def refusal(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"rewards.verifier (--verifier) = {name!r}: {why}",
        remedy="Start where its module can be imported; it is called as function(response, answer, meta).",
    )
