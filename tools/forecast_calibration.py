"""How far the report's forecast is off, on all recorded curves: fitted on their first half, and on their first eight.

    python tools/forecast_calibration.py                      # one JSON object
    python tools/forecast_calibration.py --plot docs/forecast.svg

A curve is a recorded run with at least eight evaluations, or an arm of a recorded ladder, which is the mean of its
seeds. Evaluations behind those that were fitted are the test. What it is compared with: the last score stays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dapo.report.forecast import LEAST, Curve, Forecast, forecast, interval_half

RESULTS = Path(__file__).parents[1] / "docs" / "results"
Tested = list[tuple[Forecast, float]]  # forecasts and what came


def curves() -> Iterator[tuple[str, Curve]]:
    """Names and curves, in a fixed order."""
    for file in sorted(RESULTS.rglob("*eval.jsonl")):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        alike = [e for e in lines if e.get("set") == lines[0].get("set") and "avg@k_interval" in e]
        if len(alike) >= LEAST:
            errors = [interval_half(e["avg@k_interval"]) / 1.96 for e in alike]
            yield str(file.relative_to(RESULTS)), made(alike, "avg@k", errors)
    for file in sorted((RESULTS / "ladder").glob("*.json")):
        ladder = json.loads(file.read_text(encoding="utf-8"))
        for arm in ladder["arms"] if isinstance(ladder.get("arms"), list) else ():
            points = arm.get("curve", ())
            if len(points) >= LEAST:
                errors = [np.sqrt(p["avg"] * (1 - p["avg"]) / ladder["problems"]) for p in points]
                yield f"{file.name} {arm['name']}", made(points, "avg", errors)


def made(lines: Any, key: str, errors: list[float]) -> Curve:
    return Curve(*(np.array(x, float) for x in ([e["step"] for e in lines], [e[key] for e in lines], errors)))


def tested(curve: Curve, n: int) -> Tested:
    """Forecasts of every evaluation behind the first n, with what came."""
    made = forecast(curve.first(n), [int(step) for step in curve.steps[n:]])
    return list(zip(made, curve.scores[n:].tolist(), strict=True))


def figures(results: list[Tested], naive: list[float]) -> dict[str, float]:
    every = [pair for result in results for pair in result]
    last = [result[-1] for result in results]
    return {
        "curves": len(results),
        "evaluations": len(every),
        "mean error of all": round(float(np.mean([abs(f.value - y) for f, y in every])), 3),
        "percent of all in the interval": round(100 * float(np.mean([f.low <= y <= f.high for f, y in every]))),
        "mean error of the last": round(float(np.mean([abs(f.value - y) for f, y in last])), 3),
        "bias of the last": round(float(np.mean([f.value - y for f, y in last])), 3),
        "percent of the last in the interval": round(100 * float(np.mean([f.low <= y <= f.high for f, y in last]))),
        "mean error of the last if the score stayed": round(float(np.mean(np.abs(naive))), 3),
    }


def calibrate() -> tuple[dict[str, Any], dict[str, list[Tested]]]:
    """Figures and forecasts: from half of every curve, from its first eight, and from half of those of single runs."""
    results: dict[str, list[Tested]] = {"half": [], "eight": [], "half of single runs": []}
    naive: dict[str, list[float]] = {name: [] for name in results}
    for source, curve in curves():
        half = (len(curve) + 1) // 2
        fitted = {"half": half, "eight": LEAST} | ({"half of single runs": half} if source.endswith(".jsonl") else {})
        for name, n in fitted.items():
            if n < len(curve):
                results[name].append(tested(curve, n))
                naive[name].append(float(curve.scores[n - 1] - curve.scores[-1]))
    return {name: figures(results[name], naive[name]) for name in results}, results


def plot(last: list[tuple[Forecast, float]]) -> str:
    """Forecast of each curve's last evaluation, with its interval, over what came."""
    size, edge = 420, 40

    def at(score: float) -> float:
        return round(edge + (size - 2 * edge) * score, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="11">',
        f'<rect width="{size}" height="{size}" fill="white"/>',
        f'<line x1="{at(0)}" y1="{at(1)}" x2="{at(1)}" y2="{at(0)}" stroke="#bbb"/>',
    ]
    for tick in (0, 0.5, 1):
        parts.append(f'<text x="{at(tick)}" y="{size - 22}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="{edge - 8}" y="{at(1 - tick) + 4}" text-anchor="end">{tick:g}</text>')
    for f, came in sorted(last, key=lambda pair: pair[1]):
        x = at(came)
        parts.append(
            f'<line x1="{x}" y1="{at(1 - f.low)}" x2="{x}" y2="{at(1 - f.high)}" stroke="#2a6" stroke-opacity="0.4"/>'
        )
        parts.append(f'<circle cx="{x}" cy="{at(1 - f.value)}" r="2.5" fill="#163"/>')
    parts.append(f'<text x="{size / 2}" y="{size - 6}" text-anchor="middle">last evaluation, as it came</text>')
    parts.append(
        f'<text x="12" y="{size / 2}" text-anchor="middle" transform="rotate(-90 12 {size / 2})">forecast from half of '
        f"the curve, 95 % interval</text>"
    )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    found, results = calibrate()
    if asked.plot:
        asked.plot.write_text(plot([result[-1] for result in results["half"]]), encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
