"""The table of a ladder as one JSON object: everything the terminal, the page and the plots show."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from dapo.ablation.arms import Arm
from dapo.ablation.compare import (
    as_json,
    best_scores,
    compare_runs,
    difference_json,
    end_scores,
    estimate,
    late_scores,
    mean_curve,
    reaching,
)
from dapo.ablation.measure import Evaluated, Measured
from dapo.ablation.plan import Job
from dapo.ablation.published import SOURCES, published
from dapo.config.sources import eval_sources, train_in_words
from dapo.files import replace_file

BASELINE = "naive"
ONE_SEED = "With one seed, intervals and p are over problems only: they do not cover variation between training runs."
FEWER_SEEDS = "Fewer seeds than others have, and differences by the seeds that both have:"
# Of a run, averaged over seeds: column -> what it is.
SHAPES = {
    "entropy": "nats, mean of the last 10 steps, on trained tokens",
    "length": "tokens, mean of the last 10 steps, trained responses",
    "length_wrong": "tokens, mean of the last 10 steps, wrong trained responses",
    "truncated": "share of verified responses, whole run",
    "truncated_end": "share of verified responses, last 10 steps",
    "clip": "share of tokens clipped, low and high, whole run",
    "waste": "share of the generated tokens that entered no loss",
    "mixed_groups": "share of the trained groups with 0 < correct < G, whole run",
    "mixed_groups_end": "share of the trained groups with 0 < correct < G, last 10 steps",
    "step_seconds": "wall-clock time of all steps, value pretraining included",
}


def summarise(
    arms: Sequence[Arm],
    runs: Mapping[str, Sequence[Measured]],
    *,
    settings: Mapping[str, Any],
    machine: Mapping[str, Any],
    failed: Mapping[str, str],
) -> dict[str, Any]:
    """Every arm that has a finished run; the baseline's best is the target where the baseline is among them."""
    baseline = runs.get(BASELINE) or []
    best = max(mean_curve(curves_of(baseline)), key=lambda p: p.avg) if baseline else None
    first = next((run for own in runs.values() for run in own), None)
    lines = [arm_line(arm, runs, best.avg if best is not None else None) for arm in arms if runs.get(arm.name)]
    return {
        "settings": dict(settings),
        "machine": dict(machine),
        "k": first.k if first else None,
        "problems": len(first.problems) if first else None,
        "baseline": {"arm": BASELINE, **as_json(best)} if best is not None else None,
        "columns": SHAPES,
        "arms": lines,
        "missing": [arm.name for arm in arms if not runs.get(arm.name)],
        "failed": dict(failed),
        "notes": [
            *notes_on({arm.label: runs[arm.name] for arm in arms if runs.get(arm.name)}),
            *why_no_p(lines),
        ],
        "sources": SOURCES,
    }


def notes_on(runs: Mapping[str, Sequence[Measured]]) -> list[str]:
    """Caveats about the numbers, by the seeds that each arm has."""
    seeds = {label: [run.seed for run in own] for label, own in runs.items()}
    most = max(map(len, seeds.values()), default=0)
    fewer = [f"{label} ({', '.join(map(str, own))})" for label, own in seeds.items() if len(own) < most]
    notes = [f"{FEWER_SEEDS} {'; '.join(fewer)}."] if fewer else []
    return [*notes, ONE_SEED] if any(len(own) == 1 for own in seeds.values()) else notes


def why_no_p(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why some differences have no p."""
    reasons = [line["difference"].get("insufficient_evidence") for line in lines if line["difference"]]
    return [f"No p where there is too little evidence: {reason}." for reason in dict.fromkeys(filter(None, reasons))]


def arm_line(arm: Arm, runs: Mapping[str, Sequence[Measured]], target: float | None) -> dict[str, Any]:
    own = runs[arm.name]
    curve = mean_curve(curves_of(own))
    reached = reaching(curve, target) if target is not None else None
    previous = runs.get(arm.compared_with or "")
    change = compare_runs(own, previous) if previous else None
    baseline = runs.get(BASELINE)
    over_baseline = compare_runs(own, baseline) if baseline and arm.name != BASELINE else None
    return {
        "name": arm.name,
        "label": arm.label,
        "kind": arm.kind,
        "sets": list(arm.overrides),
        "seeds": [run.seed for run in own],
        "start": float(f"{np.mean([run.evaluations[0].avg for run in own]):.6g}"),
        "late": as_json(estimate(late_scores(own))),
        "end": as_json(estimate(end_scores(own))),
        "best": as_json(estimate(best_scores(own))),
        "late_by_seed": [float(f"{run.late.mean():.6g}") for run in own],
        "end_by_seed": [float(f"{run.end.avg:.6g}") for run in own],
        "compared_with": arm.compared_with if change is not None else None,
        "difference": difference_json(change),
        "over_baseline": difference_json(over_baseline),
        "reaches_baseline_best": as_json(reached) if reached is not None else None,
        "spent": as_json(curve[-1]),
        **{name: mean_of([getattr(run, name) for run in own]) for name in SHAPES},
        "by_seed": {name: [mean_of([getattr(run, name)]) for run in own] for name in SHAPES},
        "curve": [as_json(p) for p in curve],
        "seed_curves": seed_curves(curves_of(own)),
        "published": published(arm.name),
    }


def curves_of(runs: Sequence[Measured]) -> list[tuple[Evaluated, ...]]:
    return [run.evaluations for run in runs]


def seed_curves(runs: Sequence[Sequence[Evaluated]]) -> list[list[dict[str, Any]]]:
    """Each seed by itself; none where the mean is of one."""
    return [[as_json(p) for p in mean_curve([run])] for run in runs] if len(runs) > 1 else []


def mean_of(values: Sequence[float | None]) -> float | None:
    """To six digits; None where an arm has no such figure."""
    known = [value for value in values if value is not None]
    return float(f"{np.mean(known):.6g}") if known else None


def settings_of(
    recipe: str, jobs: Sequence[Job], *, seeds: Sequence[int], budget: str, command: str, extra: Sequence[str]
) -> dict[str, Any]:
    """What the arms have in common, as far as the results depend on it."""
    config = jobs[0].config
    train, sampling = config.train, config.sampling
    return {
        "command": command,
        "recipe": recipe,
        "set": list(extra),
        "budget": budget,
        "seeds": list(seeds),
        "model": config.model.path,
        "data": train_in_words(config),
        "eval": eval_sources(config)[0].name,
        "lr": learning_rates(jobs),
        "prompts_per_step": sampling.prompts_per_step,
        "responses_per_prompt": sampling.responses_per_prompt,
        "updates_per_step": train.updates_per_step,
        "max_response_tokens": config.limits.max_response_tokens,
        "overlong_buffer_tokens": config.shaping.overlong_buffer_tokens,
    }


def learning_rates(jobs: Sequence[Job]) -> float | str:
    """The one of all arms; else in words: 3e-06 (naive), 6e-06 (token-loss, dapo)."""
    by_arm = {job.arm.name: job.config.train.lr for job in jobs}
    rates = sorted(set(by_arm.values()))
    if len(rates) == 1:
        return rates[0]
    return ", ".join(f"{rate:g} ({', '.join(arm for arm in by_arm if by_arm[arm] == rate)})" for rate in rates)


def machine_of(folder: Path, *, is_running: bool) -> dict[str, Any]:
    """The machine that ran the runs: this one where it runs some now, else the one that left its note beside them."""
    note = folder / "machine.json"
    if is_running:
        replace_file(note, json.dumps(this_machine()) + "\n")
    elif not note.is_file():
        return {}
    found: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
    return found


def this_machine() -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
    }
