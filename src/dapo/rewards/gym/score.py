"""The verifiers `gym` and `gym-graded`: the answer in a response, scored by its task's own rule. For workers only.

Nothing a model wrote is evaluated. Nine of reasoning-gym's scorers call `eval` or sympy's parser, which evaluates, on
the answer: two have a scorer of ours, four get a parser of literals in the place of `eval`, and three are only handed
what a list of signs and names allows.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
from typing import Any

from dapo.rewards.decision import Decision, Outcome
from dapo.rewards.gym import expression, tasks
from dapo.rewards.gym.names import parse
from dapo.rewards.limits import MAX_RESPONSE_CHARS
from dapo.rewards.math.extract import final_statement
from dapo.types import Score, Task, Verdict

MAX_ANSWER_CHARS = 20_000  # the longest reference of any task with its defaults has some thousand
# Modules whose scorers call `eval` on an answer that is not the reference to the letter, for lists in Python's form.
LITERALS = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
# Tasks whose scorers hand the answer to sympy's parser, and what may stand in it: no attribute, no index, no string.
SYMBOLIC = ("intermediate_integration", "polynomial_multiplication", "simple_integration")
_FUNCTIONS = "sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|exp|log|ln|sqrt|Abs|pi"
_SYMBOLIC = re.compile(
    rf"(?:\s|\d{{1,12}}(?!\d)(?:\.\d{{1,12}}(?!\d))?|(?:{_FUNCTIONS})(?!\w)|[a-zCEXYZ](?!\w)|[-+*/()])*"
)
_MAX_SYMBOLIC_CHARS = 1_000
_TAGS = ("<answer>", "</answer>")
_TAIL_CHARS = 64_000


def decide(task: Task, *, graded: bool = False) -> Outcome:
    """CORRECT where the task's scorer gives 1. Graded: 2·score − 1, which is +1 and −1 at its ends as for a verdict."""
    answer = answer_in(task.response)
    if answer is None:
        return Decision(Verdict.UNPARSEABLE, None, "no answer in <answer> tags, after Answer: or in a box")
    if len(answer) > MAX_ANSWER_CHARS:
        return Decision(Verdict.WRONG, answer[:200], f"the answer has {len(answer):,} characters")
    score = score_of(answer, task)
    is_right = score >= 1.0
    if graded:
        return Score(2.0 * min(max(score, 0.0), 1.0) - 1.0, is_right)
    return Decision(Verdict.CORRECT if is_right else Verdict.WRONG, answer[:200])


def answer_in(response: str) -> str | None:
    """What the last <answer> tags hold; else the final statement as for other verifiers; None where there is none."""
    tail = response[-_TAIL_CHARS:]
    stop = tail.rfind(_TAGS[1])
    start = tail.rfind(_TAGS[0], 0, stop) if stop >= 0 else -1
    if start >= 0:
        return tail[start + len(_TAGS[0]) : stop].strip() or None
    statement = final_statement(response[-MAX_RESPONSE_CHARS:])
    if statement is None:
        return None
    return statement.text.strip().strip("*`$ ").removesuffix(".").strip() or None


def score_of(answer: str, task: Task) -> float:
    """The score from 0 to 1 by the problem's entry, which is made again from its name and its index."""
    where = task.meta["gym"]
    assert isinstance(where, dict), "checked when the problem was loaded"
    name = parse(str(where["name"]))
    if name.task in tasks.OWN_SCORER:
        return float(is_solved(answer, list(where["numbers"]), int(where["target"])))
    if name.task in tasks.BY_TEXT:
        return float(answer == task.answer)
    if name.task in SYMBOLIC and not may_be_parsed(answer):
        return 0.0
    without_eval()
    data_set = tasks.dataset(name)
    return float(data_set.score_answer(answer, entry_of(data_set, int(where["index"]), str(where["digest"]), task)))


def is_solved(answer: str, numbers: list[int], target: int) -> bool:
    """Whether the expression uses exactly these numbers and has the target's value."""
    try:
        value, used = expression.value_of(answer)
    except ValueError:
        return False
    return value == target and sorted(used) == sorted(numbers)


def may_be_parsed(answer: str) -> bool:
    """Whether an answer is made of numbers, single letters, known functions and signs alone."""
    return len(answer) <= _MAX_SYMBOLIC_CHARS and _SYMBOLIC.fullmatch(answer) is not None


@functools.cache
def without_eval() -> None:
    """From here on `eval` of these modules reads literals, and calls nothing."""
    for name in LITERALS:
        importlib.import_module(f"reasoning_gym.{name}").eval = ast.literal_eval  # type: ignore[attr-defined]


def entry_of(data_set: Any, index: int, digest: str, task: Task) -> dict[str, Any]:
    """The entry; where the scorer only compares with the reference, that is all it needs."""
    from reasoning_gym.dataset import ProceduralDataset

    if type(data_set).score_answer is ProceduralDataset.score_answer:
        return {"answer": task.answer}
    entry = _entry(data_set, index)
    if tasks.digest(entry) != digest:
        raise ValueError("reasoning-gym makes another problem of this name and index: is it another version?")
    return entry


@functools.lru_cache(maxsize=256)
def _entry(data_set: Any, index: int) -> dict[str, Any]:
    made: dict[str, Any] = data_set[index]
    return made


def problem_error(meta: object) -> str | None:
    """Why a problem cannot be scored here, None where it can; asked without importing reasoning-gym."""
    where = meta.get("gym") if isinstance(meta, dict) else None
    if not isinstance(where, dict) or not {"name", "index", "digest"} <= where.keys():
        return "it is no problem of reasoning-gym"
    return None
