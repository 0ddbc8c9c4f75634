"""Reads a run folder, complete or not: of a running, finished or crashed run."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dapo.config.renamed import in_todays_metrics, in_todays_sections
from dapo.config.toml_text import parse_toml, refuse_newer_run
from dapo.errors import DataError
from dapo.report.rollouts.recorded import records_of

RUNNING_SECONDS = 60.0  # a run that wrote nothing for this long, and for five of its steps, is not running
SHOWN_MISSING = 3  # files named one by one
MOST_STEPS = 10**12  # a larger number is not a step


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The lines of a run without corrupt ones, and what was missing or corrupt."""

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    events: list[dict[str, Any]]
    rollouts: list[Path]  # the parquet of each recorded step; the browser's scripts are in the folder of that name
    missing: list[str]
    eval_problems: list[dict[str, Any]] = field(default_factory=list)
    silent_s: float = 0.0  # seconds since the run last wrote a line

    @property
    def steps(self) -> int:
        """The last finished step."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def wanted_steps(self) -> int:
        steps = self.key("train", "steps", default=0)
        return int(steps) if is_step(steps) else 0

    @property
    def state(self) -> str:
        """finished, running or stopped; a run that has written nothing for long counts as stopped."""
        has_spent_budget = any(e.get("kind") == "budget" and e.get("step") == self.steps for e in self.events)
        if self.metrics and (self.steps >= self.wanted_steps or has_spent_budget):
            return "finished"
        longest = max(
            (float(m["timing.step_s"]) for m in self.metrics[-5:] if is_number(m.get("timing.step_s"))), default=0.0
        )
        return "running" if self.silent_s < max(RUNNING_SECONDS, 5 * longest) else "stopped"

    @property
    def is_never_evaluated(self) -> bool:
        return is_never_evaluated(self.config)

    @property
    def is_paper_algorithm(self) -> bool:
        """False where a switch of dapo-fast or a control experiment is on: config.schema.Config has the same rule."""
        switches = ("carry_over", "partial_rollouts", "predictive")
        is_fast = any(self.key("sampling", switch, default=False) for switch in switches)
        is_fast |= self.key("sampling", "retire_above", default="none") != "none"
        return not is_fast and self.key("rewards", "control", default="none") == "none"

    @property
    def skips_visits(self) -> bool:
        """Whether sampling may pass over a visit of a problem: by prediction, or because the problem is retired."""
        retires = self.key("sampling", "retire_above", default="none") != "none"
        return retires or self.key("sampling", "predictive", default=False) is True

    def key(self, *path: str, default: Any = None) -> Any:
        value: Any = self.config
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return default if value is None else value

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric is a finite number."""
        return [(int(m["step"]), float(m[name])) for m in self.metrics if is_number(m.get(name))]

    def median(self, name: str, steps: slice) -> float | None:
        values = [float(m[name]) for m in self.metrics[steps] if is_number(m.get(name))]
        return statistics.median(values) if values else None


def is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def is_step(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MOST_STEPS


def load_run(folder: Path) -> RunRecord:
    path = folder / "config.toml"
    if not path.is_file():
        raise DataError(f"{folder}: is not a run: it has no config.toml.", remedy="Name the folder of a run.")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        refuse_newer_run(path, text)
        config = parse_toml(text)
    except ValueError as error:
        raise DataError(
            f"{path}: not valid TOML: {error}.", remedy="Restore the file from a copy of the run."
        ) from None
    missing: list[str] = []
    odd = [name for name, value in config.items() if not isinstance(value, str if name == "preset" else dict)]
    if odd:
        missing.append(f"config.toml: {', '.join(odd)}: not valid in a config, and left out")
        config = {name: value for name, value in config.items() if name not in odd}
    config = in_todays_sections(config)
    metrics = [in_todays_metrics(m) for m in read(folder / "metrics.jsonl", missing) if is_step(m.get("step"))]
    evaluations = [
        e for e in read(folder / "eval.jsonl", missing, is_optional=is_never_evaluated(config)) if is_evaluation(e)
    ]
    rollouts = list(records_of(folder / "rollouts"))
    gone = [p.name for p in expected_rollouts(folder, config, metrics) if p not in rollouts]
    if len(gone) > SHOWN_MISSING:
        missing.append(f"rollouts/{gone[0]} … {gone[-1]}: {len(gone)} files missing, with their scripts")
    else:
        missing += [f"rollouts/{name}: missing, with its scripts" for name in gone]
    written = [(folder / f"{name}.jsonl") for name in ("metrics", "eval", "events", "value")]
    newest = max((p.stat().st_mtime for p in [path, *written] if p.exists()), default=0.0)
    return RunRecord(
        folder=folder,
        config=config,
        metrics=metrics,
        evaluations=evaluations,
        events=[e for e in read(folder / "events.jsonl", missing, is_optional=True) if is_step(e.get("step") or 0)],
        rollouts=rollouts,
        missing=missing,
        eval_problems=list(filter(is_per_problem, read(folder / "eval_problems.jsonl", missing, is_optional=True))),
        silent_s=max(0.0, time.time() - newest),
    )


def read(path: Path, missing: list[str], *, is_optional: bool = False) -> Iterator[dict[str, Any]]:
    """The intact lines of a JSONL file; corrupt or missing ones are noted."""
    if not path.is_file():
        if not is_optional:
            missing.append(f"{path.name}: missing")
        return
    torn = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for at, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                torn.append(at)
                continue
            if isinstance(record, dict):
                yield record
            else:
                torn.append(at)
    if torn:
        lines = ", ".join(str(at) for at in torn[:5]) + (" …" if len(torn) > 5 else "")
        missing.append(f"{path.name}: line {lines} is corrupt and left out")


def is_never_evaluated(config: dict[str, Any]) -> bool:
    """Evaluation is switched off, or there is nothing to evaluate on."""
    return bool(config.get("eval", {}).get("every_steps") == 0 or config.get("data", {}).get("eval") == [])


def is_evaluation(line: dict[str, Any]) -> bool:
    """The scores of a set. A score may be missing or none but for avg@k; an interval has two ends."""
    scores = {name: line.get(name) for name in ("avg@k", "pass@k", "maj@k", "mean_value")}
    intervals = {name: line.get(f"{name}_interval") for name in scores}
    sources = line.get("by_source", {})
    return (
        is_step(line.get("step"))
        and is_step(line.get("k"))
        and line["k"] >= 1
        and isinstance(line.get("set"), str)
        and is_number(scores["avg@k"])
        and all(value is None or is_number(value) for value in scores.values())
        and is_interval(intervals["avg@k"])
        and all(value is None or is_interval(value) for value in intervals.values())
        and all(is_step(line.get(name) or 0) for name in ("problems", "mean_tokens", "timing.evaluation_s"))
        and isinstance(sources, dict)
        and all(map(is_number, sources.values()))
    )


def is_interval(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))


def is_per_problem(line: dict[str, Any]) -> bool:
    """An evaluation problem by problem: for each a name, its question and how many of k responses were correct."""
    ids, questions, correct, k = (line.get(name) for name in ("ids", "questions", "correct", "k"))
    if not (isinstance(ids, list) and isinstance(questions, list) and isinstance(correct, list) and is_number(k)):
        return False
    are_names = all(isinstance(name, str) for name in [*ids, *questions])
    are_counts = all(map(is_step, [line.get("step"), k, *correct])) and float(k or 0) > 0
    values = line.get("values", correct)
    are_values = isinstance(values, list) and len(values) == len(ids) and all(map(is_number, values))
    is_whole = 0 < len(ids) == len(questions) == len(correct) and are_names and are_counts and are_values
    return is_whole and isinstance(line.get("set"), str)


def expected_rollouts(folder: Path, config: dict[str, Any], metrics: list[dict[str, Any]]) -> list[Path]:
    """The records that the steps so far should have left: every n steps, where something was trained on."""
    every = config.get("records", {}).get("every_steps", 0)
    if not isinstance(every, int) or every < 1:
        return []
    due = [m for m in metrics if int(m["step"]) % every == 0 and m.get("sampling/groups_trained", 0)]
    return [folder / "rollouts" / f"step-{int(m['step']):06d}.parquet" for m in due]
