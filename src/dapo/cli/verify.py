"""`dapo verify`: one JSON verdict per line for `{"response", "answer"}` lines; or an audit of a run's verdicts."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from dapo.errors import ConfigError, DataError
from dapo.rewards import Task, VerifierPool, needs_reference
from dapo.rewards.check import check_call, check_verifier
from dapo.types import Judgement, StopReason

MAX_LINE_BYTES = 16_000_000
CHUNK = 2_048  # rows in flight: bounds memory, keeps workers fed
NOT_META = ("response", "answer", "id", "stop_reason", "meta")
EXAMPLE_ROW = '{"response": "... Answer: 42", "answer": "42"}'


@dataclass(frozen=True, slots=True)
class InputRow:
    """One line of input."""

    task: Task
    id: Any = None
    has_id: bool = False


def command(
    file: Annotated[
        str | None, typer.Argument(help="JSON lines, or - for standard input.", metavar="FILE.jsonl|-")
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(
            help="math (default), dapo-published, exact, choice, code, gym, judge:FILE.toml, command, math-verify or "
            "package.module:function."
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes. Default: one per core, at most 8.")] = None,
    seconds: Annotated[float | None, typer.Option(help="CPU seconds per response, child processes included.")] = None,
    memory_mb: Annotated[int | None, typer.Option(help="Memory limit per worker.")] = None,
    audit: Annotated[
        Path | None,
        typer.Option(help="A run folder: verify its rollouts again and list the disagreements.", metavar="RUN"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --audit: JSON instead of a table. (Verdicts are always JSON.)")
    ] = False,
) -> None:
    """Score responses: {"response", "answer"} lines in, one JSON verdict per line out, in the same order.

    A line may also hold "id", "stop_reason" (EOS, LENGTH, ABORTED), "meta", and columns as in a data file, such as
    "tests" for the verifier code, which needs no answer. The verdict is CORRECT, WRONG, UNPARSEABLE, TIMEOUT or CRASH.

    Example:  echo '{"response": "Six by seven. Answer: 42.", "answer": "42"}' | dapo verify -
    """
    if (file is None) == (audit is None):
        raise ConfigError(
            "dapo verify needs either a file or --audit RUN.", remedy="For example: dapo verify answers.jsonl"
        )
    limits: dict[str, Any] = {
        "workers": workers if workers is not None else min(8, os.cpu_count() or 1),
        "seconds": seconds,
        "memory_mb": memory_mb,
    }
    for name in ("seconds", "memory_mb"):
        if limits[name] is not None and limits[name] <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {limits[name]}: a limit must be positive.")
    if audit is not None:
        from dapo.report.audit import audit_run

        audit_run(audit, verifier or "math-verify", limits, as_json=as_json)
        return
    assert file is not None, "checked above"
    check_verifier(verifier or "math")
    with open_rows(file) as source, VerifierPool(verifier or "math", **limits) as pool:
        rows = rows_in(source, file, pool.verifier.name)
        first = next(rows).task
        for _ in rows:  # the whole input is checked before the first verdict is printed
            pass
        check_call(pool, first.answer, dict(first.meta))
        source.seek(0)
        counts = print_verdicts(pool, rows_in(source, file, pool.verifier.name))
    if sys.stderr.isatty():
        sys.stderr.write("  ".join(f"{verdict} {n}" for verdict, n in sorted(counts.items())) + "\n")


def open_rows(file: str) -> IO[bytes]:
    """The input as a file that can be read twice; standard input is copied to a temporary file first."""
    if file == "-":
        copy = tempfile.TemporaryFile()  # noqa: SIM115 the caller closes it
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.seek(0)
        return copy
    try:
        return open(file, "rb")
    except OSError as error:
        raise DataError(
            f"{file}: {error.strerror}.", remedy="Give a file of JSON lines, or - for standard input."
        ) from None


def rows_in(source: IO[bytes], file: str, verifier: str) -> Iterator[InputRow]:
    """The rows of a JSON-lines file, as the verifier needs them. DataError names file, row and remedy."""
    shown = "standard input" if file == "-" else file
    number = n_rows = 0
    while line := source.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{shown}, row {number}: longer than {MAX_LINE_BYTES // 1_000_000} MB.",
                remedy="One response per line; is this a JSON file without line breaks, or a binary file?",
            )
        if line.strip():
            n_rows += 1
            yield row_in(line, f"{shown}, row {number}", verifier)
    if n_rows == 0:
        raise DataError(f"{shown}: no rows.", remedy=f"Each line is one JSON object: {EXAMPLE_ROW}")


def row_in(line: bytes, where: str, verifier: str) -> InputRow:
    try:
        fields = json.loads(line.decode("utf-8-sig" if line.startswith(b"\xef\xbb\xbf") else "utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 (byte {error.start}).", remedy="Convert it: iconv -f LATIN1 -t UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: not JSON ({error}).", remedy=f"Each line is one JSON object: {EXAMPLE_ROW}"
        ) from None
    if not isinstance(fields, dict):
        raise DataError(f"{where}: a JSON {type(fields).__name__}, not an object.", remedy=f"Write {EXAMPLE_ROW}")
    for key in ("response", "answer") if needs_reference(verifier) else ("response",):
        if key not in fields:
            raise DataError(f'{where}: no "{key}"; it has {sorted(fields)[:8]}.', remedy=f"Write {EXAMPLE_ROW}")
    response: Any = fields["response"]
    answer: Any = fields.get("answer")
    if not needs_reference(verifier) and not isinstance(answer, str):
        from dapo.data.schemas import reference_text

        answer = reference_text(answer) or ""  # as in a data file
    if isinstance(answer, float) and not math.isfinite(answer):
        raise DataError(f'{where}: "answer" is {answer}, which is no answer.', remedy=f"Write {EXAMPLE_ROW}")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    for key, value in (("response", response), ("answer", answer)):
        if not isinstance(value, str):
            raise DataError(
                f'{where}: "{key}" is {json.dumps(value)[:60]}, not a string.', remedy=f"Write {EXAMPLE_ROW}"
            )
    meta = fields.get("meta") or {}
    if not isinstance(meta, dict):
        raise DataError(f'{where}: "meta" is not an object.', remedy='For code: "meta": {"tests": [...]}')
    if fields.keys() - set(NOT_META):
        from dapo.data.schemas import QUESTION_COLUMNS, rest

        meta = rest(fields, *NOT_META, *QUESTION_COLUMNS) | meta  # other columns, as in a data file: "tests"
        if "data_source" in fields:
            meta = {"data_source": fields["data_source"], **meta}
    task = Task(response, answer, stop_reason_in(fields.get("stop_reason"), where), meta)
    return InputRow(task, fields.get("id"), "id" in fields)


def stop_reason_in(value: object, where: str) -> StopReason | None:
    if value is None:
        return None
    try:
        return StopReason(str(value).upper())
    except ValueError:
        raise DataError(
            f'{where}: "stop_reason" is {json.dumps(value)[:60]}.',
            remedy=f"Use one of {', '.join(StopReason)}, or leave it out.",
        ) from None


def print_verdicts(pool: VerifierPool, rows: Iterator[InputRow]) -> Counter[str]:
    """Verify in chunks, print in order."""
    counts: Counter[str] = Counter()
    while chunk := list(islice(rows, CHUNK)):
        for row, judgement in zip(chunk, pool.judge_all([row.task for row in chunk]), strict=True):
            counts[judgement.verdict.value] += 1
            sys.stdout.write(
                json.dumps(as_line(row, judgement), ensure_ascii=False).encode("utf-8", "replace").decode() + "\n"
            )
        sys.stdout.flush()
    return counts


def as_line(row: InputRow, judgement: Judgement) -> dict[str, Any]:
    line: dict[str, Any] = {"id": row.id} if row.has_id else {}
    line |= {
        "verdict": judgement.verdict.value,
        "extracted": judgement.extracted,
        "reference": judgement.reference,
        "seconds": round(judgement.seconds, 6),
        "value": judgement.value,
    }
    if judgement.message:
        line["message"] = judgement.message
    return line
