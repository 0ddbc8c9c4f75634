"""The compiled parts' tests where there is a C compiler: one that then fails to compile fails them."""

import os
import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    os.environ.get("DAPO_COMPILE") == "0" or not any(map(shutil.which, ("cc", "gcc", "clang"))),
    reason="no C compiler, or told not to use it",
)
