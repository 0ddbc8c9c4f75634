"""Plot of one step on more and more GPUs: time of its phases above, idle share of the rollouts below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log2, log10
from typing import Any

WIDTH, LEFT, RIGHT = 760, 70, 20
TOP, TALL, SHORT, GAP = 48, 220, 110, 34
COLOURS = {"rollouts": "#1f77b4", "updates": "#ff7f0e", "idle": "#d62728", "even": "#999999"}
SHORTEST_S = 0.1  # the table rounds this to 0
Point = tuple[float, float]


def draw(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """An SVG of a scaling table, one row per number of GPUs."""
    cards = [row["gpus"] for row in rows]
    keys = {"rollouts": "rollout_s", "updates": "training_s"}
    phases = {name: [max(row[key], SHORTEST_S) for row in rows] for name, key in keys.items()}
    low, high = floor(log10(min(map(min, phases.values())))), ceil(log10(max(map(max, phases.values()))))
    bottom = TOP + TALL + GAP + SHORT

    def x(n: float) -> float:
        span = log2(cards[-1] / cards[0]) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * log2(n / cards[0]) / span

    def y_seconds(seconds: float) -> float:
        return TOP + TALL * (high - log10(seconds)) / (high - low)

    def y_idle(fraction: float) -> float:
        return bottom - SHORT * fraction

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 46}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{bottom + 46}" fill="white"/>',
        label(LEFT, 20, title, size=14),
        label(LEFT, TOP - 8, "seconds per step"),
        label(LEFT, TOP + TALL + GAP - 8, "idle: share of rollout time lost to empty slots"),
    ]
    for power in range(low, high + 1):
        parts += [rule(y_seconds(10.0**power)), label(LEFT - 8, y_seconds(10.0**power) + 4, f"{10.0**power:,g}", "end")]
    for fraction in (0.0, 0.5, 1.0):
        parts += [rule(y_idle(fraction)), label(LEFT - 8, y_idle(fraction) + 4, f"{fraction:.0%}", "end")]
    parts += [label(x(n), bottom + 18, f"{n:,}", "middle") for n in cards]
    parts.append(label(WIDTH / 2, bottom + 38, "GPUs", "middle"))
    for name, seconds in phases.items():
        parts += line(name, [(x(n), y_seconds(s)) for n, s in zip(cards, seconds, strict=True)])
    # Ideal scaling, from the number of GPUs where all responses first fit.
    start = min(range(len(rows)), key=lambda i: rows[i]["gpu_seconds_per_step"])
    even = [(n, phases["rollouts"][start] * cards[start] / n) for n in cards[start:]]
    parts += line("even", [(x(n), y_seconds(s)) for n, s in even if s >= 10.0**low])
    parts += line("idle", [(x(n), y_idle(row["idle_share_of_rollout"])) for n, row in zip(cards, rows, strict=True)])
    names = [("rollouts", "rollouts"), ("updates", "updates"), ("even", "rollouts, ideal scaling")]
    for i, (name, text) in enumerate(names):
        at = TOP + 16 + 16 * i
        parts.append(f'<line x1="{WIDTH - 270}" y1="{at}" x2="{WIDTH - 246}" y2="{at}" {stroke(name)}/>')
        parts.append(label(WIDTH - 240, at + 4, text))
    return "\n".join([*parts, "</svg>"]) + "\n"


def label(x: float, y: float, text: str, anchor: str = "start", *, size: int = 12) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#333">{escaped}</text>'


def rule(y: float) -> str:
    return f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e0e0e0"/>'


def stroke(name: str) -> str:
    dash = ' stroke-dasharray="4 4"' if name == "even" else ""
    return f'stroke="{COLOURS[name]}" stroke-width="2"{dash}'


def line(name: str, points: Sequence[Point]) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[name]}"/>' for x, y in points]
    return [f'<polyline points="{path}" fill="none" {stroke(name)}/>', *([] if name == "even" else marks)]
