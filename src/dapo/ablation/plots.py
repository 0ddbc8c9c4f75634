"""A ladder's plots as SVG: late scores with their intervals, and curves by what training took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

INK, SOFT, GRID = "#222222", "#555555", "#dddddd"

# ------------------------------------------------------------------ late scores

WIDTH, ROW, LEFT, RIGHT = 860, 26, 290, 30


def late_plot(summary: Mapping[str, Any]) -> str:
    """Every arm's `late` with its interval, its seeds as small marks and the baseline as a line."""
    lines: Sequence[Mapping[str, Any]] = summary["arms"]
    values = [v for line in lines for v in (line["late"]["low"], line["late"]["high"], *line["late_by_seed"])]
    low = math.floor(20 * min(values, default=0.0)) / 20
    high = max(math.ceil(20 * max(values, default=1.0)) / 20, low + 0.05)
    bottom = 40 + ROW * len(lines)

    def x(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 34}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{bottom + 34}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" fill="#333333">avg@{summary["k"]}, mean over the last quarter of the run; '
        "95 % intervals; small marks: seeds</text>",
    ]
    for tick in score_ticks(low, high):
        parts.append(f'<line x1="{x(tick)}" x2="{x(tick)}" y1="30" y2="{bottom}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x(tick)}" y="{bottom + 18}" text-anchor="middle" fill="#555555">{tick:.2f}</text>')
    if lines and lines[0]["name"] == "naive":
        at = x(lines[0]["late"]["value"])
        parts.append(f'<line x1="{at}" x2="{at}" y1="30" y2="{bottom}" stroke="#888888" stroke-dasharray="4 3"/>')
    for at, line in enumerate(lines):
        y = 48 + ROW * at
        late = line["late"]
        colour = {"rung": "#1f5fa8", "control": "#a33a3a"}.get(line["kind"], "#5a7d2a")
        parts.append(
            f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end" fill="#222222">{escape(line["label"])}</text>'
        )
        parts.append(
            f'<line x1="{x(late["low"])}" x2="{x(late["high"])}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
        )
        parts += [
            f'<line x1="{x(v)}" x2="{x(v)}" y1="{y - 5}" y2="{y + 5}" stroke="{colour}" stroke-opacity="0.55"/>'
            for v in line["late_by_seed"]
        ]
        parts.append(f'<circle cx="{x(late["value"])}" cy="{y}" r="5" fill="{colour}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


# ------------------------------------------------------------------ curves

PANEL, HEIGHT, GAP, MARGIN, LEGEND_ROW = 250, 220, 34, 52, 18
AXES = {
    "updates": ("updates", 1.0),
    "tokens": ("generated tokens, millions", 1e-6),
    "minutes": ("minutes of training", 1.0),
}
COLOURS = ("#1f5fa8", "#d9480f", "#2b8a3e", "#7048e8", "#a33a3a", "#0b7285", "#b08900", "#5c5f66")
DASHES = ("", "6 3", "10 3 2 3")  # for arms beyond the colours


def curves_plot(arms: Sequence[Mapping[str, Any]], *, k: int | None, target: Mapping[str, Any] | None) -> str:
    """A panel each by updates, tokens and minutes: every arm's mean, its seeds thin, the baseline's best dotted."""
    points = [p for arm in arms for curve in (arm["curve"], *arm["seed_curves"]) for p in curve]
    low = math.floor(20 * min((p["avg"] for p in points), default=0.0)) / 20
    high = max(math.ceil(20 * max((p["avg"] for p in points), default=1.0)) / 20, low + 0.05)
    top = 34 + LEGEND_ROW * math.ceil(len(arms) / 3)
    width, height = MARGIN + 3 * PANEL + 2 * GAP + 16, top + HEIGHT + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="18" fill="{INK}">avg@{k}, means over seeds; thin: single seeds'
        + ("; dotted: the baseline's best</text>" if target else "</text>"),
    ]
    for at, arm in enumerate(arms):
        x, y = MARGIN + (at % 3) * (PANEL + GAP), 38 + LEGEND_ROW * (at // 3)
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" {stroke(at)} stroke-width="2.5"/>')
        parts.append(f'<text x="{x + 28}" y="{y}" fill="{INK}">{escape(arm["label"])}</text>')
    for at, axis in enumerate(AXES):
        parts += panel(arms, axis, (MARGIN + at * (PANEL + GAP), top), (low, high), target)
    return "\n".join([*parts, "</svg>"]) + "\n"


def stroke(at: int) -> str:
    dash = DASHES[at // len(COLOURS) % len(DASHES)]
    return f'fill="none" stroke="{COLOURS[at % len(COLOURS)]}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def panel(
    arms: Sequence[Mapping[str, Any]],
    axis: str,
    corner: tuple[float, float],
    scores: tuple[float, float],
    target: Mapping[str, Any] | None,
) -> list[str]:
    """`corner`: left and top; `scores`: the lowest and the highest that are shown."""
    (left, top), (low, high) = corner, scores
    title, unit = AXES[axis]
    most = (
        max((p[axis] for arm in arms for curve in (arm["curve"], *arm["seed_curves"]) for p in curve), default=0) or 1
    )

    def y(score: float) -> float:
        return round(top + HEIGHT * (high - score) / (high - low), 1)

    def line(curve: Sequence[Mapping[str, Any]], look: str) -> str:
        places = " ".join(f"{left + PANEL * p[axis] / most:.1f},{y(p['avg'])}" for p in curve)
        return f'<polyline points="{places}" {look}/>'

    parts = []
    for score in score_ticks(low, high):
        parts.append(f'<line x1="{left}" x2="{left + PANEL}" y1="{y(score)}" y2="{y(score)}" stroke="{GRID}"/>')
        if left == MARGIN:
            parts.append(f'<text x="{left - 6}" y="{y(score) + 4}" text-anchor="end" fill="{SOFT}">{score:.2f}</text>')
    if target is not None:
        best = y(target["avg"])
        parts.append(
            f'<line x1="{left}" x2="{left + PANEL}" y1="{best}" y2="{best}" stroke="{SOFT}" stroke-dasharray="2 3"/>'
        )
    for number in round_numbers(most * unit):
        x = round(left + PANEL * number / (most * unit), 1)
        parts.append(f'<text x="{x}" y="{top + HEIGHT + 16}" text-anchor="middle" fill="{SOFT}">{number:g}</text>')
    parts.append(
        f'<text x="{left + PANEL / 2}" y="{top + HEIGHT + 34}" text-anchor="middle" fill="{INK}">{title}</text>'
    )
    for at, arm in enumerate(arms):
        parts += [line(curve, f'{stroke(at)} stroke-opacity="0.3"') for curve in arm["seed_curves"]]
    parts += [line(arm["curve"], f'{stroke(at)} stroke-width="2.5"') for at, arm in enumerate(arms)]
    return parts


def score_ticks(low: float, high: float) -> list[float]:
    step = 0.05 if high - low <= 0.5 else 0.1
    return [low + i * step for i in range(math.floor((high - low) / step + 1e-9) + 1)]


def round_numbers(most: float) -> list[float]:
    """0 and at most five steps up to `most`, each 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(most / 5))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= most / 5)
    return [float(f"{step * n:.6g}") for n in range(math.floor(most / step + 1e-9) + 1)]
