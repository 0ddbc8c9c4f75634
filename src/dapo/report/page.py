"""One self-contained page of a run: curves, evaluations, events, and groups of responses. No script, no network.

Everything a model wrote is escaped text, and the page's content-security policy allows nothing but its own style.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dapo.report.load import RunRecord, load_run
from dapo.tracking.files import replace_file
from dapo.tracking.metrics import METRICS

# (title, metrics drawn into one chart)
CHARTS = [
    ("Accuracy of all judged responses", ["accuracy"]),
    ("Reward of trained responses", ["reward/mean", "reward/overlong"]),
    ("Response length", ["length/mean", "length/p90"]),
    ("Truncated share", ["length/truncated"]),
    ("Entropy", ["policy/entropy"]),
    ("Clipped tokens", ["clip/low", "clip/high"]),
    ("Accepted groups", ["sampling/acceptance"]),
    ("Gradient norm", ["policy/gradient_norm"]),
]
COLOURS = ("#1f6f8b", "#d9822b", "#5b8c5a")
SHOWN_GROUPS = 3

STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1080px; padding: 24px 16px 60px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 36px 0 10px; }
.sub { opacity: .7; } .big { font-size: 40px; font-weight: 650; margin: 14px 0 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 18px; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
figcaption { font-size: 13px; } svg { width: 100%; height: auto; display: block; }
svg text { font-size: 10px; fill: currentColor; opacity: .65; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto; }
td, th { padding: 3px 14px 3px 0; text-align: left; }
.responses { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 10px; }
.response { border: 1px solid var(--line); border-left-width: 4px; border-radius: 6px; padding: 8px 10px; }
.CORRECT { border-left-color: #4a9d5b; } .WRONG { border-left-color: #c2543d; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0 0; font-size: 13px; }
small { opacity: .7; }
"""


def write_page(folder: Path) -> Path:
    """`folder`/report.html from what the folder holds."""
    path = folder / "report.html"
    replace_file(path, render(load_run(folder)))
    return path


def render(run: RunRecord) -> str:
    preset = str(run.config.get("preset", "?"))
    sampling = run.config.get("sampling", {})
    is_fast = any(sampling.get(key) for key in ("carry_over", "partial_rollouts", "predictive"))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{escape(run.folder.name)}</title><style>{STYLE}</style>",
        f"<h1>{escape(run.folder.name)}</h1>",
        f"<div class=sub>preset {escape(preset)}{' (not the paper’s algorithm)' if is_fast else ''} · model "
        f"{escape(str(run.config.get('model', {}).get('path')))} · {len(run.metrics)} steps</div>",
        headline(run),
        *(f"<p>Missing: {escape(name)}</p>" for name in run.missing),
        "<h2>Curves</h2>",
        f"<div class=charts>{''.join(charts(run))}</div>" if run.metrics else "<p>No step has ended yet.</p>",
        evaluations(run),
        groups(run),
        events(run),
    ]
    return "\n".join(part for part in parts if part)


def headline(run: RunRecord) -> str:
    if not run.evaluations:
        return ""
    first, last = run.evaluations[0], run.evaluations[-1]
    low, high = last["avg@k_interval"]
    where = f"avg@{int(last['k'])} on {escape(str(last['set']))}, {int(last['problems'])} problems"
    when = f"before training and after step {int(last['step'])}; 95 % interval {low:.3f} – {high:.3f}"
    return f"<div class=big>{first['avg@k']:.3f} → {last['avg@k']:.3f}</div><div class=sub>{where}, {when}</div>"


def charts(run: RunRecord) -> list[str]:
    drawn = []
    for title, names in CHARTS:
        series = [
            (name, [(float(m["step"]), float(m[name])) for m in run.metrics if isinstance(m.get(name), int | float)])
            for name in names
        ]
        if any(points for _, points in series):
            meanings = "; ".join(METRICS[name][1] for name in names)
            drawn.append(
                f"<figure><figcaption>{escape(title)}</figcaption>{chart(series)}<small>{escape(meanings)}</small></figure>"
            )
    return drawn


def chart(series: Sequence[tuple[str, list[tuple[float, float]]]]) -> str:
    """Lines in a box with the extremes of both axes named."""
    width, height, left, bottom = 320, 150, 44, 18
    points = [point for _, line in series for point in line]
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    y0, y1 = min(y for _, y in points), max(y for _, y in points)
    wide, tall = (x1 - x0) or 1.0, (y1 - y0) or 1.0

    def place(x: float, y: float) -> str:
        return f"{left + (x - x0) / wide * (width - left - 6):.1f},{8 + (y1 - y) / tall * (height - bottom - 16):.1f}"

    lines = [
        f"<polyline fill=none stroke={colour} stroke-width=1.8 points='{' '.join(place(x, y) for x, y in line)}'/>"
        for (_, line), colour in zip(series, COLOURS, strict=False)
    ]
    names = [
        f"<text x={left + 90 * i} y={height - 4} style='fill:{colour};opacity:1'>{escape(name)}</text>"
        for i, ((name, _), colour) in enumerate(zip(series, COLOURS, strict=False))
    ]
    axes = f"<text x=0 y=14>{y1:.3g}</text><text x=0 y={height - bottom - 4}>{y0:.3g}</text>"
    return f"<svg viewBox='0 0 {width} {height}' role=img>{axes}{''.join(lines)}{''.join(names)}</svg>"


def evaluations(run: RunRecord) -> str:
    if not run.evaluations:
        return ""
    rows = "".join(
        f"<tr><td>{int(e['step'])}<td>{escape(str(e['set']))}<td>{e['avg@k']:.3f}<td>{e['avg@k_interval'][0]:.3f} – "
        f"{e['avg@k_interval'][1]:.3f}<td>{e['pass@k']:.3f}<td>{e['maj@k']:.3f}<td>{100 * e['unparseable']:.1f} %"
        for e in run.evaluations
    )
    head = "<tr><th>step<th>set<th>avg@k<th>95 %<th>pass@k<th>maj@k<th>unparseable"
    return f"<h2>Evaluations</h2><table>{head}{rows}</table>"


def groups(run: RunRecord) -> str:
    """A few groups of the first and the last recorded step, responses side by side."""
    shown = []
    for path in dict.fromkeys([*run.rollouts[:1], *run.rollouts[-1:]]):
        columns = ["problem_id", "question", "answer", "response_text", "verdict", "reward", "stop_reason", "tokens"]
        rows = pq.read_table(path, columns=columns).to_pylist()
        by_problem: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_problem.setdefault(row["problem_id"], []).append(row)
        shown.append(f"<h2>Responses of {escape(path.stem.replace('-', ' '))}</h2>")
        for members in list(by_problem.values())[:SHOWN_GROUPS]:
            first = members[0]
            reference = f"<small>reference {escape(first['answer'])}</small>"
            question = f"<p><b>{escape(first['question'])}</b> {reference}</p>"
            shown.append(question + f"<div class=responses>{''.join(response(row) for row in members)}</div>")
    return "".join(shown)


def response(row: dict[str, Any]) -> str:
    verdict = str(row["verdict"])
    kind = "CORRECT" if verdict == "CORRECT" else "WRONG"
    about = f"{verdict} · reward {row['reward']:+.2f} · {len(row['tokens'])} tokens · {row['stop_reason']}"
    return f"<div class='response {kind}'><small>{escape(about)}</small><pre>{escape(row['response_text'])}</pre></div>"


def events(run: RunRecord) -> str:
    if not run.events:
        return ""
    rows = "".join(
        f"<tr><td>{escape(str(e.get('step')))}<td>{escape(str(e.get('kind')))}<td>{escape(str(e.get('message')))}"
        for e in run.events[-50:]
    )
    return f"<h2>Events</h2><table>{rows}</table>"
