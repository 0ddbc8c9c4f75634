"""Environments of the package `verifiers` (its `MultiTurnEnv`): their set-up, responses, stop conditions and rubric.

Their rollout loop and their client of a model are not used: the model is ours. Written for and tested with 0.3.1, the
last version with these classes.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from dapo.environments.calls import arguments_of, tool_calls
from dapo.environments.protocol import Turn
from dapo.errors import ConfigError
from dapo.rewards.functions import is_part
from dapo.rewards.worker import MAX_PARTS
from dapo.types import Problem, Score

REMEDY = "pip install 'dapo[verifiers]', which brings verifiers 0.3.1."
TOOLS = 'You may call these tools, each as <tool_call>{"name": ..., "arguments": {...}}</tool_call>:'
T = TypeVar("T")


class VerifiersEnv:
    """Subclass it and name the environment, as `verifiers` would load it; or return your own object from `load`.

    A problem's question, answer and `meta` are the row's prompt, answer and info. The rubric's sum is the score, and
    its functions are the score's parts.
    """

    environment = ""
    arguments: Mapping[str, Any] = {}

    @classmethod
    def load(cls) -> Any:
        """The environment, made once in a process: what belongs to an episode is in its state."""
        from verifiers import load_environment

        return load_environment(cls.environment, **cls.arguments)

    def start(self, problem: Problem, seed: int) -> str | None:  # noqa: ARG002  a row of theirs has no seed
        self._env = loaded(type(self))  # type: ignore[arg-type]  # a class has a hash
        return run(self._start(problem))

    def respond(self, said: str) -> Turn:
        return run(self._respond(said))

    async def _start(self, problem: Problem) -> str | None:
        from verifiers.clients import OpenAIChatCompletionsClient

        row = {
            "prompt": [{"role": "user", "content": problem.question}],
            "answer": problem.answer,
            "info": dict(problem.meta),
            "example_id": 0,
        }
        state = await self._env.init_state(row, OpenAIChatCompletionsClient(None), "ours")
        self._state = await self._env.setup_state(state) or state
        self._messages = list(self._state["prompt"])
        added = [self._env.system_prompt or "", *map(text_of, self._messages[1:])]
        if tools := self._state["tool_defs"]:
            added.append("\n".join([TOOLS, *(tool.model_dump_json(exclude_none=True) for tool in tools)]))
        return "\n\n".join(text for text in added if text) or None

    async def _respond(self, said: str) -> Turn:
        response = response_of(said)
        called = bool(response.message.tool_calls)
        await self._env.add_model_response(self._state, self._messages, response)
        if await self._env.is_completed(self._state):
            return await self._end("", called)
        messages = await self._env.get_prompt_messages(self._state)
        answers = messages[len(self._messages) + 1 :]  # after what the model said
        self._messages = messages
        text = "\n".join(map(text_of, answers))
        if await self._env.is_completed(self._state):
            return await self._end(text, called)
        return Turn(text, role=answers[-1]["role"] if answers else "user", called=called)

    async def _end(self, text: str, called: bool) -> Turn:
        await self._env.cleanup(self._state)  # also gathers the completion
        await self._env.rubric.score_rollout(self._state)
        await self._env.rubric.cleanup(self._state)
        named = [(name, float(value)) for name, value in (self._state["metrics"] or {}).items() if is_part(name, value)]
        return Turn(text, Score(float(self._state["reward"]), parts=dict(named[:MAX_PARTS])), called=called)


@functools.cache
def loaded(kind: type[VerifiersEnv]) -> Any:
    """The environment of a subclass of VerifiersEnv, checked."""
    key = f"data.environment = '{kind.__module__}:{kind.__qualname__}'"
    try:
        env = kind.load()
    except ImportError as error:
        raise ConfigError(f"{key}: verifiers cannot be imported: {error}.", remedy=REMEDY) from error
    missing = [name for name in ("setup_state", "add_model_response", "is_completed") if not hasattr(env, name)]
    if missing:
        raise ConfigError(f"{key}: {type(env).__name__} is no MultiTurnEnv: it has no {missing[0]}.", remedy=REMEDY)
    if env.rubric.has_group_rewards:
        raise ConfigError(
            f"{key}: its rubric compares the rollouts of a group, and an episode is scored alone.",
            remedy="Leave out the reward functions of whole groups; advantages are relative to the group anyway.",
        )
    return env


@functools.cache
def runner() -> asyncio.Runner:
    return asyncio.Runner()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """All of a process in one event loop: an environment may keep what belongs to it."""
    return runner().run(coroutine)


def response_of(said: str) -> Any:
    """A turn of ours as a response of theirs, with its tool calls; what is no call stays text."""
    from verifiers.types import Response, ResponseMessage, ToolCall

    calls = []
    for number, body in enumerate(tool_calls(said)):
        try:
            call = json.loads(body)
            arguments = arguments_of(call)
        except (ValueError, RecursionError):
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            calls.append(ToolCall(id=f"call-{number}", name=call["name"], arguments=json.dumps(arguments or {})))
    message = ResponseMessage(
        content=said,
        tool_calls=calls or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return Response(id="ours", created=0, model="ours", message=message)


def text_of(message: Any) -> str:
    """The text of a message; pictures are left out."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or [] if part["type"] == "text")
