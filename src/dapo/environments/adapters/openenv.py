"""OpenEnv: an environment behind a server on this machine, stepped through its own client. Tested with 0.3.0."""

from __future__ import annotations

import ipaddress
import json
import weakref
from typing import Any
from urllib.parse import urlsplit

from dapo.environments.protocol import Turn
from dapo.errors import ConfigError
from dapo.types import Problem, Score

REMEDY = "pip install 'dapo[openenv]', which brings openenv-core 0.3.0."
NO_ACTION = "There is no action in this."
_NOT_SHOWN = ("done", "reward", "metadata")
_REFUSED = "VALIDATION_ERROR"  # the server's word for an action that does not fit


class OpenEnv:
    """Subclass it with the server's address and `action`: the function from what the model said to an action.

    The score is the sum of the rewards until the server says that the episode is done. Each episode has a session of
    its own, so the server must allow as many as there are episodes at a time (`max_concurrent_envs`).
    """

    url = "http://127.0.0.1:8000"

    def action(self, said: str) -> dict[str, Any] | None:
        """The action that the model means; None where there is none, and the model is told so."""
        raise NotImplementedError(f"{type(self).__name__} has no action(self, said)")

    def shown(self, observation: dict[str, Any]) -> str:
        """An observation as text: its only text, else all of it as JSON."""
        rest = {name: value for name, value in observation.items() if name not in _NOT_SHOWN}
        texts = [value for value in rest.values() if isinstance(value, str)]
        return texts[0] if len(texts) == len(rest) == 1 else json.dumps(rest, ensure_ascii=False, sort_keys=True)

    def reset_arguments(self, problem: Problem, seed: int) -> dict[str, Any]:  # noqa: ARG002  for those who want it
        """What the server's `reset` is given."""
        return {"seed": seed}

    def score(self, total: float) -> Score:
        """Of the sum of the rewards; graded, unless you say what counts as correct."""
        return Score(total)

    def start(self, problem: Problem, seed: int) -> str:
        self._client = connected(self.url)
        weakref.finalize(self, self._client.close)
        self._total = 0.0
        return self.shown(self._client.reset(**self.reset_arguments(problem, seed)).observation)

    def respond(self, said: str) -> Turn:
        action = self.action(said)
        if action is None:
            return Turn(NO_ACTION, failed=True)
        try:
            result = self._client.step(action)
        except RuntimeError as error:
            if _REFUSED not in str(error):
                raise
            return Turn(str(error)[:500], called=True, failed=True)
        self._total += float(result.reward or 0.0)
        text = self.shown(result.observation)
        return Turn(text, self.score(self._total) if result.done else None, called=True)


def connected(url: str) -> Any:
    """A client of a server on this machine."""
    if not is_loopback(urlsplit(url).hostname or ""):
        raise ConfigError(
            f"data.environment: url = {url!r} is not on this machine.",
            remedy="Run the environment's server here and name it as http://127.0.0.1:PORT.",
        )
    try:
        from openenv.core.generic_client import GenericEnvClient
    except ImportError as error:
        raise ConfigError(f"data.environment: openenv cannot be imported: {error}.", remedy=REMEDY) from error
    client = GenericEnvClient(base_url=url).sync()
    try:
        return client.connect()
    except ConnectionError as error:
        raise ConfigError(
            f"data.environment: url = {url!r}: {error}.", remedy="Start the environment's server first."
        ) from error


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
