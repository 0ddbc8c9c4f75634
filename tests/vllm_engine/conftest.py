"""These tests need the real vLLM. `make test-vllm` installs and demands it; elsewhere they are skipped without it."""

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    is_missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if is_missing and "DAPO_NEEDS_VLLM" not in os.environ:
                item.add_marker(pytest.mark.skip(reason="vllm is not installed; make test-vllm installs it"))
