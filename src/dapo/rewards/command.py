"""Any program as a verifier: it gets one JSON line, and answers with one.

In: `{"response", "answer", "stop_reason", "meta"}`. Out, as the last line: `{"verdict": "CORRECT"}` (WRONG,
UNPARSEABLE) with optional `"extracted"` and `"message"`; or a graded `{"value": 0.5}`, with `"correct": true` where
that is known.
The program is named with the verifier (`command:PROGRAM ARGUMENTS`), in `meta["command"]`, or by the environment
variable DAPO_VERIFIER_COMMAND.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from typing import IO, TYPE_CHECKING, Any

from dapo.rewards.rule import Finding
from dapo.types import Score, Verdict

if TYPE_CHECKING:
    from dapo.rewards.verifiers import Task

VARIABLE = "DAPO_VERIFIER_COMMAND"
_ALLOWED = ("CORRECT", "WRONG", "UNPARSEABLE")
_MAX_OUTPUT_BYTES = 1_000_000


class CommandError(RuntimeError):
    """The program failed or answered something else than a verdict."""


def decide(task: Task) -> Finding | Score:
    """Run the program on one task. The worker around it has the time limit, and is killed with its children."""
    argv = command_of(task)
    line = json.dumps(
        {
            "response": task.response,
            "answer": task.answer,
            "stop_reason": task.stop_reason.value if task.stop_reason else None,
            "meta": {key: value for key, value in task.meta.items() if key != "command"},
        }
    )
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(argv, input=line.encode() + b"\n", stdout=output, stderr=errors, check=False)
        except OSError as error:
            raise CommandError(f"{argv[0]}: {error.strerror}") from None
        said = end_of(output, _MAX_OUTPUT_BYTES)
        complaint = end_of(errors, 2_000).decode("utf-8", "replace").strip()
    if done.returncode != 0:
        raise CommandError(f"{argv[0]} left with code {done.returncode}: {complaint[-300:]}")
    return outcome_in(said, argv[0])


def end_of(file: IO[bytes], n_bytes: int) -> bytes:
    """The last bytes of a file, at most so many: a program's verdict and its complaint stand at the end."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - n_bytes))
    return file.read(n_bytes)


def command_of(task: Task) -> list[str]:
    command = task.meta.get("command") or os.environ.get(VARIABLE)
    if isinstance(command, str):
        return shlex.split(command)
    if isinstance(command, list) and command and all(isinstance(part, str) for part in command):
        return [str(part) for part in command]
    raise CommandError(f'no command: give meta {{"command": ["program", "argument"]}} or set {VARIABLE}')


def outcome_in(said: bytes, program: str) -> Finding | Score:
    """The verdict in a program's last line of output."""
    lines = said.decode("utf-8", "replace").strip().split("\n")  # no other sign ends a line of JSON
    try:
        answer: Any = json.loads(lines[-1])
    except ValueError:
        raise CommandError(f"{program} answered no JSON line") from None
    if isinstance(answer, dict) and answer.get("verdict") in _ALLOWED:
        extracted = answer.get("extracted")
        return Finding(
            Verdict(answer["verdict"]),
            None if extracted is None else str(extracted)[:200],
            str(answer.get("message", "")),
        )
    if (
        isinstance(answer, dict)
        and isinstance(answer.get("value"), int | float)
        and answer.get("correct") in (True, False, None)
    ):
        return Score(float(answer["value"]), answer.get("correct"))
    raise CommandError(f"{program} answered {lines[-1][:200]!r}, which is neither a verdict nor a value")
