"""The ledger of a run: what became of every group it sampled, step by step, and whether each is accounted for once.

A line of ledger.jsonl is a step, {"step": 3, "groups": [...]}, with an `Entry` for each group. A group is one visit of
one problem: a problem's visits are its submissions, counted from 0. It is trained on or dropped once; before that it
may be kept for a later step, which names it again, or be returned to the data queue and resampled later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from dapo.errors import DataError

LEDGER = "ledger.jsonl"
VALUE_LEDGER = "ledger.value.jsonl"  # of value pretraining, whose steps are counted apart

MOST_MISSING = 1000  # visits that are named; a foreign ledger may lack any number
MOST_BYTES = 512 << 20  # ten thousand steps of a thousand groups

TRAINED = "trained"
RETURNED = "returned"  # submitted beyond what the step used: back in the data queue, resampled later
HELD = "held"  # accepted in a step that was skipped
CARRIED = "carried"  # complete, but more than the step needed
IN_FLIGHT = "in_flight"  # partial rollouts
KEPT_OPEN = (HELD, CARRIED, IN_FLIGHT)  # the next step names it again
DROPPED = ("all_correct", "all_wrong", "all_equal", "surplus", "stale")
FATES: Mapping[str, str] = {
    TRAINED: "trained on",
    "all_correct": "dropped: all correct",
    "all_wrong": "dropped: all wrong",
    "all_equal": "dropped: all of equal value",
    "surplus": "dropped: more than the step needed",
    "stale": "dropped: too old",
    CARRIED: "carried over to the next step",
    HELD: "held for the next step",
    IN_FLIGHT: "still being generated",
    RETURNED: "not used, to be resampled",
}


class Entry(NamedTuple):
    """A group in one step of the ledger. The counts are known once every response has its verdict."""

    problem: str
    visit: int
    fate: str
    responses: int | None = None
    tokens: int | None = None  # of all its responses
    correct: int | None = None  # of its responses
    version: int | None = None  # of the weights that sampled its first token


Step = tuple[int, list[Entry]]
Key = tuple[str, int]


def ledger_line(step: int, entries: Iterable[Entry]) -> dict[str, Any]:
    return {"step": step, "groups": [list(entry) for entry in entries]}


# ------------------------------------------------------------------ reading


def read_ledger(path: Path) -> list[Step]:
    """The steps of a ledger; DataError names the line that is corrupt."""
    if path.stat().st_size > MOST_BYTES:
        raise DataError(
            f"{path.name}: larger than {MOST_BYTES >> 20} MB.",
            remedy="It is not a ledger of dapo: look what wrote it, and move it away.",
        )
    steps = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                steps.append(read_step(json.loads(line)))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise DataError(
                    f"{path.name}, line {number}: not a step of a ledger ({type(error).__name__}: {error}).",
                    remedy="`dapo resume RUN` repairs the files of a killed run.",
                ) from None
    return steps


def read_step(line: Any) -> Step:
    step, entries = line["step"], [Entry(*group) for group in line["groups"]]
    if type(step) is not int or not all(map(is_entry, entries)):
        raise ValueError("a field of the wrong type")
    return step, entries


def is_entry(entry: Entry) -> bool:
    counts = (entry.responses, entry.tokens, entry.correct, entry.version)
    named = isinstance(entry.problem, str) and is_count(entry.visit) and entry.fate in FATES
    return named and all(count is None or is_count(count) for count in counts)


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


# ------------------------------------------------------------------ the balance


@dataclass(slots=True)
class Balance:
    """Where every group ended, and what does not add up."""

    ended: dict[Key, Entry] = field(default_factory=dict)  # trained on or dropped
    open: dict[Key, Entry] = field(default_factory=dict)  # kept by the last step for the next
    given_back: dict[Key, Entry] = field(default_factory=dict)  # returned, and not resampled yet
    n_returns: int = 0
    faults: list[str] = field(default_factory=list)

    def by_fate(self) -> dict[str, list[Entry]]:
        """The groups by fate, in the order of FATES, each group once."""
        known = [*self.ended.values(), *self.open.values(), *self.given_back.values()]
        return {fate: found for fate in FATES if (found := [entry for entry in known if entry.fate == fate])}


def balance(value_steps: Sequence[Step], steps: Sequence[Step], *, skips_visits: bool) -> Balance:
    """Follow every group through value pretraining and the steps; together they visit problems in one order.

    `skips_visits`: problems may be passed over, so a problem's visits may have gaps.
    """
    out = Balance()
    for stage, name in ((value_steps, "value pretraining, "), (steps, "")):
        for step, entries in stage:
            take_step(out, f"{name}step {step}", entries)
    if not skips_visits:
        out.faults += islice(missing_visits([*out.ended, *out.open, *out.given_back]), MOST_MISSING)
    return out


def take_step(out: Balance, step: str, entries: Sequence[Entry]) -> None:
    waiting, out.open = out.open, {}
    for entry in entries:
        key = (entry.problem, entry.visit)
        if before := out.ended.get(key) or out.open.get(key):
            out.faults.append(f"{step}: {in_words(key)} {FATES[entry.fate]}; but before: {FATES[before.fate]}.")
            continue
        waiting.pop(key, None)
        out.given_back.pop(key, None)
        if entry.fate == RETURNED:
            out.n_returns += 1
            out.given_back[key] = entry
        else:
            (out.open if entry.fate in KEPT_OPEN else out.ended)[key] = entry
    out.faults += [f"{step}: {in_words(key)} lost; before: {FATES[lost.fate]}." for key, lost in waiting.items()]


def missing_visits(keys: Iterable[Key]) -> Iterator[str]:
    """Visits of a problem that no step names, below one that some step does."""
    visits: dict[str, set[int]] = {}
    for problem, visit in keys:
        visits.setdefault(problem, set()).add(visit)
    for problem, seen in visits.items():
        for visit in (visit for visit in range(max(seen)) if visit not in seen):
            yield f"{in_words((problem, visit))} never sampled, though a later visit was."


def in_words(key: Key) -> str:
    return f"problem {key[0]}, visit {key[1]}:"


# ------------------------------------------------------------------ a run's ledger


@dataclass(frozen=True, slots=True)
class Row:
    """Groups of one fate: how many, how long a response is on average, and how many are correct."""

    fate: str
    groups: int
    tokens: float | None  # per response
    accuracy: float | None


def rows_of(found: Balance) -> list[Row]:
    return [row_of(fate, entries) for fate, entries in found.by_fate().items()]


def row_of(fate: str, entries: Sequence[Entry]) -> Row:
    responses = sum(entry.responses or 0 for entry in entries)
    if not responses:
        return Row(fate, len(entries), None, None)
    tokens, correct = (sum(counts) for counts in zip(*((e.tokens or 0, e.correct or 0) for e in entries), strict=True))
    return Row(fate, len(entries), tokens / responses, correct / responses)


def has_ledger(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (LEDGER, VALUE_LEDGER))


def refuse_foreign(name: str, steps: Sequence[Step], steps_done: int | None) -> None:
    """DataError where the steps are not those of one run from its first on; `steps_done`: by its metrics."""
    before = 0
    for step, _ in steps:
        if step == before + 1:
            before = step
            continue
        if step <= before:
            why = f"step {step} comes again after step {before}: two runs wrote into one folder"
        elif before == 0:
            why = (
                f"begins with step {step}: the steps before it were run by a version of dapo without a ledger, or lost"
            )
        else:
            why = f"step {step} follows step {before}: lines are lost"
        raise not_one_run(name, why)
    if steps_done and not steps_done <= before <= steps_done + 1:  # a step is in the ledger before it is in the metrics
        raise not_one_run(name, f"ends with step {before}, metrics.jsonl with {steps_done}: the files of two runs")


def not_one_run(name: str, why: str) -> DataError:
    return DataError(
        f"{name}: {why}, so nobody can say where every prompt went.",
        remedy="A run has a whole ledger if one folder saw all its steps: keep one run to a folder.",
    )


def balance_of_run(folder: Path, *, skips_visits: bool, steps_done: int | None = None) -> Balance:
    """The balance of a run folder; DataError where it has no ledger, or one that cannot be read or is not this run's.

    `steps_done`: the last step of the run's metrics.
    """
    if not has_ledger(folder):
        raise DataError(
            f"{folder}: has no {LEDGER}: the run has not finished a step, or an earlier version of dapo wrote it.",
            remedy="Only runs of this version or newer have a ledger.",
        )
    stages = [read_ledger(folder / name) if (folder / name).is_file() else [] for name in (VALUE_LEDGER, LEDGER)]
    for name, stage, done in zip((VALUE_LEDGER, LEDGER), stages, (None, steps_done), strict=True):
        refuse_foreign(name, stage, done)
    return balance(*stages, skips_visits=skips_visits)
