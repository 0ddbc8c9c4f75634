"""A process that asks reasoning-gym: reads a JSON request from standard input, writes JSON lines. No torch.

Its entries depend on the order of sets of texts: it is started with PYTHONHASHSEED = 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from dapo.data.keys import normalized
from dapo.errors import DapoError, DataError
from dapo.rewards.gym import tasks
from dapo.rewards.gym.names import HELD_OUT, HELD_OUT_SHARE, GymName, parse

Line = dict[str, Any]


def main() -> int:
    """Answer one request; 2 where the name cannot be used, with the reason as the last line."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a generator prints is no line of ours
    request = json.load(sys.stdin)
    with lines:
        try:
            for line in ANSWERS[request["do"]](request):
                lines.write(json.dumps(line) + "\n")
        except DapoError as error:
            lines.write(json.dumps({"error": error.message, "remedy": error.remedy}) + "\n")
            return error.exit_code
    return 0


def rows(request: Line) -> Iterator[Line]:
    """The problems of a name, in the order of their indices; each question once, and none of the other split."""
    name = parse(request["name"])
    data_set = tasks.dataset(name, shown=request["name"])
    seen: set[str] = set()
    for index in range(name.n_drawn):
        try:
            entry = drawn(data_set, index, name, request["name"])
        except IndexError:  # a finite task
            return
        question = question_of(entry, name, request["name"])
        key = normalized(question)
        if key in seen or is_held_out(key) != (name.split == HELD_OUT):
            continue
        seen.add(key)
        where = {"name": name.canonical, "index": index, "digest": tasks.digest(entry)}
        yield {
            "question": question,
            "answer": "" if entry["answer"] is None else str(entry["answer"]),
            "source": f"gym:{name.task}",
            "gym": {**where, **tasks.facts(name.task, entry)},
        }
        if len(seen) == name.size:
            return


def listing(_: Line) -> Iterator[Line]:
    """Every task: where it belongs, an answer, who scores it, its parameters."""
    for task in tasks.registered():
        data_set = tasks.dataset(parse(f"gym:{task}?size=20"))
        entry = data_set[0]
        yield {
            "task": task,
            "kind": type(data_set).__module__.split(".")[1],
            "answer": example_of(entry),
            "scored": scored_by(task, data_set),
            "parameters": tasks.described(task),
        }


def example_of(entry: dict[str, Any]) -> str:
    """A right answer of an entry, empty where it holds none."""
    metadata = entry["metadata"]
    if entry["answer"] is not None:
        return str(entry["answer"])
    given = next((metadata[key] for key in EXAMPLES if key in metadata), "")
    return given if isinstance(given, str) else json.dumps(given)


EXAMPLES = ("example_correct_answer", "example_answer", "possible_answer")


def scored_by(task: str, data_set: Any) -> str:
    from reasoning_gym.dataset import ProceduralDataset

    if task in tasks.OWN_SCORER:
        return "expression"
    return "text" if task in tasks.BY_TEXT or type(data_set).score_answer is ProceduralDataset.score_answer else "rule"


def drawn(data_set: Any, index: int, name: GymName, shown: str) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = data_set[index]
    except IndexError:
        raise
    except Exception as error:  # a hundred generators refuse values, each with an error of its own
        raise DataError(
            f"{shown}: {name.task} makes no problem of these parameters: {type(error).__name__}: {error}.",
            remedy=f"Its parameters: {tasks.described(name.task)}.",
        ) from None
    return entry


def question_of(entry: dict[str, Any], name: GymName, shown: str) -> str:
    """The question; bare, its expression as the bundled model reads it: 17+8-2=?"""
    if not name.bare:
        return str(entry["question"])
    if "expression" not in entry["metadata"]:
        raise DataError(
            f"{shown}: bare = true: a problem of {name.task} is no expression.",
            remedy="Leave it out, or use chain_sum, products or basic_arithmetic.",
        )
    return "".join(str(entry["metadata"]["expression"]).split()) + "=?"


def is_held_out(key: str) -> bool:
    """Which side of the split a question is on: a property of its text, so that no seed or size can mix the sides."""
    return hashlib.sha256(key.encode()).digest()[0] % HELD_OUT_SHARE == 0


ANSWERS: dict[str, Callable[[Line], Iterator[Line]]] = {"rows": rows, "list": listing}

if __name__ == "__main__":
    sys.exit(main())
