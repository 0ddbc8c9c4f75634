"""`dapo verify --audit RUN`: the run's verdicts compared with a second verifier's, disagreements listed by kind."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from dapo.commands import visible
from dapo.errors import DataError
from dapo.files import refuse_links
from dapo.parquet_size import is_text, too_large
from dapo.report.rollouts.recorded import DROPPED
from dapo.rewards import Task, VerifierPool
from dapo.rewards.judging import JUDGE_FOLDER
from dapo.types import Judgement, StopReason

COLUMNS = ("problem_id", "response_text", "answer", "verdict", "stop_reason")
ALSO = "question"  # for verifiers that read it
N_EXAMPLES = 5
BATCH_ROWS = 2_048


@dataclass(slots=True)
class Tally:
    """(the run's verdict, the second verifier's) -> how often, with examples."""

    counts: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    lines: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))  # FILE:ROW, all

    def add(self, row: dict[str, Any], judgement: Judgement) -> None:
        kind = (str(row["verdict"]), judgement.verdict.value)
        self.counts[kind] += 1
        if kind[0] != kind[1]:
            self.lines[kind].append(f"{row['file']}:{row['row']}")
        if kind[0] != kind[1] and len(self.kinds[kind]) < N_EXAMPLES:
            self.kinds[kind].append(
                {
                    "file": row["file"],
                    "row": row["row"],
                    "problem_id": row["problem_id"],
                    "answer": row["answer"],
                    "response_end": row["response_text"][-160:],
                    "second_extracted": judgement.extracted,
                    "second_said": judgement.message,
                }
            )

    @property
    def n_rows(self) -> int:
        return sum(self.counts.values())

    @property
    def n_agreeing(self) -> int:
        return sum(n for kind, n in self.counts.items() if kind[0] == kind[1])

    @property
    def disagreements(self) -> list[tuple[str, str]]:
        return sorted(self.kinds, key=lambda kind: -self.counts[kind])

    def to_json(self) -> dict[str, Any]:
        listing = [
            {
                "run": kind[0],
                "second": kind[1],
                "n": self.counts[kind],
                "examples": self.kinds[kind],
                "rows": self.lines[kind],
            }
            for kind in self.disagreements
        ]
        return {"rows": self.n_rows, "agree": self.n_agreeing, "disagreements": listing}


def audit_run(run: Path, verifier: str, limits: dict[str, Any], *, as_json: bool) -> None:
    """Print where `verifier` disagrees with what the run recorded; groups that were not trained on apart."""
    trained, dropped = Tally(), Tally()
    refuse_links(run, JUDGE_FOLDER)
    with VerifierPool(verifier, **limits, folder=run / JUDGE_FOLDER) as pool:
        for rows, is_dropped in batches(run):
            tasks = [
                Task(
                    row["response_text"],
                    row["answer"],
                    StopReason(row["stop_reason"]) if row["stop_reason"] else None,
                    {"question": row.get(ALSO, "")},
                )
                for row in rows
            ]
            for row, judgement in zip(rows, pool.judge_all(tasks), strict=True):
                (dropped if is_dropped else trained).add(row, judgement)
        if spent := pool.spent():
            typer.echo(spent, err=True)
    report(run, verifier, trained, dropped, as_json=as_json)


def batches(run: Path) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """The run's rollouts, some thousand rows at a time; True with those of groups that were dropped."""
    import pyarrow
    import pyarrow.parquet as parquet

    broken = (pyarrow.ArrowException, OSError, UnicodeDecodeError)

    home = run / "rollouts"
    files = [*sorted(home.glob("*.parquet")), *sorted((home / DROPPED).glob("*.parquet"))]
    if not files:
        raise DataError(
            f"{run}: no rollouts/*.parquet.",
            remedy="Give a run folder; rollouts are written with records.every_steps = 1.",
        )
    for path in files:
        if why := too_large(path):
            raise DataError(f"{path}: {why}.", remedy="Remove it: no run writes such a file.")
        try:
            source = parquet.ParquetFile(path)
        except broken as error:
            raise unreadable(path, error) from None
        missing = [column for column in COLUMNS if column not in source.schema_arrow.names]
        if missing:
            raise DataError(
                f"{path}: no column {', '.join(missing)}; it has {', '.join(source.schema_arrow.names)}.",
                remedy="An audit needs the reference answers, which newer rollouts hold in the column `answer`.",
            )
        columns = [*COLUMNS, *([ALSO] if ALSO in source.schema_arrow.names else [])]
        odd = [name for name in columns if not is_text(source.schema_arrow.field(name).type)]
        if odd:
            raise DataError(
                f"{path}: column {', '.join(odd)}: is not text.", remedy="Remove the file: no run writes such a file."
            )
        try:
            first = 1
            for batch in source.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                rows = [
                    {**plain(row), "file": str(path.relative_to(home)), "row": number}
                    for number, row in enumerate(batch.to_pylist(), start=first)
                ]
                first += len(rows)
                yield rows, path.parent.name == DROPPED
        except broken as error:  # a file with an intact footer may still have corrupt pages
            raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: not a readable parquet file ({error}).", remedy="Remove it, or copy it again.")


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Texts as they are; None where there is none, and for an unknown stop reason."""
    texts = {name: "" if value is None else value for name, value in row.items()}
    return texts | {"stop_reason": texts["stop_reason"] if texts["stop_reason"] in set(StopReason) else ""}


def report(run: Path, verifier: str, trained: Tally, dropped: Tally, *, as_json: bool) -> None:
    if as_json:
        answer = {"run": str(run), "second_method": verifier, **trained.to_json(), DROPPED: dropped.to_json()}
        typer.echo(json.dumps(answer))  # ASCII: a terminal may be the reader
        return
    show(f"{run}: {trained.n_rows} responses", verifier, trained)
    if dropped.n_rows:
        show(f"\nof groups that were dropped: {dropped.n_rows} responses", verifier, dropped)


def show(what: str, verifier: str, tally: Tally) -> None:
    fraction = tally.n_agreeing / tally.n_rows if tally.n_rows else 1.0
    typer.echo(f"{what}, {tally.n_agreeing} ({fraction:.2%}) get the same verdict from {verifier}")
    for kind in tally.disagreements:
        typer.echo(f"\n{tally.counts[kind]:>8}  run {visible(kind[0])}, {verifier} {kind[1]}")
        for example in tally.kinds[kind]:
            ending = visible(" ".join(example["response_end"].split())[-100:])
            said = f" ({visible(example['second_said'][:80])})" if example["second_said"] else ""
            typer.echo(
                f"          {visible(example['file'])}:{example['row']}, problem {visible(example['problem_id'])}, "
                f"reference {example['answer']!r}: ...{ending}{said}"
            )
