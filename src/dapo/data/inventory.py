"""Everything a source holds, counted once: questions by normalized key, references, rows, and what was recognised."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

from dapo.data.keys import normalized, problem_id
from dapo.data.names import Use
from dapo.data.references import answer_key
from dapo.data.rows import Row
from dapo.data.schemas import MAX_QUESTION_CHARS, Record, answer_column, recognise, reference_text
from dapo.data.sources import DataSource, find_source
from dapo.errors import DataError
from dapo.rewards import needs_reference, reference_error
from dapo.rewards.verifiers import named

HEAD_ROWS = 1000  # how far an answer is looked for
JUDGED_BY_META = ("code", "gym", "gym-graded")


@dataclass(slots=True)
class Reference:
    """One answer given to a question, the rows that give it (in one copy of the file), and its fault."""

    text: str
    rows: list[int]
    error: str | None = None


@dataclass(slots=True)
class Entry:
    """One question, however many rows ask it."""

    id: str
    question: str
    source: str
    meta: Mapping[str, object]
    turns: tuple[tuple[str, str], ...] = ()
    references: list[Reference] = field(default_factory=list)
    rows_without: list[int] = field(default_factory=list)

    @property
    def n_rows(self) -> int:
        return len(self.rows_without) + sum(len(reference.rows) for reference in self.references)

    @property
    def first_row(self) -> int:
        return min((*self.rows_without, *(row for reference in self.references for row in reference.rows)))

    @property
    def is_conflicting(self) -> bool:
        """Two usable references that differ."""
        return sum(not reference.error for reference in self.references) > 1


@dataclass(slots=True)
class Inventory:
    """What was read. `copies` is how often the whole file is repeated; row counts below `rows` are of the file once."""

    name: str
    where: str
    rows: int
    copies: int
    schemas: tuple[str, ...]
    entries: list[Entry]
    own_ids: dict[str, str]
    removed: Counter[str]
    files: dict[str, str]
    notes: tuple[str, ...]

    @property
    def rows_once(self) -> int:
        return self.rows // self.copies


def take_inventory(
    sources: Sequence[str],
    *,
    fields: Mapping[str, str] | None = None,
    verifier: str = "math",
    use: Use = "train",
    root: str | Path | None = None,
) -> Inventory:
    """Read every row of every source once, in a stream; memory grows with distinct questions, not with copies."""
    if not sources:
        raise DataError("data.train = []: no problem set is named.", remedy="Name at least one file or known set.")
    named(verifier)  # refuses a name that is none
    found = [find_source(text, use=use, root=root) for text in sources]
    counted = [Counting(source, fields, verifier) for source in found]
    entries = merge(counted)
    judge(entries, verifier)
    removed: Counter[str] = sum((one.removed for one in counted), Counter())
    return Inventory(
        name="+".join(source.name for source in found),
        where=", ".join(source.where for source in found),
        rows=sum(one.rows for one in counted),
        copies=counted[0].copies if len(counted) == 1 else 1,
        schemas=tuple(dict.fromkeys(one.schema for one in counted)),
        entries=entries,
        own_ids={key: value for one in counted for key, value in one.own_ids.items()},
        removed=removed,
        files={source.where: source.sha256 for source in found if source.sha256},
        notes=tuple(note for one in counted for note in one.notes()),
    )


class Counting:
    """One source's rows, counted by exact question and answer, so that whole copies of the file can be told apart."""

    def __init__(self, source: DataSource, fields: Mapping[str, str] | None, verifier: str) -> None:
        self.source = source
        self.verifier = verifier
        self.schema = ""
        self.rows = 0
        self.removed: Counter[str] = Counter()
        self.own_ids: dict[str, str] = {}
        self.first: dict[tuple[str, str | None], tuple[int, Record]] = {}
        self.times: Counter[tuple[str, str | None]] = Counter()
        self.later: dict[tuple[str, str | None], list[int]] = {}
        for number, record in self.records(fields):
            self.add(number, record)
        if not self.rows:
            raise DataError(
                f"{source.where}: no rows.", remedy="Fetch or write the file again; a header alone is not enough."
            )
        self.copies = math.gcd(*self.times.values())

    def records(self, fields: Mapping[str, str] | None) -> Iterator[tuple[int, Record]]:
        rows = self.source.rows()
        head = list(islice(rows, 1)) if fields else until_answered(rows)
        if not head:
            return
        told_by, telling = head[-1] if head[-1][1].keys() == head[0][1].keys() else head[0]
        schema = recognise(
            telling,
            fields,
            where=f"{self.source.where}: row {told_by}",
            needs_answer=needs_reference(self.verifier),
        )
        self.schema = schema.name
        for number, row in chain(head, rows):
            where = f"{self.source.where}: row {number}"
            try:
                record = schema.read(row)
            except (KeyError, TypeError, AttributeError) as error:
                why = f"no column {error}" if isinstance(error, KeyError) else str(error)
                raise DataError(
                    f"{where}: does not fit the schema {schema.name} of row {told_by}: {why}.",
                    remedy="Fix or remove this row, or map the columns with data.fields (--field question=COLUMN).",
                ) from None
            if record.answer is None and self.verifier in JUDGED_BY_META:
                record = replace(record, answer="")  # what judges it is in the other columns
            if not record.question:
                raise DataError(f"{where}: the question is empty.", remedy="Fill it in or remove this row.")
            if not is_text(record):
                raise DataError(
                    f"{where}: holds half of a character (a lone surrogate).",
                    remedy="Fix or remove this row.",
                )
            if len(record.question) > MAX_QUESTION_CHARS:
                raise DataError(
                    f"{where}: the question has {len(record.question):,} characters.",
                    remedy="Remove this row; no prompt is that long.",
                )
            yield number, record

    def add(self, number: int, record: Record) -> None:
        key = (record.question, record.answer)
        self.rows += 1
        self.times[key] += 1
        self.removed.update(record.removed)
        if key not in self.first:
            self.first[key] = (number, record)
            if record.id:
                self.own_ids.setdefault(problem_id(record.question), record.id)
        else:
            self.later.setdefault(key, []).append(number)

    def rows_of(self, key: tuple[str, str | None]) -> list[int]:
        """The rows of this exact pair in the file taken once: of 200 rows in a file repeated 100 times, two."""
        return [self.first[key][0], *self.later.get(key, [])][: self.times[key] // self.copies]

    def notes(self) -> list[str]:
        notes = [self.source.note] if self.source.note else []
        if self.copies > 1:
            notes.append(
                f"{self.source.name}: {self.rows:,} rows are {self.rows // self.copies:,} x {self.copies}: the file is "
                f"repeated {self.copies} times; one copy is used"
            )
        notes += [f"{self.source.name}: {what} taken off {n:,} rows" for what, n in self.removed.items()]
        return notes


def until_answered(rows: Iterator[tuple[int, Row]]) -> list[tuple[int, Row]]:
    """The first row; where its answer is missing, up to one of the same columns that has one.

    An answer that is missing does not say how the others are written.
    """
    head = list(islice(rows, 1))
    column = answer_column(head[0][1]) if head else None
    if column is None or reference_text(head[0][1][column]):
        return head
    first = head[0][1]
    for number, row in islice(rows, HEAD_ROWS):
        head.append((number, row))
        if row.keys() == first.keys() and reference_text(row[column]):
            return head
    return head


def is_text(record: Record) -> bool:
    """Whether it can be written as UTF-8: JSON can spell half a character, which no file or tokenizer takes."""
    try:
        f"{record.question}{record.answer}{record.id}{record.source}".encode()
    except UnicodeEncodeError:
        return False
    return True


def merge(counted: list[Counting]) -> list[Entry]:
    """Questions by normalized key, in order of first appearance; references that differ in form only are one."""
    entries: dict[str, Entry] = {}
    references: dict[tuple[str, str], Reference] = {}
    for one in counted:
        for key, (_, record) in one.first.items():
            identity = normalized(record.question)
            entry = entries.get(identity)
            if entry is None:
                source = record.source or one.source.name
                entry = entries[identity] = Entry(
                    problem_id(record.question), record.question, source, record.meta, record.turns
                )
            rows = one.rows_of(key)
            if record.answer is None:
                entry.rows_without += rows
                continue
            same = references.get((identity, answer_key(record.answer)))
            if same is not None:
                same.rows += rows
                continue
            entry.references.append(Reference(record.answer, rows))
            references[identity, answer_key(record.answer)] = entry.references[-1]
    return list(entries.values())


def judge(entries: list[Entry], verifier: str) -> None:
    """Ask the verifier about every distinct reference, once; where more than that judges, about every problem."""
    known: dict[str, str | None] = {}
    for entry in entries:
        for reference in entry.references:
            if verifier in JUDGED_BY_META:
                reference.error = reference_error(reference.text, verifier=verifier, meta=entry.meta)
                continue
            if reference.text not in known:
                known[reference.text] = reference_error(reference.text, verifier=verifier)
            reference.error = known[reference.text]
