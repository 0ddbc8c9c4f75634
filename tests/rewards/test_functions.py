"""Reward functions as others write them: called by the names of their parameters, and what they return."""

import inspect
from fractions import Fraction

import numpy as np
import pytest

from dapo.rewards.functions import arguments_for, score_of
from dapo.rewards.verifiers import Task
from dapo.types import Problem, Score

TASK = Task("Answer: 42", "42", None, {"level": 3, "tests": [1]})


def ours(response, answer, meta):
    return response, answer, meta


def ours_by_other_names(text, gold, *rest):
    return text, gold, *rest


def trl_plain(completions, **kwargs):
    return completions, kwargs


def trl_columns(completions, answer, level, missing=None):
    return completions, answer, level, missing


def trl_reference_by_another_name(completions, solution, **kwargs):
    return completions, solution, kwargs


def trl_prompts(prompts, completions, question):
    return prompts, completions, question


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return data_source, solution_str, ground_truth, extra_info


def verl_keywords(*, solution_str, ground_truth, **others):
    return solution_str, ground_truth, others


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (ours, ("Answer: 42", "42", TASK.meta)),
        (ours_by_other_names, ("Answer: 42", "42", TASK.meta)),
        (trl_plain, (["Answer: 42"], {"answer": ["42"], "level": [3], "tests": [[1]]})),
        (trl_columns, (["Answer: 42"], ["42"], [3], None)),
        (trl_reference_by_another_name, (["Answer: 42"], ["42"], {"answer": ["42"], "level": [3], "tests": [[1]]})),
        (verl, ("", "Answer: 42", "42", TASK.meta)),
        (verl_keywords, ("Answer: 42", "42", {"data_source": "", "extra_info": TASK.meta})),
    ],
)
def test_functions_are_called_by_their_parameters(function, got):
    positional, named = arguments_for(function)(TASK)
    assert function(*positional, **named) == got


def test_columns_win_over_other_names_of_the_reference():
    task = Task("r", "42", None, {"solution": "worked out", "question": "6 x 7?", "data_source": "gsm8k"})
    positional, named = arguments_for(trl_reference_by_another_name)(task)
    assert trl_reference_by_another_name(*positional, **named)[1] == ["worked out"]
    positional, named = arguments_for(trl_prompts)(task)
    assert trl_prompts(*positional, **named) == (["6 x 7?"], ["r"], ["6 x 7?"])
    assert verl(*arguments_for(verl)(task)[0], **arguments_for(verl)(task)[1])[0] == "gsm8k"


def test_a_problem_gives_its_question_and_its_source():
    problem = Problem("1", "6 x 7?", "42", "gsm8k", {"level": 3})
    task = Task("r", "42", None, problem.for_verifier())
    assert trl_prompts(**arguments_for(trl_prompts)(task)[1]) == (["6 x 7?"], ["r"], ["6 x 7?"])
    assert verl(**arguments_for(verl)(task)[1])[::3] == ("gsm8k", task.meta)
    own = Problem("1", "q", "42", "s", {"question": "long form", "data_source": "own"})
    assert own.for_verifier() == own.meta


async def asynchronous(completions, **kwargs):  # noqa: ARG001
    return [0.0]


def two(completion, answer): ...
def four(a, b, c, d): ...
def openrlhf(queries, prompts, labels): ...
def verl_batch(data_sources, solution_strs, ground_truths, extra_infos): ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (two, r"\(completion, answer\) \(too many positional arguments\).*Wrap it: def reward\(response, answer"),
        (four, r"\(a, b, c, d\).*missing a required argument: 'd'"),
        (verl_batch, r"\(data_sources, solution_strs, ground_truths, extra_infos\).*Wrap it"),
        (openrlhf, r"\(queries, prompts, labels\): OpenRLHF's.*Wrap it: def reward\(response, .*return float"),
        (asynchronous, "is async.*Wrap it"),
        (trl_prompts, "has no prompts and no question; it has answer, completions, level, tests.*Wrap it"),
    ],
)  # fmt: skip
def test_other_functions_are_refused_with_what_was_seen(function, says: str):
    with pytest.raises(TypeError, match=says):
        arguments_for(function)(TASK)


def test_what_has_no_signature_is_called_as_ours():
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(max)
    assert arguments_for(max)(TASK) == (("Answer: 42", "42", TASK.meta), {})


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (Score(0.5, True), Score(0.5, True)),
        (True, Score(1.0, True)),
        (False, Score(-1.0, False)),
        (0.25, Score(0.25, None)),
        (1, Score(1.0, None)),
        (0, Score(0.0, None)),
        ([0.25], Score(0.25, None)),
        ([True], Score(1.0, True)),
        (np.float32(0.25), Score(0.25, None)),
        (np.bool_(False), Score(-1.0, False)),
        ([np.float64(0.5)], Score(0.5, None)),
        (np.array(0.5), Score(0.5, None)),
        ({"score": 1.0}, Score(1.0, None)),
        ({"score": 0.0, "acc": False, "pred": "41"}, Score(0.0, False)),
        ({"score": 1, "acc": 1.0}, Score(1.0, True)),
        ({"score": True}, Score(1.0, True)),
    ],
)
def test_what_a_function_may_return(returned: object, score: Score):
    assert score_of(returned, "own:f") == score
    assert type(score_of(returned, "own:f").correct) in (bool, type(None))


@pytest.mark.parametrize(
    ("returned", "named"),
    [(None, "a NoneType"), ("1", "a str"), ([0.1, 0.2], "a list of 2"), ([], "a list of 0"), ([None], "a list of 1"),
     ({"acc": 1}, "a dict of 1"), ({"score": "1"}, "a dict of 1"), (Fraction(1, 2), "a Fraction"), (1j, "a complex"),
     (np.array([1.0]), "a ndarray")],
)  # fmt: skip
def test_what_it_may_not(returned: object, named: str):
    with pytest.raises(TypeError, match=f"own:f returned {named}; it must return a number"):
        score_of(returned, "own:f")
