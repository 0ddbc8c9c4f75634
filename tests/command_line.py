"""`dapo ARGUMENTS` called in this process: exit code and what it printed, without a new interpreter's imports.

Where a process itself is what is tested (a signal, a closed pipe, a kill, which modules are loaded), start one instead.
"""

import contextlib
import io
import sys
from dataclasses import dataclass

import pytest

from dapo.cli.main import main


@dataclass(frozen=True)
class Answer:
    returncode: int
    stdout: str
    stderr: str


class Output(io.TextIOWrapper):
    """Standard output that is kept; a command may also write bytes to its `buffer`."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="surrogateescape", write_through=True)

    def text(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode("utf-8", "surrogateescape")


def dapo(*arguments: str, stdin: str | bytes = b"") -> Answer:
    """Exit code, standard output and standard error of one command. What is no error of ours is raised."""
    given = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = Output(), Output()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # the command line sets it; it must not outlast the call
        code: object = 0
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code
    return Answer(code if isinstance(code, int) else int(code is not None), out.text(), err.text())
