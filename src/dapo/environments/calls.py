"""Tool calls in what a model wrote: fenced blocks, and `<tool_call>` with JSON as Qwen and Hermes write it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dapo.rewards.code import fenced_blocks

OPEN, CLOSE = "<tool_call>", "</tool_call>"
END_OF_THOUGHT = "</think>"
MAX_CHARS = 1_000_000
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool with an argument of text, or why it is none."""

    text: str = ""
    error: str = ""


def calls_in(said: str, *, tool: str, argument: str, languages: tuple[str, ...]) -> tuple[list[Call], bool]:
    """The calls of a turn in their order, and whether they are in the model's own format. Thoughts call nothing.

    Where there is a `<tool_call>`, fenced blocks are text.
    """
    said = said[-MAX_CHARS:].rpartition(END_OF_THOUGHT)[2]
    if OPEN in said:
        return [call_of(body, tool=tool, argument=argument) for body in tool_calls(said)], True
    return [Call(body) for language, body in fenced_blocks(said) if language.lower() in languages], False


def tool_calls(said: str) -> Iterator[str]:
    """What stands between the tags; the last one perhaps unclosed."""
    _, *rest = said.split(OPEN)
    return (part.partition(CLOSE)[0].strip() for part in rest)


def call_of(body: str, *, tool: str, argument: str) -> Call:
    """The call that this JSON is."""
    try:
        call = json.loads(body)
        arguments = arguments_of(call)
    except RecursionError:
        return Call(error="the tool call is nested too deeply")
    except ValueError as error:
        return Call(error=f"the tool call is not JSON: {error}"[:200])
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call(error='the tool call has no "name"')
    if call["name"] != tool:
        return Call(error=f"there is no tool {call['name'][:40]!r}; there is {tool!r}")
    text = arguments.get(argument) if isinstance(arguments, dict) else None
    if not isinstance(text, str):
        return Call(error=f'the tool call has no text "{argument}" in its "arguments"')
    return Call(text)


def arguments_of(call: Any) -> Any:
    """An object; some models write it as JSON within the JSON."""
    if not isinstance(call, dict):
        return None
    arguments = next((call[name] for name in _ARGUMENTS if name in call), None)
    return json.loads(arguments) if isinstance(arguments, str) else arguments
