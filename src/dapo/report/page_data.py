"""The page's data about its runs, as plain JSON: no markup, and names from data are never keys."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dapo.commands import dapo_command
from dapo.errors import DataError
from dapo.report import differences
from dapo.report.answers import answer_all, flips_of
from dapo.report.behaviour import MEANINGS
from dapo.report.doctor.diagnose import insufficient_evidence, to_json, verdict
from dapo.report.examined import DiagnosedRun
from dapo.report.learning import change_of, is_graded
from dapo.report.load import RunRecord, is_number
from dapo.report.parts import parts_of
from dapo.report.sources import METRICS as SOURCE_METRICS
from dapo.report.sources import SourceRecord, sources_of, train_of
from dapo.tracking.metrics import METRICS, PART_METRICS, PART_PREFIX, declared

SHOWN_EVENTS = 200
SHOWN_FLIPS = 400


def page_data(runs: Sequence[DiagnosedRun], places: Sequence[str], overlay: list[dict[str, Any]]) -> dict[str, Any]:
    used = {declared(name) for examined in runs for line in examined.run.metrics for name in line}
    return {
        "runs": [run_data(examined, place) for examined, place in zip(runs, places, strict=True)],
        "differences": [differences.to_json(differences.compare(one.run, runs[0].run)) for one in runs[1:]],
        "glossary": [[name, unit, meaning] for name, (unit, meaning) in METRICS.items() if name in used],
        "behaviour": list(MEANINGS.items()),
        "overlay": overlay,
    }


def run_data(examined: DiagnosedRun, place: str) -> dict[str, Any]:
    run = examined.run
    flips = flips_of(run) if run.eval_problems else []
    evaluations = [trimmed(line) for line in run.evaluations]
    return {
        "name": run.folder.resolve().name,
        "folder": str(run.folder),
        "place": place,
        "state": run.state,
        "step": run.steps,
        "steps": run.wanted_steps,
        "preset": str(run.key("preset", default="?")),
        "is_paper_algorithm": run.is_paper_algorithm,
        "model": str(run.key("model", "path", default="?")),
        "data": train_of(run),
        "verifier": str(run.key("rewards", "verifier", default="?")),
        "parts": [list(part) for part in parts_of(run)],
        "commands": [
            ["resume", dapo_command("resume", run.folder)],
            ["evaluate", dapo_command("eval", "--model", run.folder, "--data", "FILE", "--k", 32)],
            ["export", dapo_command("export", run.folder, "--out", "DIR")],
            ["watch", dapo_command("watch", run.folder)],
        ],
        "config": flat(run.config),
        "verdict": verdict(examined.findings, run),
        "is_judged": not insufficient_evidence(run),
        "score": headline(run),
        "findings": to_json(examined.findings),
        "answers": [
            asdict(answer) for answer in answer_all(run, examined.findings, examined.summaries, flips)
        ],
        "missing": [*run.missing, *examined.missing],
        "metrics": columns(run.metrics, [name for name, _ in parts_of(run)]),
        "sources": [source_data(source) for source in sources_of(run)],
        "evaluations": evaluations,
        "flips": flips[:SHOWN_FLIPS],
        "n_flips": {
            "learnt": sum(flip["change"] > 0 for flip in flips),
            "lost": sum(flip["change"] < 0 for flip in flips),
            "same": sum(flip["change"] == 0 for flip in flips),
        },
        "events": [
            [int(e.get("step") or 0), str(e.get("kind", "")), str(e.get("message", ""))]
            for e in run.events[-SHOWN_EVENTS:]
        ],
        "n_events": len(run.events),
        "rollouts": [{"step": step, **summary} for step, summary in examined.summaries],
    }  # fmt: skip


def source_data(source: SourceRecord) -> dict[str, Any]:
    """A source of a mixture with its curves; its name is a value, never a key."""
    return {
        "name": source.name,
        "path": source.path,
        "verifier": source.verifier,
        "wanted": source.wanted,
        "submitted": source.submitted,
        "kept": source.kept,
        "metrics": {name: [finite(value) for value in source.series(name)] for name in SOURCE_METRICS},
    }


def headline(run: RunRecord) -> dict[str, Any]:
    """The large number at the top, what it is, and its change: improved, worse or inconclusive."""
    change = change_of(run)
    if change is not None:
        start = "before" if change.steps[0] == 0 else f"after step {change.steps[0]}"
        what = f"{change.score} on held-out problems, {start} → after step {change.steps[1]}"
        return {"what": what, "from": change.before, "to": change.after, "verdict": change.verdict, "why": change.why}
    if run.evaluations:
        line = [e for e in run.evaluations if e["set"] == run.evaluations[0]["set"]][-1]
        score, key = ("mean reward", "mean_value") if is_graded(line) else (f"avg@{int(line['k'])}", "avg@k")
        when = f"after step {line['step']}" if line["step"] else "before training"
        return {
            "what": f"{score} on held-out problems, {when}",
            "from": None,
            "to": line[key],
            "verdict": "",
            "why": "",
        }
    why = "Evaluation is switched off." if run.is_never_evaluated else "No evaluation yet."
    return {
        "what": why if run.steps else "No step has finished yet.",
        "from": None,
        "to": None,
        "verdict": "",
        "why": "",
    }


def trimmed(line: dict[str, Any]) -> dict[str, Any]:
    """An evaluation with its sources as pairs: names from data are never keys of the page."""
    sources = line.get("by_source")
    return {
        "step": line["step"],
        "set": str(line["set"]),
        "k": line["k"],
        "problems": line.get("problems"),
        "avg": line["avg@k"],
        "avg_interval": line["avg@k_interval"],
        "pass": line.get("pass@k"),
        "maj": line.get("maj@k"),
        "unparseable": line.get("unparseable"),
        "truncated": line.get("truncated"),
        "faults": line.get("faults"),
        "mean_tokens": line.get("mean_tokens"),
        "seconds": line.get("timing.evaluation_s"),
        "by_source": sorted(sources.items()) if isinstance(sources, dict) else [],
    }


def columns(lines: Sequence[dict[str, Any]], parts: Sequence[str] = ()) -> dict[str, list[float | None]]:
    """Metrics by name, one entry per step, None where a step has none. Only declared names: others are not ours."""
    seen = {name for line in lines for name in line}
    names = [name for name in METRICS if name in seen]
    names += [own for part in parts for of in PART_METRICS if (own := f"{PART_PREFIX}{part}/{of}") in seen]
    return {name: [finite(line.get(name)) for line in lines] for name in names}


def finite(value: object) -> float | None:
    return float(f"{value:.6g}") if is_number(value) else None


def flat(tree: dict[str, Any], prefix: str = "") -> list[list[str]]:
    rows: list[list[str]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            rows += flat(value, f"{prefix}{name}.")
        else:
            rows.append([f"{prefix}{name}", json.dumps(value, ensure_ascii=False, default=str)])
    return rows


def history_of(examined: DiagnosedRun) -> dict[str, Any]:
    """Every recorded visit to every problem: which steps, where its group is, how many responses were correct."""
    steps = sorted(examined.indexes)
    visits: dict[str, list[list[int]]] = {}
    for at, step in enumerate(steps):
        groups = examined.indexes[step]["groups"]
        for row, name in enumerate(groups["id"]):
            visits.setdefault(name, []).append([at, row, groups["correct"][row], groups["size"][row]])
    return {"steps": steps, "problems": list(visits.items())}


def read_overlay(path: Path | None) -> list[dict[str, Any]]:
    """Curves to overlay on the run's, such as figures read off a paper: a CSV with metric, step, value and label."""
    if path is None:
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise DataError(f"--overlay {path}: {error.strerror}.", remedy="Name a CSV file.") from None
    curves: dict[tuple[str, str], dict[str, Any]] = {}
    for at, row in enumerate(rows, start=2):
        metric, label = (row.get("metric") or "").strip(), (row.get("label") or path.stem).strip()
        try:
            step, value = float(row["step"]), float(row["value"])
        except (KeyError, TypeError, ValueError):
            raise DataError(
                f"--overlay {path}: line {at} has no number for step and value.",
                remedy="Columns: metric,step,value,label (label may be left out).",
            ) from None
        if metric not in METRICS and metric != "avg@k":
            raise DataError(
                f"--overlay {path}: line {at}: {metric!r} is not a metric.", remedy="Names: docs/metrics.md, or avg@k."
            )
        curve = curves.setdefault((metric, label), {"metric": metric, "label": label, "x": [], "y": []})
        curve["x"].append(step)
        curve["y"].append(value)
    return list(curves.values())
