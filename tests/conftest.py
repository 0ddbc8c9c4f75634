"""One thread per test process: two cores run two of them, and sums are the same every time."""

import contextlib
import gc
import inspect
import os
import time
from functools import cache

import pytest

with contextlib.suppress(ImportError):  # a machine with a GPU may have none; the tests that run there need none
    from hypothesis import settings

    # A busy machine is no error of an example's, and the same examples each time judge a change by itself; new ones:
    # make test-properties, make fuzz.
    settings.register_profile("dapo", deadline=None, print_blob=True, derandomize=True)
    settings.register_profile("everyday", settings.get_profile("dapo"), max_examples=50)
    settings.register_profile("new", deadline=None, print_blob=True)
    settings.load_profile("dapo")


def prepare_torch() -> None:
    """In every process that runs tests; the one that hands them to others needs no torch."""
    import torch

    from dapo.models.triton_support import has_triton, is_interpreted

    torch.set_num_threads(1)
    if not torch.cuda.is_available():  # read when a kernel is defined, so before any of ours is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if has_triton() and is_interpreted():
        mend_interpreter()


def mend_interpreter() -> None:
    """Triton 3.6's interpreter makes a loop bound out of an array of one element by int(), which numpy 2.4 refuses.

    At every call of a kernel, and of a function in it, it looks through all names of its language for what to replace:
    here once.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    @cache
    def builtins(language):
        return [name for name, member in inspect.getmembers(language) if is_builtin(member)]

    def patch_builtins(language, builder, scope):
        for name in builtins(language):
            member = getattr(language, name)
            if is_builtin(member):  # not yet replaced
                interpreter._patch_attr(language, name, member, builder, scope)

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_mend
    interpreter._patch_builtin = patch_builtins


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory):
    """Runs that tests start are noted in a folder of theirs, also by the processes they start; never in a real home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Without a GPU `torch.manual_seed` keeps a stack trace for a later one each time: a millisecond a test."""
    import torch

    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


def pytest_configure(config: pytest.Config) -> None:
    """Imports and thousands of collected tests need not be looked through for garbage again and again."""
    config.stash[STARTED] = time.monotonic()
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        prepare_torch()
    gc.set_threshold(100_000, 20, 50)


STARTED = pytest.StashKey[float]()
RUN_LESS = """\
To run less: `make test TESTS=tests/trainer`, `make test TESTS="-k border"`, `make test TESTS=--last-failed`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hangs wait more than they work: one at a time, among others."""
    hangs = [item for item in items if item.path.name == "test_hangs.py"]
    items[:] = [item for item in items if item not in hangs]
    for number, item in enumerate(hangs):
        items.insert(20 * number, item)


def pytest_collection_finish() -> None:
    """What was collected stays to the end: a twentieth of the time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How long it took, by the clock and in CPU time, which does not depend on what else the machine is doing."""
    if terminalreporter.stats.get("passed", []) and len(terminalreporter.stats["passed"]) > 200:
        used = os.times()
        cpu = used.user + used.system + used.children_user + used.children_system
        minutes = (time.monotonic() - config.stash[STARTED]) / 60
        terminalreporter.write_line(f"{minutes:.1f} minutes, {cpu / 60:.1f} of CPU time. {RUN_LESS}")
