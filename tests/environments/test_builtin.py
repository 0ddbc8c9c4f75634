"""Environments by name, and what is said of a name that is none."""

import sys
from pathlib import Path

import pytest

from dapo.environments.builtin import BUILTIN, environment_class
from dapo.environments.protocol import Environment
from dapo.errors import ConfigError


@pytest.mark.parametrize("name", BUILTIN)
def test_every_built_in_environment_is_one(name: str):
    assert isinstance(environment_class(name)(), Environment)


def test_one_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_game.py").write_text(
        "class Mine:\n    def start(self, problem, seed): ...\n    def respond(self, said): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert environment_class("my_game:Mine").__name__ == "Mine"
    del sys.modules["my_game"]


def test_one_of_a_file(tmp_path: Path):
    game = tmp_path / "a game.py"
    game.write_text("class Mine:\n    def start(self, problem, seed): ...\n    def respond(self, said): ...\n")
    assert environment_class(f"{game}:Mine") is environment_class(f"{game}:Mine"), "a file is run once"
    assert str(tmp_path) not in sys.path
    (tmp_path / "broken.py").write_text("class Mine: ...\nraise ValueError('not today')")
    for _ in range(2):  # and a second time, not half of it
        with pytest.raises(ConfigError, match="ValueError: not today"):
            environment_class(f"{tmp_path}/broken.py:Mine")


@pytest.mark.parametrize(
    ("name", "reason", "remedy"),
    [
        ("chess", "no such environment", "python, calculator, guess, wordle, second-try"),
        ("", "no such environment", "package.module:Class"),
        ("../evil:Class", "no such environment", "package.module:Class"),
        ("no_such_package.games:Chess", "ModuleNotFoundError", "import no_such_package.games"),
        ("no/such folder/games.py:Chess", "FileNotFoundError", "python 'no/such folder/games.py'"),
        ("json:Chess", "AttributeError", "import json"),
        ("json:dumps", "dumps is no class with the methods start and respond", "def respond(self, said)"),
        ("json:JSONDecoder", "JSONDecoder is no class", "def start"),
    ],
)
def test_a_name_that_is_none(name: str, reason: str, remedy: str):
    with pytest.raises(ConfigError) as raised:
        environment_class(name)
    assert raised.value.message.startswith(f"data.environment = {name!r}: ")
    assert reason in raised.value.message
    assert remedy in raised.value.remedy
