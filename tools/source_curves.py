"""Accuracy of each source of a mixture in training, one panel a run, as an SVG.

python tools/source_curves.py OUT.svg "1.5 B=docs/results/countdown/1.5b-seed0" "0.5 B=…"
"""

import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP = 250, 170, 40, 28
COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e")


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Source -> (step, accuracy)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        for name, value in step.items():
            if name.startswith("source/") and name.endswith("/accuracy"):
                found.setdefault(name.split("/")[1], []).append((step["step"], value))
    return found


def panel(title: str, by_source: dict[str, list[tuple[int, float]]], left: float) -> list[str]:
    last = max(step for points in by_source.values() for step, _ in points)
    parts = [f'<text x="{left}" y="{TOP - 10}" font-weight="bold">{escape(title)}</text>']
    for share in (0, 0.5, 1):
        y = TOP + HEIGHT * (1 - share)
        parts.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y}" y2="{y}" stroke="#ced4da"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    parts.append(f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 16}" text-anchor="end">step {last}</text>')
    for colour, (name, points) in zip(COLOURS, by_source.items(), strict=False):
        places = " ".join(f"{left + WIDTH * s / last:.1f},{TOP + HEIGHT * (1 - v):.1f}" for s, v in points)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        y = TOP + HEIGHT * (1 - points[-1][1]) - 5
        parts.append(
            f'<text x="{left + WIDTH - 4}" y="{y:.1f}" text-anchor="end" fill="{colour}">{escape(name)}</text>'
        )
    return parts


def main(out: str, *named: str) -> None:
    runs = [name.split("=", 1) for name in named]
    width = LEFT + len(runs) * (WIDTH + LEFT + 10)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 24}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{TOP + HEIGHT + 24}" fill="white"/>',
    ]
    for n, (title, folder) in enumerate(runs):
        parts += panel(title, curves(Path(folder)), LEFT + n * (WIDTH + LEFT + 10))
    Path(out).write_text("\n".join([*parts, "</svg>\n"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
