"""Evaluation problems in a training set: word for word, in all but signs and blanks, by long shared runs, nearly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from dapo.data.keys import loose, ngrams, normalized
from dapo.data.near_duplicates import MANY, RUN, STOCK_FRACTION, Templates

NGRAM = 13  # words; shorter runs are stock phrases
SHARE = 0.5  # of the evaluation problem's n-grams; stock phrases reach 0.29 between AIME 2024 and its training files
NEAR = 0.7  # of the runs of both templates; below, pairs of GSM8K and MATH share a phrase, not the problem


def looked_for(*, share: float = SHARE, near: bool = True) -> str:
    """What `find_contamination` looks for, in words."""
    alike = f"same letters and digits, or {share:.0%} of the {NGRAM}-word sequences"
    return f"{alike}, or {NEAR:.0%} of the {RUN}-word sequences without numbers and names" if near else alike


@dataclass(frozen=True, slots=True)
class Overlap:
    """A question that resembles an evaluation question. `how`: exact (normalized), loose, n-gram or near-duplicate."""

    index: int  # of the question in the set that was checked
    how: str
    share: float  # of the evaluation question's n-grams; of a near-duplicate the similarity of the templates; else 1
    question: str
    evaluation: str


class EvaluationTexts:
    """Evaluation questions, indexed by key and by n-gram."""

    def __init__(self, name: str, questions: Sequence[str]) -> None:
        self.name = name
        self.questions = questions
        self.exact = {normalized(question): at for at, question in enumerate(questions)}
        self.loose = {loose(question): at for at, question in enumerate(questions)}
        self.n_grams: list[int] = []
        self.holders: dict[int, list[int]] = {}
        for at, question in enumerate(questions):
            grams = ngrams(question, NGRAM)
            self.n_grams.append(len(grams))
            for gram in grams:
                self.holders.setdefault(gram, []).append(at)

    def without(self, stock: frozenset[int]) -> EvaluationTexts:
        """The same, where the n-grams of an instruction do not count."""
        other = copy(self)
        other.holders = {gram: held for gram, held in self.holders.items() if gram not in stock}
        counts = Counter(at for held in other.holders.values() for at in held)
        other.n_grams = [counts[at] for at in range(len(self.questions))]
        return other

    def nearest(self, index: int, question: str) -> Overlap | None:
        """The evaluation question this one resembles most, however little; None when they share nothing."""
        exact, alike = self.exact.get(normalized(question)), self.loose.get(loose(question))
        for how, at in (("exact", exact), ("loose", alike)):
            if at is not None:
                return Overlap(index, how, 1.0, question, self.questions[at])
        shared = Counter(at for gram in ngrams(question, NGRAM) for at in self.holders.get(gram, ()))
        if not shared:
            return None
        at = max(shared, key=lambda at: shared[at] / self.n_grams[at])
        return Overlap(index, "n-gram", shared[at] / self.n_grams[at], question, self.questions[at])


@dataclass(frozen=True, slots=True)
class Contamination:
    """What a set shares with one evaluation file; `found`: matches of any kind."""

    name: str
    n_evaluation: int
    found: tuple[Overlap, ...]
    max_share: float  # the largest n-gram share, above the limit or not; other kinds of match not counted

    @property
    def n_hit(self) -> int:
        """Evaluation questions that at least one question of the set resembles."""
        return len({overlap.evaluation for overlap in self.found})

    def count(self, how: str) -> int:
        return sum(overlap.how == how for overlap in self.found)


def find_contamination(
    questions: Sequence[str], texts: EvaluationTexts, *, share: float = SHARE, near: bool = True
) -> Contamination:
    """Every question against every evaluation question. Over-reports on purpose: `loose` erases signs.

    `near`: near-duplicates too, those that are the same up to numbers and names.
    """
    texts = texts.without(stock_grams(questions))
    templates = Templates(texts.questions, others=questions) if near else None
    found: list[Overlap] = []
    largest = 0.0
    for index, question in enumerate(questions):
        overlap = texts.nearest(index, question)
        if overlap is not None and overlap.how == "n-gram":
            largest = max(largest, overlap.share)
            overlap = overlap if overlap.share >= share else None
        if overlap is None and templates is not None:
            overlap = near_duplicate_of(index, question, templates, texts)
        if overlap is not None:
            found.append(overlap)
    return Contamination(texts.name, len(texts.questions), tuple(found), largest)


def stock_grams(questions: Sequence[str]) -> frozenset[int]:
    """N-grams that more than a third of many questions share: of an instruction, not of a problem."""
    if len(questions) < MANY:
        return frozenset()
    counts = Counter(gram for question in questions for gram in ngrams(question, NGRAM))
    return frozenset(gram for gram, n in counts.items() if n > STOCK_FRACTION * len(questions))


def near_duplicate_of(index: int, question: str, templates: Templates, texts: EvaluationTexts) -> Overlap | None:
    nearest = templates.nearest(question)
    if nearest is None or nearest.similarity < NEAR:
        return None
    return Overlap(index, "near-duplicate", nearest.similarity, question, texts.questions[nearest.at])
