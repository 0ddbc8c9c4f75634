"""A run in a few lines: a table and small curves, as text for a terminal or as HTML and SVG for a notebook.

Names and messages of a run are anybody's text: every one is escaped, and no script is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dapo.commands import dapo_command, visible
from dapo.report.learning import change_of
from dapo.report.load import RunRecord

# Each small chart: its title and its metric.
CHARTS = (
    ("accuracy", "accuracy"),
    ("reward", "reward/mean"),
    ("response length", "length/mean"),
    ("entropy", "policy/entropy"),
)
WIDTH, HEIGHT, MARGIN = 176, 72, 6  # of one chart, in pixels
LINE, POINT = "#0f7b6c", "#d0742c"  # read on white and on black
BLOCKS = "▁▂▃▄▅▆▇█"
MOST_POINTS = 400  # of a line; more is more text and the same picture

Series = Sequence[tuple[int, float]]


def rows_of(run: RunRecord) -> list[tuple[str, str]]:
    """What a reader asks first, a name and a text each."""
    rows = [("run", str(run.folder)), ("state", f"{run.state}, step {run.steps} of {run.wanted_steps}")]
    for name in dict.fromkeys(str(line["set"]) for line in run.evaluations):
        change = change_of(run, name)
        last = next(line for line in reversed(run.evaluations) if str(line["set"]) == name)
        told = (
            f"avg@{last['k']} {last['avg@k']:.3f} after step {last['step']}"
            if change is None
            else f"{change.score} {change.before:.3f} → {change.after:.3f}, {change.verdict}"
        )
        rows.append((name.replace("/", ":").rsplit(":", 1)[-1], told))
    rows += [(title, f"{series[0][1]:.3g} → {series[-1][1]:.3g}") for title, series in curves_of(run)]
    if seconds := run.median("timing.step_s", slice(None)):
        rows.append(("time", f"{seconds:.1f} s a step"))
    if run.state != "finished":
        rows.append(("resume", dapo_command("resume", run.folder)))
    return rows


def text_of(run: RunRecord) -> str:
    """The table as plain text, with a line of blocks for the first curve."""
    rows = rows_of(run)
    if (curves := curves_of(run)) and len(curves[0][1]) > 1:
        title, series = curves[0]
        at = next(place for place, (name, _) in enumerate(rows) if name == title)
        rows[at] = (title, f"{rows[at][1]}  {blocks([value for _, value in series])}")
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{visible(name):<{width}}  {visible(text)}" for name, text in rows)


def curves_of(run: RunRecord) -> list[tuple[str, Series]]:
    """Title and values of each chart; none for a metric that is always 0, as accuracy of graded rewards is."""
    found = [(title, run.series(metric)) for title, metric in CHARTS]
    return [(title, series) for title, series in found if any(value for _, value in series)]


def blocks(values: Sequence[float], most: int = 40) -> str:
    """Values as a row of blocks, the lowest the smallest."""
    every = -(-len(values) // most)
    shown = values[::every]
    low, high = min(shown), max(shown)
    return "".join(BLOCKS[round((value - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for value in shown)


def html_of(run: RunRecord) -> str:
    """Charts above the table; both follow the colours of the page around them."""
    cells = "".join(
        f'<tr><td style="text-align:left;opacity:.7;padding:1px 12px 1px 0">{shown(name)}</td>'
        f'<td style="text-align:left;padding:1px 0">{shown(text)}</td></tr>'
        for name, text in rows_of(run)
    )
    return f'<div>{charts_of(run)}<table style="border:0;font-size:13px">{cells}</table></div>'


def charts_of(run: RunRecord) -> str:
    """One small chart beside the other, of the metrics that the run has."""
    drawn = [(title, series) for title, series in curves_of(run) if len(series) > 1]
    if not drawn:
        return ""
    last = max(series[-1][0] for _, series in drawn)
    points = held_out(run) if drawn[0][0] == "accuracy" else ()
    pictures = [
        chart(title, series, last, points if title == "accuracy" else ()) for title, series in drawn
    ]  # of several sets the first is shown
    note = (
        f'<div style="font-size:11px;opacity:.7"><span style="color:{POINT}">●</span> held-out avg@k</div>'
        if points
        else ""
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:10px;margin:4px 0">{"".join(pictures)}</div>{note}'


def held_out(run: RunRecord) -> Series:
    """avg@k of the first evaluation set, by step."""
    if not run.evaluations:
        return ()
    name = run.evaluations[0]["set"]
    return [(int(line["step"]), float(line["avg@k"])) for line in run.evaluations if line["set"] == name]


def chart(title: str, series: Series, last: int, points: Series = ()) -> str:
    """An SVG with a line from step 0 to `last`, its ends labelled."""
    every = -(-len(series) // MOST_POINTS)
    line = [*series[:-1:every], series[-1]]
    values = [value for _, value in (*line, *points)]
    low, high = min(values), max(values)

    def place(step: int, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / max(1, last)
        share = (value - low) / (high - low) if high > low else 0.5
        return f"{x:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share:.1f}"

    path = " ".join(place(step, value) for step, value in line)
    dots = "".join(
        f'<circle cx="{x}" cy="{y}" r="3" fill="{POINT}"/>'
        for x, y in (place(step, value).split(",") for step, value in points if step <= last)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT + 32}" '
        f'viewBox="0 -16 {WIDTH} {HEIGHT + 32}" role="img" aria-label="{shown(title)}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
        f'<text x="0" y="-5">{shown(title)}</text>'
        f'<text x="{WIDTH}" y="-5" text-anchor="end" opacity=".7">{low:.3g} – {high:.3g}</text>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="currentColor" opacity=".25"/>'
        f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.6" stroke-linejoin="round"/>{dots}'
        f'<text x="0" y="{HEIGHT + 13}" opacity=".7">0</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 13}" text-anchor="end" opacity=".7">step {last}</text></svg>'
    )


def shown(text: str) -> str:
    """Somebody's text as text in HTML, nothing of it hidden."""
    return escape(visible(text))
