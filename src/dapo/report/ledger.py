"""The ledger of a run: what became of every group it sampled, step by step, and whether each is accounted for once.

A line of ledger.jsonl is a step, {"step": 3, "order": [57, 121], "groups": [...]}, with an `Entry` for each group. A
group is one visit of one problem: a problem's visits are its submissions, counted from 0. It is trained on or dropped
once; before that it may be kept for a later step, which names it again, or be returned to the data queue and resampled
later. `order` are the prompts taken from the data's order before the step and after it, those returned not counted.
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


class Step(NamedTuple):
    """A line of the ledger."""

    step: int
    entries: list[Entry]
    order: tuple[int, int] | None = None  # None in a line of an earlier version


Key = tuple[str, int]


def ledger_line(step: int, entries: Iterable[Entry], order: tuple[int, int]) -> dict[str, Any]:
    return {"step": step, "order": list(order), "groups": [list(entry) for entry in entries]}


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
                    remedy="A killed run leaves such a last line, and `dapo resume RUN` does its step again; a "
                    "finished run cannot get it back.",
                ) from None
    return steps


def read_step(line: Any) -> Step:
    step, entries, order = line["step"], [Entry(*group) for group in line["groups"]], line.get("order")
    if type(step) is not int or not all(map(is_entry, entries)):
        raise ValueError("a field of the wrong type")
    if order is None:
        return Step(step, entries)
    before, after = order
    if not (is_count(before) and is_count(after) and before <= after):
        raise ValueError("its place in the order is none")
    return Step(step, entries, (before, after))


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
    n_taken: int | None = 0  # prompts taken from the order so far; None: not known
    n_new: dict[str, int] = field(default_factory=dict)  # by step: groups it began and kept
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
        for line in stage:
            step = f"{name}step {line.step}"
            out.n_new[step] = take_step(out, step, line.entries)
            check_order(out, step, line.order, skips_visits=skips_visits)
    if not skips_visits:
        out.faults += islice(missing_visits([*out.ended, *out.open, *out.given_back]), MOST_MISSING)
    return out


def take_step(out: Balance, step: str, entries: Sequence[Entry]) -> int:
    """Account for a step's groups; how many it began and did not return."""
    waiting, out.open = out.open, {}
    n_new = 0
    for entry in entries:
        key = (entry.problem, entry.visit)
        if before := out.ended.get(key) or out.open.get(key):
            out.faults.append(f"{step}: {in_words(key)} {FATES[entry.fate]}; but before: {FATES[before.fate]}.")
            continue
        n_new += waiting.pop(key, None) is None and entry.fate != RETURNED
        out.given_back.pop(key, None)
        if entry.fate == RETURNED:
            out.n_returns += 1
            out.given_back[key] = entry
        else:
            (out.open if entry.fate in KEPT_OPEN else out.ended)[key] = entry
    out.faults += [f"{step}: {in_words(key)} lost; before: {FATES[lost.fate]}." for key, lost in waiting.items()]
    return n_new


def check_order(out: Balance, step: str, order: tuple[int, int] | None, *, skips_visits: bool) -> None:
    """A step goes on in the order where the one before it ended, and names every prompt that it took."""
    expected, out.n_taken = out.n_taken, order[1] if order else None
    if order is None:
        return
    before, after = order
    if expected is not None and before != expected:
        what = "never sampled" if before > expected else "sampled again"
        out.faults.append(
            f"{step}: begins after {before:,} prompts of the order, the step before it ended after {expected:,}: "
            f"{abs(before - expected):,} {what}."
        )
    n_named, n_taken = out.n_new[step], after - before
    if n_named > n_taken or (n_named < n_taken and not skips_visits):
        out.faults.append(f"{step}: took {n_taken:,} prompts from the order and names {n_named:,}.")


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
    for step in (line.step for line in steps):
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
        why = "lines of it are lost, or these are the files of two runs"
        raise not_one_run(name, f"ends with step {before}, metrics.jsonl with {steps_done}: {why}")


def refuse_other_counts(found: Balance, metrics: Sequence[Mapping[str, Any]]) -> None:
    """DataError where the metrics count other prompts than the ledger names: it is that of another run."""
    for line in metrics:
        tried, named = line.get("sampling/prompts_tried"), found.n_new.get(f"step {line['step']}")
        if is_count(tried) and named is not None and tried != named:
            why = f"names {named:,} new prompts in step {line['step']}, metrics.jsonl {tried:,}: the files of two runs"
            raise not_one_run(LEDGER, why)


def not_one_run(name: str, why: str) -> DataError:
    return DataError(
        f"{name}: {why}, so nobody can say where every prompt went.",
        remedy="A run has a whole ledger if one folder saw all its steps: keep one run to a folder.",
    )


def balance_of_run(folder: Path, *, skips_visits: bool, metrics: Sequence[Mapping[str, Any]] = ()) -> Balance:
    """The balance of a run folder; DataError where it has no ledger, or one that cannot be read or is not this run's.

    `metrics`: the lines of metrics.jsonl, each with its step.
    """
    if not has_ledger(folder):
        raise DataError(
            f"{folder}: has no {LEDGER}: the run has not finished a step, or an earlier version of dapo wrote it.",
            remedy="Only runs of this version or newer have a ledger.",
        )
    stages = [read_ledger(folder / name) if (folder / name).is_file() else [] for name in (VALUE_LEDGER, LEDGER)]
    steps_done = int(metrics[-1]["step"]) if metrics else None
    for name, stage, done in zip((VALUE_LEDGER, LEDGER), stages, (None, steps_done), strict=True):
        refuse_foreign(name, stage, done)
    found = balance(*stages, skips_visits=skips_visits)
    if not found.faults:  # which say more than that counts differ
        refuse_other_counts(found, metrics)
    return found
