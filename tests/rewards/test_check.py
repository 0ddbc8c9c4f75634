"""A verifier of the user's own that is not there, or fails on the first problem, is refused before anything starts."""

import shlex
import sys
from pathlib import Path

import pytest

from dapo.errors import ConfigError
from dapo.rewards import Task, VerifierPool, check, worker
from dapo.rewards.check import check_call, check_verifier

MODULE = """
print("said while it is imported")
open("imported", "a").write("x")
not_a_function = 3
def two(response, answer): ...
def three(response, answer, meta): return meta["bonus"]
def any_number(*parts): return parts[0] == "Answer: 42"
def trl(completions, **columns): raise ValueError("no opinion")
def verl(solution_str, ground_truth): raise ValueError("no opinion")
def fails(response, answer, meta):
    raise ValueError(f"no opinion on {response}")
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("import no_such_module_of_theirs")
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "inner.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "_PASSED", set())


def call(name: str, answer: str = "42", **meta: object) -> None:
    check_verifier(name)
    with VerifierPool(name, workers=1) as pool:
        check_call(pool, answer, meta)


@pytest.mark.parametrize(
    "name", ["math", "own_rewards:three", "own_rewards:missing", "own_package.inner:three", "command:cat -", "command"]
)
def test_what_is_there_is_taken_without_being_imported(name: str):
    check_verifier(name)
    assert not Path("imported").exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("own_package.outer:f", "No module named 'own_package.outer'"),
        ("own_rewards.inner:f", "'own_rewards' is not a package"),
        ("command:no-such-program --fast", "there is no program 'no-such-program'"),
        ("mathh", "no such verifier"),
    ],
)
def test_what_is_not_there_is_refused_by_name(name: str, why: str):
    with pytest.raises(ConfigError, match=r"rewards\.verifier \(--verifier\) = ") as caught:
        check_verifier(name)
    assert why in str(caught.value)
    assert caught.value.remedy


def test_a_module_that_is_found_in_a_way_of_its_own_is_taken(tmp_path: Path):
    (tmp_path / "own_package" / "__init__.py").write_text("__path__.append(__path__[0] + '/aside')")
    (tmp_path / "own_package" / "aside").mkdir()
    (tmp_path / "own_package" / "aside" / "hidden.py").write_text("")
    assert not check.is_found("own_package.hidden")
    check_verifier("own_package.hidden:f")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken_rewards:f", "No module named 'no_such_module_of_theirs'"),
        ("own_rewards:missing", "has no attribute 'missing'"),
        ("own_rewards:not_a_function", "is no function"),
        ("own_rewards:two", "too many positional arguments"),
        ("own_rewards:three", "CRASH: KeyError: 'bonus' (own_rewards.py:6)"),
        ("own_rewards:fails", "CRASH: ValueError: no opinion on Answer: 42 (own_rewards.py:11)"),
    ],
)
def test_a_function_that_fails_on_a_problem_is_refused_with_its_own_error(name: str, why: str):
    with pytest.raises(ConfigError, match=r"rewards\.verifier \(--verifier\) = ") as caught:
        call(name)
    assert why in str(caught.value)
    assert "called as function(response, answer, meta)" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "call_of_it"), [("trl", "completions=[response], answer=[answer]"), ("verl", "solution_str=response")]
)
def test_the_remedy_says_how_it_was_called(name: str, call_of_it: str):
    with pytest.raises(ConfigError, match="no opinion") as caught:
        call(f"own_rewards:{name}")
    assert call_of_it in caught.value.remedy


def test_no_task_pays_for_the_import_of_what_calls_functions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "dapo.rewards.functions")
    worker.preload("json:loads")
    assert "dapo.rewards.functions" in sys.modules


def test_a_function_that_works_is_called_once_for_a_problem():
    call("own_rewards:any_number")
    with VerifierPool("own_rewards:three", workers=1) as pool:
        check_call(pool, "42", {"bonus": 0.5})
        check_call(pool, "42", {"bonus": 0.5})
        assert pool.submit(Task("", "", meta={"bonus": 1})) == 1  # the second ticket: only one call was made
    with VerifierPool("math", workers=1) as pool:
        check_call(pool, "42", {})
        assert pool.submit(Task("", "")) == 0


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import sys; sys.exit('the licence has run out')", "exited with code 1: the licence has run out"),
        ("import sys; print('no', flush=True)", "answered no JSON line"),
        ('print(\'{"verdict": "WRONG"}\')', ""),
    ],
)
def test_a_program_is_tried_as_well(body: str, why: str):
    name = f"command:{shlex.join([sys.executable, '-S', '-c', body])}"
    if not why:
        call(name)
        return
    with pytest.raises(ConfigError, match=why) as caught:
        call(name)
    assert "one JSON line per response" in caught.value.remedy
