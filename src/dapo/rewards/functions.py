"""The user's own reward functions: how each is called, by its parameters' names, and what it may return.

Ours is `function(response, answer, meta)`. TRL's (`completions`, columns as keyword arguments) and verl's
(`solution_str`, `ground_truth`) are called by name with what a task holds. Imported in workers only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from dapo.processes import imported
from dapo.types import CORRECT, PART_NAME, Score, Task

REFERENCE_NAMES = ("answer", "ground_truth", "solution", "target", "final_answer", "expected_answer")
QUESTION_NAMES = ("question", "problem", "prompt")
WRAP = "Wrap it: def reward(response, answer, meta): return ..."
CALLS = {
    "ours": "function(response, answer, meta)",
    "TRL": "function(completions=[response], answer=[answer], prompts=[question], ...), each column a list of one,",
    "verl": "function(data_source=..., solution_str=response, ground_truth=answer, extra_info=meta), as it names them,",
}
Parameters = Mapping[str, inspect.Parameter]


def load(name: str) -> Callable[[Task], Score]:
    """The function of that name as one of a task; an error says what cannot be imported or called."""
    function = imported(name)
    if not callable(function):
        raise TypeError(f"{name.rpartition(':')[2]} is no function")
    arguments = arguments_for(function)

    def score(task: Task) -> Score:
        positional, named = arguments(task)
        return score_of(function(*positional, **named), name)

    return score


def called_as(name: str) -> str:
    """In words how the function of that name is called."""
    return CALLS[kind_of(parameters_of(imported(name)))]


def parameters_of(function: Callable[..., Any]) -> Parameters:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # written in C
        return {}


def kind_of(parameters: Parameters) -> str:
    """Whose way of calling it is: a key of CALLS."""
    if "completions" in parameters:
        return "TRL"
    return "verl" if {"solution_str", "ground_truth"} <= parameters.keys() else "ours"


def arguments_for(function: Callable[..., Any]) -> Callable[[Task], tuple[tuple[Any, ...], dict[str, Any]]]:
    """How to call it: positional and keyword arguments, given a task. TypeError where nothing fits."""
    parameters = parameters_of(function)
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{shown(parameters)} is async, and is called without an event loop. {WRAP}")
    if {"queries", "prompts"} <= parameters.keys():
        raise TypeError(
            f"it takes {shown(parameters)}: OpenRLHF's, whose queries are prompt and response as one text in lists, "
            "and no task holds that text. Wrap it: def reward(response, answer, meta): return "
            'float(reward_func([meta["question"] + response], [meta["question"]], [answer])[0])'
        )
    kind = kind_of(parameters)
    if kind == "TRL":
        return lambda task: ((), chosen(parameters, trl_arguments(task, parameters)))
    if kind == "verl":
        return lambda task: ((), chosen(parameters, verl_arguments(task)))
    if parameters:
        try:
            inspect.signature(function).bind("response", "answer", {})
        except TypeError as error:
            raise TypeError(
                f"it takes {shown(parameters)} ({error}). Known are (response, answer, meta), TRL's (completions, "
                f"**columns) and verl's (data_source, solution_str, ground_truth, extra_info). {WRAP}"
            ) from None
    return lambda task: ((task.response, task.answer, dict(task.meta)), {})


def trl_arguments(task: Task, parameters: Parameters) -> dict[str, Any]:
    """A batch of one: lists of one completion and of each column; the reference by the name the function asks for."""
    columns: dict[str, Any] = {
        name: [task.answer] for name in REFERENCE_NAMES if name == "answer" or name in parameters
    }
    columns |= {name: [value] for name, value in task.meta.items()}
    question = next((task.meta[name] for name in QUESTION_NAMES if name in task.meta), None)
    return columns | {"completions": [task.response]} | ({"prompts": [question]} if question is not None else {})


def verl_arguments(task: Task) -> dict[str, Any]:
    return {
        "data_source": task.meta.get("data_source", ""),
        "solution_str": task.response,
        "ground_truth": task.answer,
        "extra_info": dict(task.meta),
    }


def chosen(parameters: Parameters, offered: dict[str, Any]) -> dict[str, Any]:
    """Of what is offered, what the function names, or all where it takes any."""
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in offered
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if missing:
        raise TypeError(
            f"it takes {shown(parameters)}, and this problem has no {' and no '.join(missing)}; it has "
            f"{', '.join(sorted(offered))}. {WRAP}"
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}


def shown(parameters: Parameters) -> str:
    return "(" + ", ".join(str(parameter) for parameter in parameters.values()) + ")"


def score_of(returned: object, name: str) -> Score:
    """A Score; or True or False, a number, a list of one of these (TRL's), a dict with "score" (verl's).

    A number alone says nothing about right and wrong: the reward is graded. A dict may add that as "acc"; its other
    numbers are parts, as verl's GDPO takes them.
    """
    value, correct = returned, None
    parts: dict[str, float] = {}
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and "score" in value:
        parts = {name: float(number) for name, number in value.items() if is_part(name, number)}
        value, correct = value["score"], value.get("acc")
    if isinstance(value, Score):
        return value
    value, correct = plain(value), plain(correct)
    if isinstance(value, bool):
        return Score(1.0 if value else -1.0, value, parts)
    if isinstance(value, int | float):
        return Score(float(value), None if correct is None else bool(correct), parts)
    raise TypeError(
        f"{name} returned {brief(returned)}; it must return a number, True or False, or dapo.Score(value, correct)"
    )


def is_part(name: object, value: object) -> bool:
    """Whether an entry of verl's dict is a named reward: a number that is neither the score nor right and wrong."""
    is_name = isinstance(name, str) and PART_NAME.fullmatch(name) is not None and name not in ("score", "acc", CORRECT)
    return is_name and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plain(value: object) -> object:
    """A number of numpy or torch as one of Python."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", 0) == 0 else value


def brief(value: object) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, list | tuple | dict) else f"a {kind}"
