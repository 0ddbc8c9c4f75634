"""The environments that come with dapo, by name, and how one of the user's is found."""

from __future__ import annotations

import shlex

from dapo.environments.protocol import Environment
from dapo.errors import ConfigError
from dapo.processes import imported
from dapo.rewards.verifiers import is_function

BUILTIN = {
    "python": "dapo.environments.python_tool:PythonTool",
    "calculator": "dapo.environments.calculator:Calculator",
    "guess": "dapo.environments.guess:Guess",
    "wordle": "dapo.environments.wordle:Wordle",
    "second-try": "dapo.environments.second_try:SecondTry",
}
KEY = "data.environment"
OWN = "Write your own as package.module:Class or FILE.py:Class; a module is imported from where you start dapo."


def check_environment(name: str, key: str = KEY) -> None:
    """ConfigError for what cannot be an environment; nothing is imported."""
    if name not in BUILTIN and not is_function(name):
        raise ConfigError(f"{key} = {name!r}: no such environment.", remedy=f"Use one of {', '.join(BUILTIN)}. {OWN}")


def environment_class(name: str, key: str = KEY) -> type[Environment]:
    """The class of that name, or ConfigError about `key`. It is imported here: call this in workers only."""
    check_environment(name, key)
    module, _, attribute = BUILTIN.get(name, name).rpartition(":")
    try:
        found = imported(BUILTIN.get(name, name))
    except Exception as error:
        is_file = module.endswith(".py")
        raise ConfigError(
            f"{key} = {name!r}: cannot be imported: {type(error).__name__}: {error}.",
            remedy=f"Try it: {shlex.join(['python', *([module] if is_file else ['-c', f'import {module}'])])}. {OWN}",
        ) from error
    if not isinstance(found, type) or not all(
        callable(getattr(found, method, None)) for method in ("start", "respond")
    ):
        raise ConfigError(
            f"{key} = {name!r}: {attribute} is no class with the methods start and respond.",
            remedy="def start(self, problem, seed) -> str | None and def respond(self, said) -> dapo.environments."
            "protocol.Turn are all that an environment needs.",
        )
    return found
