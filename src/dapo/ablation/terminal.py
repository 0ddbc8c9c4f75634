"""A ladder on the terminal: the active runs, and the table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from dapo.ablation.plan import Job
from dapo.ablation.run import LadderOutcome, Progress
from dapo.ablation.write import p_cell, reach_cell
from dapo.console import Pipe

LOOK_EVERY_S = 2.0
LEAST_WIDTH = 170

Line = Mapping[str, Any]


@contextmanager
def view(jobs: Sequence[Job], *, is_quiet: bool) -> Iterator[Progress]:
    """On standard error, so that standard output is the result: a live list where there is a terminal, else lines."""
    console = Pipe(stderr=True, highlight=False, soft_wrap=True)
    started = time.monotonic()
    if not sys.stderr.isatty() or is_quiet:

        def lines(running: Sequence[Job], outcome: LadderOutcome, event: str) -> None:
            if event and not is_quiet:
                console.print(f"{len(outcome.done)}/{len(jobs)} done, {len(running)} running  {event}")

        yield lines
        return
    seen = 0.0
    with Live(Text("starting"), console=console, transient=True, auto_refresh=False) as live:

        def picture(running: Sequence[Job], outcome: LadderOutcome, event: str) -> None:
            nonlocal seen
            if event:
                live.console.print(event)
            if event or time.monotonic() - seen > LOOK_EVERY_S:
                seen = time.monotonic()
                at_work = "   ".join(f"{job.name}: step {job.steps_done}" for job in running)
                clock = f"{time.monotonic() - started:.0f} s"
                live.update(Text(f"{len(outcome.done)}/{len(jobs)} done, {clock}   {at_work}"), refresh=True)

        yield picture


def show(summary: Mapping[str, Any], written: Sequence[Path]) -> None:
    """The table, what it is made of, and where the files are."""
    console = Pipe(highlight=False, soft_wrap=True)
    console.width = max(
        console.width, LEAST_WIDTH
    )  # a narrow terminal wraps whole lines; shortened cells would be useless
    settings, k = summary["settings"], summary["k"]
    console.print(
        f"{settings['recipe']}: {settings['budget']}, seeds {', '.join(map(str, settings['seeds']))}; "
        f"avg@{k} on {summary['problems']} held-out problems, 95 % intervals over problems and seeds",
    )
    for columns in (SCORES, SHAPES):
        table = Table(box=None, pad_edge=False)
        for name in columns:
            table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
        for line in summary["arms"]:
            table.add_row(*(Text(cell(line)) for cell in columns.values()))
        console.print(table)
        console.print()
    console.print(
        "late: mean over the evaluations of the last quarter of the run; end: the last one. difference: of late, to\n"
        "the arm named, paired by seed and problem. to best: steps, updates, tokens, minutes to the baseline's best;\n"
        "minutes are longer where runs shared the machine (--jobs).\n"
        "truncated, clip: whole run. waste: generated tokens in no loss. mixed groups: share of trained groups\n"
        "that are neither all correct nor all wrong. published: AIME 2024 avg@32, Qwen2.5-32B: another task and scale.",
    )
    for note in summary["notes"]:
        console.print(note)
    for path in written:
        console.print(str(path))


def difference(line: Line) -> str:
    change = line["difference"]
    return f"{change['value']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]" if change else ""


SCORES: dict[str, Callable[[Line], str]] = {
    "arm": lambda line: line["label"],
    "late": lambda line: f"{line['late']['value']:.3f}",
    "interval": lambda line: f"{line['late']['low']:.3f}–{line['late']['high']:.3f}",
    "end": lambda line: f"{line['end']['value']:.3f}",
    "best": lambda line: f"{line['best']['value']:.3f}",
    "difference": difference,
    "p": p_cell,
    "to": lambda line: line["compared_with"] or "",
    "published": lambda line: " / ".join(f"{value:g}" for value in line["published"].values()),
}
SHAPES: dict[str, Callable[[Line], str]] = {
    "arm": lambda line: line["label"],
    "to best": reach_cell,
    "entropy": lambda line: f"{line['entropy']:.3f}",
    "length": lambda line: f"{line['length']:.1f}",
    "truncated": lambda line: f"{100 * line['truncated']:.1f}%",
    "clip": lambda line: f"{100 * line['clip']:.2f}%",
    "waste": lambda line: f"{100 * line['waste']:.0f}%",
    "mixed groups": lambda line: "" if line["mixed_groups"] is None else f"{100 * line['mixed_groups']:.0f}%",
    "seconds": lambda line: f"{line['step_seconds']:.0f}",
}
