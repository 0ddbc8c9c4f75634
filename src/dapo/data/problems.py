"""A problem set: a source's problems with copies collapsed, duplicates merged, unusable rows dropped and counted."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from dapo.data.inventory import Entry, Inventory, take_inventory
from dapo.data.names import Use
from dapo.data.order import epoch_order
from dapo.errors import DataError
from dapo.types import Problem


class Why(StrEnum):
    """Why a problem or a row is not in the cleaned set."""

    DUPLICATE = "duplicate"  # the same question (white space and case normalized) with the same answer
    CONFLICT = "conflicting answers"
    NO_REFERENCE = "no reference"
    UNPARSEABLE = "unparseable reference"
    CONTAMINATED = "contaminated"
    TOO_LONG = "prompt too long"
    NO_INTEGER = "no integer form"
    NOT_VERIFIED = "restatement not verified"


@dataclass(frozen=True, slots=True)
class Drop:
    """One thing left out: the row it was in, why, and the evidence."""

    why: Why
    row: int
    question: str
    detail: str = ""


@dataclass(frozen=True)
class ProblemSet:
    """Problems ready to train or evaluate on, and how they came to be.

    `sha256` is over ids, questions and answers in order: two runs with the same digest saw the same problems. `files`
    maps each file read to its own digest. `notes` says in words what was recognised, collapsed and dropped.
    """

    name: str
    problems: tuple[Problem, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)  # where each problem was first, by id
    drops: tuple[Drop, ...] = ()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.problems)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.problems)

    def __getitem__(self, index: int) -> Problem:
        return self.problems[index]

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for problem in self.problems:
            digest.update(json.dumps([problem.id, problem.question, problem.answer]).encode())
        return digest.hexdigest()

    @property
    def dropped(self) -> dict[str, int]:
        """How many were left out, by reason."""
        return dict(Counter(drop.why.value for drop in self.drops))


def load_problems(
    source: str | Sequence[str],
    *,
    fields: Mapping[str, str] | None = None,
    verifier: str = "math",
    use: Use = "train",
    root: str | Path | None = None,
) -> ProblemSet:
    """The problems of a file, a known name, a hub data set or a callable; of several, merged as one.

    `fields` is config's data.fields. `use` is "train" or "eval": which split a known name stands for. Duplicates are
    merged and conflicting problems dropped by the normalized key; a reference `verifier` cannot use is refused here, so
    that nothing is ever trained on it. A DataError is raised when nothing is left.
    """
    sources = [source] if isinstance(source, str) else list(source)
    return clean(take_inventory(sources, fields=fields, verifier=verifier, use=use, root=root))


def hold_out(problems: ProblemSet, n_held: int, *, seed: int) -> tuple[ProblemSet, ProblemSet]:
    """Split by problem, never by row: the set without n problems, and these n. The order of the set stays."""
    if not 0 < n_held < len(problems):
        raise DataError(
            f"{problems.name}: cannot hold out {n_held:,} of {len(problems):,} problems.", remedy="Hold out fewer."
        )
    held = set(epoch_order(len(problems), seed=seed, epoch=0)[:n_held])
    parts = [
        tuple(problem for at, problem in enumerate(problems) if (at in held) is wanted) for wanted in (False, True)
    ]
    return replace(problems, problems=parts[0]), replace(problems, problems=parts[1])


def clean(inventory: Inventory) -> ProblemSet:
    """Keep each question once, with the one answer its usable rows agree on."""
    problems: list[Problem] = []
    rows: list[int] = []
    drops: list[Drop] = []
    for entry in inventory.entries:
        kept = keep(entry, drops)
        if kept is not None:
            problems.append(kept)
            rows.append(entry.first_row)
    if not problems:
        raise nothing_left(inventory, drops)
    problems = with_own_ids(problems, inventory)
    return ProblemSet(
        name=inventory.name,
        problems=tuple(problems),
        files=inventory.files,
        rows={problem.id: row for problem, row in zip(problems, rows, strict=True)},
        drops=tuple(sorted(drops, key=lambda drop: drop.row)),
        notes=(*inventory.notes, *(f"dropped {n:,}: {why}" for why, n in Counter(d.why.value for d in drops).items())),
    )


def keep(entry: Entry, drops: list[Drop]) -> Problem | None:
    """The entry's problem, or None; what is left out goes to `drops`, one line per row of the file taken once."""
    usable = [reference for reference in entry.references if not reference.error]
    for row in entry.rows_without:
        drops.append(Drop(Why.NO_REFERENCE, row, entry.question))
    for reference in entry.references:
        if reference.error:
            drops += [Drop(Why.UNPARSEABLE, row, entry.question, reference.error) for row in reference.rows]
    if len(usable) > 1:
        answers = " / ".join(reference.text[:60] for reference in usable[:8])
        drops += [Drop(Why.CONFLICT, row, entry.question, answers) for reference in usable for row in reference.rows]
        return None
    if not usable:
        return None
    rows = usable[0].rows
    drops += [Drop(Why.DUPLICATE, row, entry.question, f"of row {rows[0]}") for row in rows[1:]]
    return Problem(entry.id, entry.question, usable[0].text, entry.source, entry.meta, turns=entry.turns)


def with_own_ids(problems: list[Problem], inventory: Inventory) -> list[Problem]:
    """The data's own ids where every problem has one and all differ; else the hash of the question."""
    own = [inventory.own_ids.get(problem.id) for problem in problems]
    if None in own or len(set(own)) != len(own):
        return problems
    return [replace(problem, id=str(own_id)) for own_id, problem in zip(own, problems, strict=True)]


def nothing_left(inventory: Inventory, drops: list[Drop]) -> DataError:
    first = min(drops, key=lambda drop: drop.row)
    detail = f" ({first.detail})" if first.detail else ""
    return DataError(
        f"{inventory.where}: row {first.row}: {first.why.value}{detail}; nothing is left of {inventory.rows:,} rows.",
        remedy="Check that the answer column is the right one: --field answer=COLUMN, config data.fields.answer.",
    )
