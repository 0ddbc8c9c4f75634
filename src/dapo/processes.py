"""Processes that we start, and what a Python among them may import: never from the working folder first.

The working folder may hold a `json.py` or a `sympy.py` of somebody else's. It is searched for modules that the user
names, after the standard library and all installed packages.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as type checkers know it; until the path is safe, little is imported
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

SAFE_PATH, BY_US = "PYTHONSAFEPATH", "dapo"  # any value switches it on; ours is known again by it


def leave_working_folder() -> None:
    """Off the path with it, where `python -m` has put it first; the same for processes that libraries start."""
    if not sys.flags.safe_path and sys.path and is_working_folder(sys.path[0]):
        del sys.path[0]
    os.environ.setdefault(SAFE_PATH, BY_US)


def search_working_folder() -> None:
    """For a module that the user names: last of all places."""
    folder = working_folder()
    if folder is not None and not any(map(is_working_folder, sys.path)):
        sys.path.append(folder)


def imported(name: str) -> Any:
    """What `package.module:name` or `FILE.py:name` names. It is run by this: call it in workers only."""
    place, _, attribute = name.rpartition(":")
    return getattr(imported_module(place), attribute)


def imported_module(place: str) -> ModuleType:
    """A module by its name, or by its file, whose folder stays off the path: other files there shadow nothing."""
    import importlib.util

    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = os.path.abspath(place)
    if path not in sys.modules:
        spec = importlib.util.spec_from_file_location(path, path)
        assert spec is not None, "a name that ends in .py has a loader"
        assert spec.loader is not None, "likewise"
        module = sys.modules[path] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[path]
            raise
    return sys.modules[path]


def python_command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", *arguments]


def python_environment(*, with_working_folder: bool = False) -> dict[str, str]:
    """Ours, but that a child searches where this process does: without the working folder, or with it last."""
    places = [place for place in sys.path if not is_working_folder(place)]
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # may be the working folder
    last = [ours] if ours not in places else []
    folder = working_folder() if with_working_folder else None
    own = [folder] if folder is not None else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places + last + own)}
    environment.pop("PYTHONINSPECT", None)  # else a child does not end when its work is done
    return environment


def users_environment() -> dict[str, str]:
    """Ours, for a program of the user's: what only protects our own processes is left out."""
    environment = dict(os.environ)
    if environment.get(SAFE_PATH) == BY_US:
        del environment[SAFE_PATH]
    return environment


def is_working_folder(place: str) -> bool:
    return not place or os.path.realpath(place) == working_folder()


def working_folder() -> str | None:
    """None where it was deleted under our feet."""
    try:
        return os.path.realpath(os.getcwd())
    except OSError:
        return None
