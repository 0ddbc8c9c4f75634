"""`dapo ledger`: where every prompt of a run went, and whether each is accounted for exactly once."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from dapo.commands import visible as shown
from dapo.console import table_of, wide_console
from dapo.errors import DapoError
from dapo.report.ledger import FATES, Balance, Row, balance_of_run, rows_of
from dapo.report.load import load_run

MOST_FAULTS = 10  # shown; --json has all


class Unbalanced(DapoError):
    """The ledger of a run does not add up: prompts were lost, or used twice."""

    exit_code = 1


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or not.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show where every prompt of a run went: trained on, dropped and why, or waiting for a later step.

    A group is one visit of one problem (its n-th submission), with all its responses. Each must be trained on or
    dropped exactly once, however often the run was killed and resumed; if one was lost or used twice, this says which,
    and exits with 1.

    \b
    dapo ledger runs/first
    """
    run = load_run(folder)
    found = balance_of_run(folder, skips_visits=run.skips_visits, metrics=run.metrics)
    rows = rows_of(found)
    if as_json:
        typer.echo(json.dumps({"run": str(folder), "balanced": not found.faults, "faults": found.faults,
                               "not_used": found.n_returns, "resampled": found.n_returns - len(found.given_back),
                               "fates": [asdict(row) for row in rows]}))  # fmt: skip
    else:
        print_rows(rows, found)
    if found.faults:
        more = f" and {len(found.faults) - MOST_FAULTS} more" if len(found.faults) > MOST_FAULTS else ""
        raise Unbalanced(
            f"{folder}: groups were lost or used twice: " + " ".join(map(shown, found.faults[:MOST_FAULTS])) + more,
            remedy="Do not trust this run's results; please report it with the folder's ledger.jsonl.",
        )


def print_rows(rows: list[Row], found: Balance) -> None:
    console = wide_console()
    table = table_of("groups", "", "tokens per response", "accuracy", figures=slice(0, 1))
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        tokens = "" if row.tokens is None else f"{row.tokens:,.1f}"
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.3f}"
        table.add_row(f"{row.groups:,}", FATES[row.fate], tokens, accuracy)
    console.print(table)
    if found.n_returns:
        resampled = found.n_returns - len(found.given_back)
        left = len(found.given_back)
        again = f"{resampled:,} of them have been sampled again, {left:,} are next (in the table)."
        text = f"{found.n_returns:,} were sampled and not needed: {again}"
        console.print(Text(text))
    if not found.faults:
        n = len(found.ended) + len(found.open) + len(found.given_back)
        told = f"OK: each of {n:,} groups is accounted for exactly once." if n else "No step has sampled a group yet."
        console.print(Text(told))
