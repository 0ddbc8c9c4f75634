"""A run and its groups on a terminal, for people on a server; control characters of a response are escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dapo.commands import dapo_command
from dapo.commands import visible as shown
from dapo.errors import DataError
from dapo.report.answers import answer_all, flips_of
from dapo.report.behaviour import Phrases
from dapo.report.differences import compare
from dapo.report.doctor.diagnose import verdict
from dapo.report.examined import DiagnosedRun, examine_run, phrases_of
from dapo.report.load import RunRecord, load_run
from dapo.report.parts import PART_COLUMN, mean_of, recorded_parts
from dapo.report.rollouts.chunks import readable_or_not
from dapo.report.rollouts.pieces import TokenPieces, find_tokenizer
from dapo.report.rollouts.recorded import DROPPED, groups_of, number, read_step, values_of, why_unread
from dapo.report.sources import sources_of

HEATS = ("probability", "entropy", "ratio", "advantage", "clipped", "none")
SHOWN_PROBLEMS = 40
LAST_PROMPTS = 100  # of a source


def print_run(
    folder: Path, *, problem: str | None, step: int | None, heat: str, console: Console | None = None
) -> None:
    """The answers and the problems of a step; or one problem's responses."""
    if heat not in HEATS:
        raise DataError(f"--heat {heat}: unknown colouring.", remedy=f"Use one of {', '.join(HEATS)}.")
    console = console or Console(markup=False, emoji=False, highlight=False)
    examined = examine_run(folder)
    if problem is None:
        print_overview(examined, console)
    if examined.run.rollouts:
        parquet = pick_step(examined.run, step, problem)
        table = read_step(parquet)
        if table is None:
            why = why_unread(parquet) or "cannot be read"
            raise DataError(f"{parquet}: {why}.", remedy="Name another step with --step.")
        groups = list(groups_of(table))
        if problem is None:
            print_problems(parquet, groups, console)
        else:
            phrases = phrases_of(folder, None)
            pieces = find_tokenizer(folder, examined.run.config)
            for rows in matching(groups, problem, parquet):
                print_group(parquet, rows, pieces, phrases, heat, console)
    elif problem is not None or step is not None:
        raise DataError(f"{folder}: no step is recorded.", remedy="Set records.every_steps = 10 in the recipe.")


def print_differences(folders: Sequence[Path], console: Console | None = None) -> None:
    """Compare every other run with the first."""
    console = console or Console(markup=False, emoji=False, highlight=False)
    first, *others = [load_run(folder) for folder in folders]
    for run in others:
        found = compare(run, first)
        console.print(Text(f"{shown(str(run.folder))}: {shown(found.answer)}", style="bold"))
        console.print(Text(shown(found.detail)))


def pick_step(run: RunRecord, step: int | None, problem: str | None) -> Path:
    """The step asked for; else the last one, and for a problem the last one that has it."""
    by_step = {int(path.stem.removeprefix("step-")): path for path in run.rollouts}
    if step is not None:
        if step not in by_step:
            shown = ", ".join(str(s) for s in by_step)
            raise DataError(f"--step {step}: not recorded.", remedy=f"Recorded steps: {shown}.")
        return by_step[step]
    for path in reversed(run.rollouts):
        if problem is None or any(name.startswith(problem) for name in problem_ids(path)):
            return path
    raise DataError(
        f"--problem {problem}: no recorded step has it.",
        remedy=f"List them: {dapo_command('report', run.folder, '--terminal')}",
    )


def problem_ids(path: Path) -> set[str]:
    table = read_step(path)
    return (
        set()
        if table is None or "problem_id" not in table.column_names
        else {*map(str, values_of(table["problem_id"]))}
    )


def matching(groups: list[list[dict[str, Any]]], problem: str, path: Path) -> list[list[dict[str, Any]]]:
    found = [rows for rows in groups if str(rows[0]["problem_id"]).startswith(problem)]
    if not found:
        raise DataError(
            f"--problem {problem}: {path.stem} does not have it.", remedy="Leave out --step to look further."
        )
    exact = [rows for rows in found if rows[0]["problem_id"] == problem]
    return exact or found[:1]


def print_overview(examined: DiagnosedRun, console: Console) -> None:
    run = examined.run
    label = "" if run.is_paper_algorithm else " (not the paper's algorithm)"
    place, preset = shown(str(run.folder)), shown(str(run.key("preset")))
    console.print(Text(f"{place}  preset {preset}{label}  {run.state}, step {run.steps} of {run.wanted_steps}"))
    for text in [*run.missing, *examined.missing]:
        console.print(Text(f"Missing: {shown(text)}", style="yellow"))
    console.print(Text(f"Doctor: {verdict(examined.findings, run)}"))
    grid = Table.grid(padding=(0, 2))
    flips = flips_of(run) if run.eval_problems else []
    for answer in answer_all(run, examined.findings, examined.summaries, flips):
        grid.add_row(
            Text(answer.question, style="dim"), Text(shown(answer.answer), style="bold"), Text(shown(answer.detail))
        )
    console.print(grid)
    print_sources(run, console)


def print_sources(run: RunRecord, console: Console) -> None:
    """Of a mixture: what was asked of each source and what came of it, a line each."""
    sources = sources_of(run)
    if not sources:
        return
    titles = ("source", "weight", "submitted", "trained on", "mixed", "accuracy", "length", "verifier")
    table = Table(*titles, box=None, padding=(0, 2, 0, 0))
    for source in sources:
        ends = [source.over_last(name, LAST_PROMPTS)[0] for name in ("groups_kept", "accuracy", "length")]
        cells = [*map(percent, (source.wanted, source.submitted, source.kept, ends[0], ends[1])), whole(ends[2])]
        table.add_row(*(Text(shown(cell)) for cell in (source.name, *cells, source.verifier)))
    console.print(table)


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def print_problems(path: Path, groups: list[list[dict[str, Any]]], console: Console) -> None:
    n_dropped = sum(bool(rows[0].get(DROPPED)) for rows in groups)
    also = f"; of those dropped, recorded: {n_dropped}" if n_dropped else ""
    console.print(Text(f"{path.stem.replace('-', ' ')}, groups trained on: {len(groups) - n_dropped}{also}"))
    table = Table(box=None)
    parts = recorded_parts(groups[0][0]) if groups else []
    for name in ("problem", "correct", "tokens", *parts, "question"):
        is_number = name == "tokens" or name in parts
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != "question")
    for rows in groups[:SHOWN_PROBLEMS]:
        right = sum(row.get("verdict") == "CORRECT" for row in rows)
        tokens = float(np.mean([len(row.get("tokens", ())) for row in rows]))
        question = " ".join(str(rows[0].get("question", "")).split())[:90]
        table.add_row(
            Text(shown(str(rows[0]["problem_id"]))),
            f"{right}/{len(rows)}",
            f"{tokens:.0f}",
            *("–" if mean is None else f"{mean:.2f}" for mean in means_of(rows, parts)),
            Text(shown(f"{dropped_word(rows[0])}{question}")),
        )
    console.print(table)
    if len(groups) > SHOWN_PROBLEMS:
        console.print(Text(f"and {len(groups) - SHOWN_PROBLEMS} more"))


def means_of(rows: Sequence[Mapping[str, Any]], parts: Sequence[str]) -> list[float | None]:
    """Of each part of the reward over a group."""
    return [mean_of([number(row.get(f"{PART_COLUMN}{name}")) for row in rows]) for name in parts]


def dropped_word(row: Mapping[str, Any]) -> str:
    return f"[dropped: {str(row[DROPPED]).replace('_', ' ')}] " if row.get(DROPPED) else ""


def print_group(
    path: Path, rows: list[dict[str, Any]], pieces: TokenPieces | None, phrases: Phrases, heat: str, console: Console
) -> None:
    first = rows[0]
    right = sum(row.get("verdict") == "CORRECT" for row in rows)
    console.print(Text(shown(str(first.get("question", ""))), style="bold"))
    console.print(
        Text(f"{path.stem.replace('-', ' ')} · problem {shown(str(first['problem_id']))} · "
             f"reference {shown(str(first.get('answer', '')))} · {dropped_word(first)}{right} of {len(rows)} "
             "correct", style="dim")
    )  # fmt: skip
    for at, row in enumerate(rows):
        response = readable_or_not(row, pieces, phrases)
        parts = [f"{name} {response[key] or 0.0:+.2f}" for name, key in (("verdict", "raw"), ("overlong", "overlong"))]
        parts += [
            f"{name} {'unknown' if value is None else f'{value:+.2f}'}" for name, value in response.get("parts", ())
        ]
        about = (
            f"{at + 1}  {response['verdict']}  reward {response['reward'] or 0.0:+.2f} ({', '.join(parts)})  "
            f"{response['n']} tokens, {response['stop']}"
        )
        colour = "green" if response["verdict"] == "CORRECT" else "red"
        kinds = f" ({', '.join(response['behaviour'])})" if response["behaviour"] else ""
        answer = f"answer {response['extracted'] if response['extracted'] is not None else 'not parsed'}{kinds}"
        body = coloured(response, row, heat, pieces)
        panel = Panel(body, title=Text(shown(about)), title_align="left", border_style=colour, padding=(0, 1))
        panel.subtitle, panel.subtitle_align = Text(shown(answer)), "left"
        console.print(panel)


def coloured(response: Mapping[str, Any], row: Mapping[str, Any], heat: str, pieces: TokenPieces | None) -> Text:
    """The response, its tokens on a background by `heat`."""
    text = response["text"]
    if "unreadable" in response:
        return Text(f"cannot be read: {shown(response['unreadable'])}", style="yellow")
    if pieces is None or heat == "none" or "units" not in response:
        return Text(shown(text))
    _, units = pieces.split(row["tokens"], text)
    raw, at = text.encode("utf-16-le", "surrogatepass"), 0
    body = Text()
    for place, size in enumerate(units):
        part = raw[2 * at : 2 * (at + int(size))].decode("utf-16-le", "replace")
        body.append(shown(part), style=token_style(row, place, heat))
        at += int(size)
    return body


def token_style(row: Mapping[str, Any], at: int, heat: str) -> str:
    def value(name: str) -> float:
        values = row.get(name, ())
        return float(values[at]) if at < len(values) else float("nan")

    if heat == "clipped":
        return {-1: "bold white on blue", 1: "bold black on dark_orange"}.get(int(np.nan_to_num(value("clip"))), "")
    if heat == "ratio":
        off = value("ratio") - 1
        return "" if not abs(off) > 0.02 else shade("dark_orange" if off > 0 else "dodger_blue2", abs(off) * 4)
    if heat == "advantage":
        return shade("dark_orange" if value("advantage") > 0 else "dodger_blue2", abs(value("advantage")) / 2)
    strength = 1 - np.exp(value("logp_old")) if heat == "probability" else value("entropy") / 2
    return shade("dark_cyan", float(strength))


def shade(colour: str, strength: float) -> str:
    if not strength > 0.1:
        return ""
    return f"bold white on {colour}" if strength > 0.5 else f"underline {colour}"
