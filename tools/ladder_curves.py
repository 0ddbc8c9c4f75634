"""Scores of recorded runs by updates, tokens and minutes of training, one line an arm, as an SVG.

python tools/ladder_curves.py OUT.svg "naive GRPO=docs/results/gsm8k-coder-0.5b/ladder-naive-seed*" "DAPO=…"

The first arm is the baseline. A folder has metrics.jsonl and eval.jsonl, and value.jsonl where a critic was pretrained.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dapo.ablation.compare import as_json, mean_curve
from dapo.ablation.measure import Evaluated, spent_by_step
from dapo.ablation.plots import curves_plot
from dapo.ablation.summary import seed_curves
from dapo.config.renamed import in_todays_metrics
from dapo.files import read_lines


def evaluations(folder: Path) -> tuple[Evaluated, ...]:
    """Of the first evaluation set, with its mean score in place of every problem's."""
    metrics, value, found = (list(read_lines(folder / f"{name}.jsonl")) for name in ("metrics", "value", "eval"))
    if not found:
        sys.exit(f"{folder}: was not evaluated")
    spent = spent_by_step([in_todays_metrics(line) for line in metrics], value)
    first = [line for line in found if line["set"] == found[0]["set"]]
    return tuple(
        Evaluated(e["step"], spent[e["step"]], np.array([e["avg@k"]]), e["mean_tokens"], e["truncated"]) for e in first
    )


def arm(label: str, folders: Sequence[Path]) -> dict[str, Any]:
    runs = [evaluations(folder) for folder in folders]
    return {"label": label, "curve": [as_json(p) for p in mean_curve(runs)], "seed_curves": seed_curves(runs)}


def main(out: str, *named: str) -> None:
    arms, ks = [], set()
    for text in named:
        label, pattern = text.split("=", 1)
        folders = sorted(Path().glob(pattern))
        if not folders:
            sys.exit(f"{pattern}: no such folder")
        arms.append(arm(label, folders))
        ks |= {line["k"] for folder in folders for line in read_lines(folder / "eval.jsonl")}
    if len(ks) > 1:
        sys.exit(f"evaluated with different k: {ks}")
    Path(out).write_text(
        curves_plot(arms, k=ks.pop(), target=max(arms[0]["curve"], key=lambda p: p["avg"])), encoding="utf-8"
    )
    for line in arms:
        print(line["label"])
        for point in line["curve"]:
            print("  " + "  ".join(f"{name} {value:.6g}" for name, value in point.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
