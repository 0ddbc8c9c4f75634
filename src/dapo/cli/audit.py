"""`dapo verify --audit RUN`: the run's verdicts against a second method's, disagreements listed by kind."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from dapo.errors import DataError
from dapo.rewards import Task, VerifierPool
from dapo.types import StopReason

COLUMNS = ("problem_id", "response_text", "answer", "verdict", "stop_reason")
N_EXAMPLES = 5
BATCH_ROWS = 2_048


def audit_run(run: Path, verifier: str, limits: dict[str, Any], *, as_json: bool) -> None:
    """Print where `verifier` disagrees with what the run recorded."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    with VerifierPool(verifier, **limits) as pool:
        for rows in batches(run):
            tasks = [
                Task(
                    row["response_text"], row["answer"], StopReason(row["stop_reason"]) if row["stop_reason"] else None
                )
                for row in rows
            ]
            for row, judgement in zip(rows, pool.judge_all(tasks), strict=True):
                kind = (str(row["verdict"]), judgement.verdict.value)
                counts[kind] += 1
                if kind[0] != kind[1] and len(kinds[kind]) < N_EXAMPLES:
                    kinds[kind].append(
                        {
                            "file": row["file"],
                            "problem_id": row["problem_id"],
                            "answer": row["answer"],
                            "response_end": row["response_text"][-160:],
                            "second_extracted": judgement.extracted,
                        }
                    )
    report(run, verifier, counts, kinds, as_json=as_json)


def batches(run: Path) -> Iterator[list[dict[str, Any]]]:
    """The run's rollouts, some thousand rows at a time."""
    import pyarrow
    import pyarrow.parquet as parquet

    files = sorted((run / "rollouts").glob("*.parquet"))
    if not files:
        raise DataError(
            f"{run}: no rollouts/*.parquet.",
            remedy="Give a run folder; rollouts are written with rollouts.every_steps = 1.",
        )
    for path in files:
        try:
            source = parquet.ParquetFile(path)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{path}: not a readable parquet file ({error}).", remedy="Remove it, or copy it again."
            ) from None
        missing = [column for column in COLUMNS if column not in source.schema_arrow.names]
        if missing:
            raise DataError(
                f"{path}: no column {', '.join(missing)}; it has {', '.join(source.schema_arrow.names)}.",
                remedy="An audit needs the reference answers, which newer rollouts hold in the column `answer`.",
            )
        for batch in source.iter_batches(batch_size=BATCH_ROWS, columns=list(COLUMNS)):
            yield [{**row, "file": path.name} for row in batch.to_pylist()]


def report(
    run: Path,
    verifier: str,
    counts: dict[tuple[str, str], int],
    kinds: dict[tuple[str, str], list[dict[str, Any]]],
    *,
    as_json: bool,
) -> None:
    n_rows = sum(counts.values())
    n_agreeing = sum(n for kind, n in counts.items() if kind[0] == kind[1])
    ordered = sorted(kinds, key=lambda kind: -counts[kind])
    if as_json:
        listing = [{"run": kind[0], "second": kind[1], "n": counts[kind], "examples": kinds[kind]} for kind in ordered]
        typer.echo(
            json.dumps(
                {
                    "run": str(run),
                    "second_method": verifier,
                    "rows": n_rows,
                    "agree": n_agreeing,
                    "disagreements": listing,
                },
                ensure_ascii=False,
            )
        )
        return
    share = n_agreeing / n_rows if n_rows else 1.0
    typer.echo(f"{run}: {n_rows} responses, {n_agreeing} ({share:.2%}) judged the same by {verifier}")
    for kind in ordered:
        typer.echo(f"\n{counts[kind]:>8}  run {kind[0]}, {verifier} {kind[1]}")
        for example in kinds[kind]:
            ending = " ".join(example["response_end"].split())[-100:]
            typer.echo(f"          problem {example['problem_id']}, reference {example['answer']!r}: ...{ending}")
