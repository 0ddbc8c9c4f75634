"""Modules that lie in the working folder are not imported in place of the standard library's or an installed one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dapo import processes
from dapo.rewards import VerifierPool
from dapo.types import Verdict

SHADOWS = ("json", "sympy", "signal", "typing", "resource", "math_verify", "typer", "rich", "torch", "subprocess")
SRC = str(Path(processes.__file__).parents[1])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder whose modules say that they were imported."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    (tmp_path / "own_reward.py").write_text("def score(response, answer, meta):\n    return True\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(here: Path) -> str:
    return (here / "ran").read_text() if (here / "ran").exists() else ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "started",
    [
        [sys.executable, "-m", "dapo"],
        [sys.executable, "-P", "-c", "import sys; from dapo.__main__ import main; sys.argv[0] = 'dapo'; main()"],
    ],
    ids=["python -m dapo", "dapo"],
)
def test_verify_imports_nothing_from_the_working_folder(started, here):
    """The second way starts as the installed script does."""
    line = json.dumps({"response": "Answer: $\\sqrt{8}$", "answer": "$2\\sqrt{2}$"})  # needs a worker
    environment = os.environ | {"PYTHONPATH": SRC}
    done = subprocess.run(
        [*started, "verify", "-"], input=line, env=environment, capture_output=True, text=True, check=False
    )
    assert '"CORRECT"' in done.stdout, done.stderr
    assert ran(here) == ""


def test_a_function_of_the_users_is_found_in_the_working_folder_last(here):
    with VerifierPool("own_reward:score", workers=1) as pool:
        assert pool.judge_all([("x", "y")])[0].verdict is Verdict.CORRECT
    assert ran(here) == ""


def test_processes_of_ours_have_the_working_folder_last_or_not_at_all(here, monkeypatch):
    monkeypatch.setattr(sys, "path", ["", str(here), *sys.path])
    code = "import sys; print(chr(10).join(sys.path))"

    def path(*, with_working_folder: bool) -> list[str]:
        environment = processes.python_environment(with_working_folder=with_working_folder)
        command = processes.python_command("-c", code)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    assert str(here) not in path(with_working_folder=False)
    places = path(with_working_folder=True)
    assert [place for place in places if place == str(here)] == [str(here)]
    installed = [places.index(place) for place in places if place.endswith(("site-packages", "lib-dynload"))]
    assert places.index(str(here)) > min(installed)
    standard = os.path.dirname(os.__file__)
    assert places.index(str(here)) > places.index(standard)


def test_a_program_of_the_users_starts_as_ever(monkeypatch):
    """A judge in Python imports what lies beside it; only our own processes leave that out."""
    monkeypatch.setenv(processes.SAFE_PATH, processes.BY_US)
    assert processes.SAFE_PATH not in processes.users_environment()
    monkeypatch.setenv(processes.SAFE_PATH, "1")  # the user's own wish
    assert processes.users_environment()[processes.SAFE_PATH] == "1"


def test_no_process_of_ours_is_started_by_a_bare_interpreter():
    """`sys.executable` stands in one place; the jail's has -I, and a peer's interpreter is the user's."""
    root = Path(processes.__file__).parent
    users = {p.relative_to(root).as_posix() for p in root.rglob("*.py") if "sys.executable" in p.read_text()}
    assert users == {"processes.py", "rewards/code.py", "bench/step.py", "bench/parity/command.py"}
