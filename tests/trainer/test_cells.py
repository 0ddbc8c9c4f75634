"""Functions and classes of a notebook's cells as a module: it does what the cells did, and says what it cannot take."""

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dapo.errors import ConfigError
from dapo.processes import imported
from dapo.trainer.notebook.cells import is_in_cell, module_of

RunCell = Callable[[str], dict[str, Any]]


@pytest.fixture
def run_cell(monkeypatch: pytest.MonkeyPatch) -> RunCell:
    """Runs cells as IPython does: in a `__main__` without a file, their sources known to linecache."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    n_cells = 0

    def run(source: str) -> dict[str, Any]:
        nonlocal n_cells
        n_cells += 1
        name = f"<cell {n_cells}>"
        monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(keepends=True), name))
        exec(compile(source, name, "exec"), vars(main))
        return vars(main)

    return run


def written(folder: Path, own: Any) -> Any:
    """The same, from the file that a worker imports."""
    path = folder / "reward.py"
    path.write_text(module_of("reward", own))
    return imported(f"{path}:{own.__name__}")


def test_a_reward_with_what_it_uses_of_other_cells(run_cell: RunCell, tmp_path: Path):
    run_cell(
        "import re, os.path as paths\nfrom math import floor as down\nWEIGHTS = {'a': [0.5, (1, None)]}"
        "\nheld = object()"
    )
    run_cell("def words(text):\n    return re.findall(r'[a-z]+', text)")
    run_cell(
        "from typing import Any\n"
        "Unwritten = object()\n"
        "@(lambda function: function)\n"
        "def reward(response: Unwritten, answer, meta) -> Any:\n"
        "    # a comment that stays\n"
        "    held = words(response)  # a local name, and another one in the notebook\n"
        "    return down(len(held) * WEIGHTS['a'][0]) + len(paths.join('x', answer))"
    )
    names = run_cell("def words(text):\n    return text.split()")  # run again: the newest counts, as in the notebook
    own = names["reward"]
    assert is_in_cell(own)
    theirs = written(tmp_path, own)
    assert theirs("one two three", "y", {}) == own("one two three", "y", {}) == 1 + 3
    text = (tmp_path / "reward.py").read_text()
    assert "# a comment that stays" in text
    assert "findall" not in text
    assert "Unwritten =" not in text, "annotations are not evaluated"


def test_a_class_with_its_base(run_cell: RunCell, tmp_path: Path):
    run_cell("class Base:\n    tries = 3\n    def start(self, problem, seed):\n        return f'{self.tries} {seed}'")
    names = run_cell("class Game(Base):\n    def respond(self, said):\n        return said[::-1]")
    theirs = written(tmp_path, names["Game"])()
    assert (theirs.start(None, 7), theirs.respond("abc")) == ("3 7", "cba")


def test_functions_that_call_each_other(run_cell: RunCell, tmp_path: Path):
    names = run_cell(
        "def even(n):\n    return n == 0 or odd(n - 1)\n"
        "def odd(n):\n    return n != 0 and even(n - 1)\n"
        "x = 1  # not theirs\n"
    )
    assert written(tmp_path, names["even"])(10) is True


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("model = object()\ndef reward(r, a, m):\n    return model", "uses model, a object of the notebook"),
        ("lines = open\nf = (n for n in [])\ndef reward(r, a, m):\n    return next(f)", "uses f, a generator"),
        ("def other(r, a, m):\n    return g()\ndef h(): ...\ng = h\nreward = other", "g is another name of h"),
        (
            "kind = object()\ndef other(x: kind): ...\ndef reward(r, a, m):\n    return other(r) or len([kind])",
            "uses kind, a object of the notebook",  # left out of an annotation, and needed after that
        ),
        (
            "import functools, re\nfind = functools.cache(re.findall)\ndef reward(r, a, m):\n    return find(r, a)",
            "uses find, a _lru_cache_wrapper",  # which says that it is re.findall
        ),
        ("large = list(range(30_000))\ndef reward(r, a, m):\n    return large[0]", "uses large, a list"),
        ("class P:\n    x = 1\ndef reward(r, a, m):\n    return P.x", "the source of P cannot be found"),
    ],
)
def test_what_no_worker_can_be_given_is_named(run_cell: RunCell, cell: str, why: str):
    names = run_cell(cell)
    with pytest.raises(ConfigError, match=why) as raised:
        module_of("reward", names["reward"])
    assert raised.value.message.startswith("reward: ")
    assert raised.value.remedy


def test_what_is_not_of_a_cell(run_cell: RunCell):
    names = run_cell(
        "nameless = lambda r, a, m: 1.0\ndef outer():\n    def inner(): ...\n    return inner\ninner = outer()"
    )
    assert not is_in_cell(names["nameless"])
    assert not is_in_cell(names["inner"])
    assert not is_in_cell(Path)
    assert not is_in_cell("module:function")
