"""A run on a real terminal (a pty) shows the live view; the same run into a pipe writes plain lines."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from toy import recipe

from dapo.cli.running.terminal import fit
from dapo.cli.train import run_to_end

TESTS = Path(__file__).parents[1]
WIDTH = 60
PROGRAM = """
import sys
from pathlib import Path
from toy import recipe
from dapo.cli.train import run_to_end
run_to_end(recipe(Path(sys.argv[1]), "train.steps=2", *sys.argv[2:]), Path(sys.argv[1]) / "run")
"""


def command_for(folder: Path, *overrides: str) -> tuple[list[str], dict[str, str]]:
    paths = [str(TESTS), str(TESTS / "trainer"), os.environ.get("PYTHONPATH", "")]
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment = kept | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "TERM": "xterm-256color"}
    return [sys.executable, "-c", PROGRAM, str(folder), *overrides], environment


def on_a_terminal(folder: Path, *overrides: str) -> str:
    """Everything the run wrote to a terminal of WIDTH columns."""
    command, environment = command_for(folder, *overrides)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                block = os.read(ours, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not block:
                break
            written += block
    os.close(ours)
    assert process.returncode == (1 if overrides else 0), written.decode()
    return written.decode()


@pytest.mark.slow
def test_a_terminal_gets_a_live_view_that_fits_it(tmp_path: Path):
    written = on_a_terminal(tmp_path)
    assert "\x1b[?25l" in written  # the cursor is hidden while the view is live
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")  # and comes back
    live = written[
        : written.rindex("\x1b[?25h")
    ]  # what comes after, the result and the doctor's verdict, is plain text
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", live).replace("\r", "\n").splitlines()
    view = [line for line in lines if not line.startswith(("Done:", str(tmp_path)))]
    assert max(map(len, view)) <= WIDTH
    last = [line.split()[0] for line in view if line.strip()][-4:]
    assert last == ["steps", "updates", "accuracy", "in"]  # two bars, and the numbers in whole cells on two lines
    assert any(re.match(r"steps .* 2/2 ", line) for line in view)


@pytest.mark.slow
def test_a_run_that_fails_gives_the_cursor_back(tmp_path: Path):
    impossible = ("sampling.fill_policy=error", "sampling.max_prompts_tried_per_step=4", "limits.max_response_tokens=5")
    written = on_a_terminal(tmp_path, *impossible)
    assert "sampling.fill_policy = error" in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_a_pipe_gets_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_to_end(recipe(tmp_path, "train.steps=2"), tmp_path / "run")
    written = capsys.readouterr().out
    assert "\x1b" not in written
    lines = written.splitlines()
    assert lines[0] == "toy:problems: 40 problems"
    assert [line[:9] for line in lines if line.startswith("step ")] == ["step    1", "step    2"]
    [done_at] = [i for i, line in enumerate(lines) if line.startswith("Done: 2 steps in ")]
    assert not any(line.startswith("step ") for line in lines[done_at:])  # only the doctor's verdict follows


@pytest.mark.parametrize(
    ("width", "expected"), [(12, "aaa  bbb\n  cccc"), (16, "aaa  bbb  cccc"), (2, "aaa\n  bbb\n  cccc")]
)
def test_cells_are_never_cut(width: int, expected: str):
    assert fit(["aaa", "bbb", "cccc"], width) == expected
