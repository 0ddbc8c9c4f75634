"""A verifier of the user's own that is not there is refused before anything starts."""

from pathlib import Path

import pytest

from dapo.errors import ConfigError
from dapo.rewards.check import check_verifier

MODULE = """
print("said while it is imported")
not_a_function = 3
def two(response, answer): ...
def three(response, answer, meta): ...
def any_number(*parts): ...
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("import no_such_module_of_theirs")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("name", ["math", "own_rewards:three", "own_rewards:any_number", "command:cat -", "command"])
def test_what_is_there_is_taken(name: str):
    check_verifier(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("broken_rewards:f", "No module named 'no_such_module_of_theirs'"),
        ("own_rewards:missing", "has no attribute 'missing'"),
        ("own_rewards:not_a_function", "is no function"),
        ("own_rewards:two", "too many positional arguments"),
        ("command:no-such-program --fast", "there is no program 'no-such-program'"),
        ("mathh", "no such verifier"),
    ],
)
def test_what_is_not_there_is_refused_by_name(name: str, why: str):
    with pytest.raises(ConfigError, match=r"rewards\.verifier \(--verifier\) = ") as caught:
        check_verifier(name)
    assert why in str(caught.value)
    assert caught.value.remedy
