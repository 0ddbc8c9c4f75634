"""The other side of a benchmark: a script in its own interpreter, killed with all its child processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

Answer = Callable[[Any], Any]  # a question of the peer, one JSON line, and what it is told


def run_peer(
    python: str, script: Path, folder: Path, *, threads: int, minutes: float, answer: Answer | None = None
) -> tuple[str, list[str]]:
    """Runs `script folder`; returns how it ended, with its last lines, and all of its output.

    With `answer`, the peer asks on its output and is answered on its input, line by line; what it says goes to stderr.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
    environment.pop("PYTHONPATH", None)  # another interpreter has packages of its own
    said = folder / "peer.txt"
    asks = subprocess.PIPE if answer else None
    try:
        with said.open("wb") as out:  # a file keeps the output also when its time is up
            peer = subprocess.Popen(
                [python, str(script), str(folder)], stdin=asks, stdout=asks or out, stderr=out, env=environment,
                start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        return str(error), []
    late = threading.Event()

    def end() -> None:
        late.set()
        kill(peer)

    clock = threading.Timer(60 * minutes, end)
    clock.start()
    try:
        if answer:
            converse(peer, answer)
        code = peer.wait()
    finally:  # also what it has started, and when we are interrupted
        clock.cancel()
        kill(peer)
        peer.wait()
    words = said.read_text(encoding="utf-8", errors="replace").splitlines()
    if code:
        sys.stderr.write("".join(f"peer: {line}\n" for line in words[-40:]))
    last = next((line.strip() for line in reversed(words) if line.strip()), "nothing")
    reason = f"{minutes:g} minutes are over" if late.is_set() else f"exit {code}"
    return f"{reason}; its last words: {last}", words


def converse(peer: subprocess.Popen[bytes], answer: Answer) -> None:
    assert peer.stdin is not None
    assert peer.stdout is not None
    with suppress(BrokenPipeError):  # it ended before it was answered: its exit code says the rest
        for line in peer.stdout:
            peer.stdin.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
            peer.stdin.flush()


def kill(peer: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(peer.pid, signal.SIGKILL)
