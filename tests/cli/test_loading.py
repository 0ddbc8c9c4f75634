"""Collection of garbage rests while the large libraries are loaded."""

import gc
import sys
from collections.abc import Iterator

import pytest

from dapo.cli.running.loading import loading


@pytest.fixture(autouse=True)
def thaw() -> Iterator[None]:
    yield
    gc.enable()


def test_what_was_loaded_is_never_looked_through_again(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    before = gc.get_freeze_count()

    with loading():
        assert not gc.isenabled()
        loaded = [[] for _ in range(1_000)]

    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(loaded)


def test_collection_goes_on_after_an_import_that_fails(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")

    with pytest.raises(ImportError), loading():
        raise ImportError("a library that is not there")

    assert gc.isenabled()


def test_a_process_that_has_the_libraries_goes_on_collecting():
    import torch  # noqa: F401

    before = gc.get_freeze_count()

    with loading():
        assert gc.isenabled()

    assert gc.get_freeze_count() <= before
