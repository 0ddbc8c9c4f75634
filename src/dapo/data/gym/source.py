"""What `gym:TASK` means as a source of problems. reasoning-gym is asked in a process of its own; ours imports none."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import subprocess
from typing import Any

from dapo.data.names import Use
from dapo.data.rows import Rows
from dapo.errors import DataError
from dapo.processes import python_command, python_environment
from dapo.rewards.gym.names import HELD_OUT, TRAIN, VERSION, parse

PACKAGE = "reasoning-gym"


def check_name(text: str, *, use: Use) -> tuple[str, str]:
    """The name in full, in the split that `use` stands for where it names none, and a note about it."""
    split = TRAIN if use == "train" else HELD_OUT
    name = parse(text, split=split)
    full = f"{name.canonical}&bare=true" if name.bare else name.canonical
    require_package(text)
    n_found = len(asked("rows", full, text))
    fewer = f"; it has {n_found:,} different questions of the {name.size:,} wanted" if n_found < name.size else ""
    return full, f"{text} is {full}{fewer}"


def gym_rows(full: str, text: str) -> Rows:
    """The problems of a name in full; `text` is what messages call it."""
    yield from enumerate(asked("rows", full, text), start=1)


def tasks() -> tuple[dict[str, Any], ...]:
    """Every task with an answer, who scores it and its parameters."""
    require_package("dapo data gym")
    return asked("list", "", "dapo data gym")


def require_package(text: str) -> None:
    """DataError where reasoning-gym is not there in the version whose problems and scorers are known."""
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        found = ""
    if found != VERSION:
        why = f"{PACKAGE} is {found} here; another version makes other problems" if found else f"needs {PACKAGE}"
        raise DataError(f"{text}: {why}.", remedy=f"Install it: pip install {PACKAGE}=={VERSION}, or dapo[gym].")


@functools.lru_cache(maxsize=8)
def asked(what: str, full: str, text: str) -> tuple[dict[str, Any], ...]:
    """All lines of the answer. The same twice in one process costs nothing: a set is checked, then read."""
    done = subprocess.run(
        python_command("-m", "dapo.data.gym.generate"),
        input=json.dumps({"do": what, "name": full}),
        env={**python_environment(), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if lines and "error" in lines[-1]:
        message = str(lines[-1]["error"]).replace(full, text)
        raise DataError(message, remedy=lines[-1]["remedy"])
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise DataError(f"{text}: reasoning-gym failed: {why}.", remedy="Use other parameters or another task.")
    return tuple(lines)
