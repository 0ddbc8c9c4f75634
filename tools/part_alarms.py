"""How often the doctor calls a part of the reward gamed where there is none, on recorded and on simulated runs.

    python tools/part_alarms.py         # one JSON object

Recorded runs have no parts, so metrics of theirs are taken for one, rewarded and punished: length, readable answers,
the overlong penalty, the mean probability. Simulated ones stand still but for the noise of a step's responses.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from dapo.config.renamed import in_todays_metrics
from dapo.report.doctor.diagnose import examine
from dapo.report.evidence import MIN_STEPS
from dapo.report.load import RunRecord

ROOT = Path(__file__).parents[1]
NAMES = ("length", "readable", "overlong", "probability")
SIMULATED, STEPS, RESPONSES = 2_000, (6, 10, 20, 40, 100, 200), 256
Line = dict[str, Any]


def taken_for_part(line: Line, name: str) -> tuple[float, float] | None:
    """Mean and standard deviation over responses of what stands for a part; None where a step has not got it."""
    try:
        match name:
            case "length":
                return line["length/mean"], (line["length/p90"] - line["length/p10"]) / 2.56  # as of a normal one
            case "readable":
                share = 1 - line["verdict/unparseable"]
                return share, math.sqrt(share * (1 - share))
            case "overlong":
                return line["reward/overlong"], 0.3
            case _:
                return line["policy/probability"], 0.1
    except KeyError:
        return None


def is_gamed(lines: list[Line], weight: float) -> bool:
    config = {"rewards": {"parts": {"part": {"weight": weight}}}, "train": {"steps": len(lines)}}
    found = examine(RunRecord(Path(), config, lines, [], [], [], []))
    return any(finding.name == "gamed-part" for finding in found)


def with_part(line: Line, part: tuple[float, float]) -> Line:
    return line | {"reward/part/part/mean": part[0], "reward/part/part/std": part[1]}


def recorded() -> dict[str, Any]:
    runs: set[str] = set()
    tried, alarms = 0, []
    for file in sorted((ROOT / "docs" / "results").rglob("*metrics.jsonl")):
        lines = [in_todays_metrics(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
        for name in NAMES:
            made = [
                with_part(line, part) for line in lines if "accuracy" in line and (part := taken_for_part(line, name))
            ]
            if len(made) < MIN_STEPS:
                continue
            runs.add(str(file))
            tried += 2
            own = str(file.relative_to(ROOT / "docs" / "results"))
            alarms += [f"{own}: {name} x {weight:g}" for weight in (1.0, -1.0) if is_gamed(made, weight)]
    return {"runs": len(runs), "tried": tried, "alarms": alarms}


def simulated() -> dict[str, int]:
    draw = random.Random(0)
    alarms = 0
    for steps in STEPS:
        for _ in range(SIMULATED):
            right = draw.uniform(0.1, 0.9)
            noise = math.sqrt(right * (1 - right) / RESPONSES) + 0.02  # problems differ from step to step, too
            lines = [
                with_part({"step": step + 1, "accuracy": draw.gauss(right, noise)}, (draw.gauss(0, 0.1), 1e-3))
                for step in range(steps)
            ]
            alarms += is_gamed(lines, 1.0)
    return {"tried": SIMULATED * len(STEPS), "alarms": alarms}


if __name__ == "__main__":
    print(json.dumps({"recorded": recorded(), "simulated": simulated()}, indent=1))
