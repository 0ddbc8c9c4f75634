"""What is wrong with a problem set, counted: the content of `dapo data check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dapo.config.own_verifier import own_verifier
from dapo.data.answer_types import answer_type, may_be_decimal
from dapo.data.contamination import SHARE, Contamination, EvaluationTexts, find_contamination
from dapo.data.inventory import Inventory, take_inventory
from dapo.data.names import Use
from dapo.data.problems import ProblemSet, clean
from dapo.data.prompts import PromptFormat, Tokenizer
from dapo.errors import DataError

N_EXAMPLES = 3
MANY_COMMAS = 0.1  # of the references; fewer are lists of two numbers, as in MATH


@dataclass(frozen=True, slots=True)
class Conflict:
    """One question with several answers, and the rows that give them."""

    question: str
    answers: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class BadReference:
    row: int
    answer: str
    why: str


@dataclass(frozen=True, slots=True)
class Lengths:
    """Smallest, middle, 99 % and largest of a list of lengths."""

    min: int
    median: int
    p99: int
    max: int

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Lengths:
        ordered = sorted(lengths)
        last = len(ordered) - 1
        return cls(ordered[0], ordered[last // 2], ordered[round(0.99 * last)], ordered[last])


@dataclass(frozen=True, slots=True)
class ExampleProblem:
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Report:
    """Counts are of the file taken once: a file that repeats its rows k times is counted as one copy.

    `times` says how many problems occur once, twice, … after normalizing white space and case.
    """

    file: str
    sha256: dict[str, str]
    schema: str
    rows: int
    copies: int
    rows_once: int
    distinct: int
    duplicate_rows: int
    times: dict[int, int]
    conflicts: tuple[Conflict, ...]
    no_reference: tuple[int, ...]
    unparseable: tuple[BadReference, ...]
    decimal_commas: tuple[BadReference, ...]
    answer_types: dict[str, int]
    question_chars: Lengths
    prompt_tokens: Lengths | None
    over_limit: int | None
    removed: dict[str, int]
    usable: int
    contamination: tuple[Contamination, ...]
    notes: tuple[str, ...]
    examples: tuple[ExampleProblem, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def check(
    source: str,
    *,
    fields: Mapping[str, str] | None = None,
    verifier: str = "math",
    use: Use = "train",
    against: Sequence[str] = (),
    share: float = SHARE,
    tokenizer: Tokenizer | None = None,
    prompt: PromptFormat | None = None,
    max_prompt_tokens: int | None = None,
    root: str | Path | None = None,
    inventory: Inventory | None = None,
) -> Report:
    """Read the whole set once and count what a training run would stumble over; `inventory`: it has been read."""
    inventory = inventory or take_inventory([source], fields=fields, verifier=verifier, use=use, root=root)
    problems = clean(inventory)
    lengths = token_lengths(problems, tokenizer, prompt or PromptFormat(chat=False))
    over = sum(n > max_prompt_tokens for n in lengths) if lengths and max_prompt_tokens else None
    times = Counter(entry.n_rows for entry in inventory.entries)
    return Report(
        file=source,
        sha256=inventory.files,
        schema=", ".join(inventory.schemas),
        rows=inventory.rows,
        copies=inventory.copies,
        rows_once=inventory.rows_once,
        distinct=len(inventory.entries),
        duplicate_rows=inventory.rows_once - len(inventory.entries),
        times=dict(sorted(times.items())),
        conflicts=conflicts(inventory),
        no_reference=tuple(sorted(row for entry in inventory.entries for row in entry.rows_without)),
        unparseable=unparseable(inventory),
        decimal_commas=decimal_commas(inventory) if verifier == "math" else (),
        answer_types=types(inventory),
        question_chars=Lengths.of(len(entry.question) for entry in inventory.entries),
        prompt_tokens=Lengths.of(lengths) if lengths else None,
        over_limit=over,
        removed=dict(inventory.removed),
        usable=len(problems),
        contamination=tuple(against_all(inventory, against, share=share, root=root)),
        notes=problems.notes,
        examples=tuple(ExampleProblem(one.question, one.answer) for one in problems.problems[:N_EXAMPLES]),
    )


def conflicts(inventory: Inventory) -> tuple[Conflict, ...]:
    return tuple(
        Conflict(entry.question, {r.text: r.rows for r in entry.references if not r.error})
        for entry in inventory.entries
        if entry.is_conflicting
    )


def unparseable(inventory: Inventory) -> tuple[BadReference, ...]:
    bad = [
        BadReference(row, reference.text, reference.error)
        for entry in inventory.entries
        for reference in entry.references
        if reference.error
        for row in reference.rows
    ]
    return tuple(sorted(bad, key=lambda one: one.row))


def decimal_commas(inventory: Inventory) -> tuple[BadReference, ...]:
    """References like 12,5, where a set has many of them; they are read as lists."""
    given = [reference for entry in inventory.entries for reference in entry.references if reference.text]
    found = [
        BadReference(row, reference.text, "read as two numbers")
        for reference in given
        if may_be_decimal(reference.text)
        for row in reference.rows
    ]
    n_rows = sum(len(reference.rows) for reference in given)
    return tuple(sorted(found, key=lambda one: one.row)) if len(found) > MANY_COMMAS * n_rows else ()


def types(inventory: Inventory) -> dict[str, int]:
    """Rows of the file taken once, by the kind of their reference."""
    kinds: Counter[str] = Counter()
    for entry in inventory.entries:
        for reference in entry.references:
            kinds[answer_type(reference.text)] += len(reference.rows)
    return dict(kinds.most_common())


def token_lengths(problems: ProblemSet, tokenizer: Tokenizer | None, prompt: PromptFormat) -> list[int]:
    return [len(prompt.encode(problem, tokenizer)) for problem in problems] if tokenizer is not None else []


def against_all(
    inventory: Inventory, against: Sequence[str], *, share: float, root: str | Path | None
) -> Iterable[Contamination]:
    questions = [entry.question for entry in inventory.entries]
    for name in against:
        evaluation = take_inventory([name], verifier=own_verifier(name) or "math", use="eval", root=root)
        if evaluation.files and evaluation.files == inventory.files:
            raise DataError(f"--against {name}: is the file that is checked.", remedy="Name the evaluation file.")
        texts = EvaluationTexts(name, [entry.question for entry in evaluation.entries])
        yield find_contamination(questions, texts, share=share)
