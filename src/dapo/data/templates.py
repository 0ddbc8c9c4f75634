"""The template of a question: its words with every number as one token and every name as another.

"Tom has 3 apples" and "Anna has 12 apples" have the same template. Which words are names is learned from the questions
themselves: the words that are written with a capital inside sentences at least as often as without.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NUMBER, NAME, PRONOUN = "#", "@", "%"
RUN = 3  # words; a shorter run says nothing about their order, a longer one breaks at every small change
MIN_WORDS = 4  # besides numbers and names; a shorter template ("What is # + #?") is a kind of exercise, not a problem

TOKEN = re.compile(r"\d[\d,]*(?:\.\d+)?(?:st|nd|rd|th)?|[一-鿿]|[^\W\d_](?:(?![一-鿿])[^\W_])*|[-+*/^=<>|!]")
WORD_OR_STOP = re.compile(r"[^\W\d_]+|[.?!:;\n\"“]")
NUMBER_WORD = re.compile(
    "(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|"
    "(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|million|billion)"
)
PRONOUNS = {"he", "she", "him", "her", "his", "hers", "himself", "herself", "they", "them", "their", "theirs"}

Run = tuple[str, ...]


def names_among(questions: Iterable[str]) -> frozenset[str]:
    """The words, in lower case, that these questions use as names."""
    capital_inside: Counter[str] = Counter()
    lower: Counter[str] = Counter()
    for question in questions:
        inside: list[str] = []
        first: list[str] = []
        n_lower = 0
        starts = True
        for word in WORD_OR_STOP.findall(question):
            if not word[0].isalpha():
                starts = True
                continue
            if not word[0].isupper():
                lower[word.lower()] += 1
                n_lower += 1
            else:
                (first if starts else inside).append(word.lower())
            starts = False
        if n_lower >= len(inside):  # else capitals are this question's style and say nothing
            capital_inside.update(inside)
            capital_inside.update(dict.fromkeys(first, 0))
    return frozenset(word for word, n in capital_inside.items() if n >= lower[word])


class Kinds(dict[str, str]):
    """What stands for a word in a template, worked out once for each word."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.names = names

    def __missing__(self, word: str) -> str:
        self[word] = self.kind(word)
        return self[word]

    def kind(self, word: str) -> str:
        if word[0].isdigit() or NUMBER_WORD.fullmatch(word):
            return NUMBER
        if word in PRONOUNS:
            return PRONOUN
        return NAME if word in self.names else word


def template(question: str, kinds: Kinds) -> list[str]:
    """Words, numbers and operators in order; several numbers or names in a row are one, and all pronouns are equal."""
    tokens: list[str] = []
    for found in TOKEN.findall(question):
        token = kinds[found.lower()]
        if token in (NUMBER, NAME) and tokens and tokens[-1] == token:
            continue
        tokens.append(token)
    return tokens


def runs(tokens: list[str]) -> frozenset[Run]:
    """The runs of three tokens; empty where the template has too few words of its own to be recognised by."""
    if sum(token[0].isalpha() for token in tokens) < MIN_WORDS:
        return frozenset()
    return frozenset(tuple(tokens[at : at + RUN]) for at in range(len(tokens) - RUN + 1))


@dataclass(frozen=True, slots=True)
class Twin:
    """The indexed question whose template is nearest. `similarity`: shared runs by all runs of both, 1 when equal."""

    at: int
    similarity: float


class Templates:
    """Questions indexed by the runs of their templates. `others`: what they are compared with; names come from both."""

    def __init__(self, questions: Sequence[str], others: Iterable[str]) -> None:
        self.kinds = Kinds(names_among([*questions, *others]))
        self.sizes: list[int] = []
        self.holders: dict[Run, list[int]] = defaultdict(list)
        for at, question in enumerate(questions):
            own = runs(template(question, self.kinds))
            self.sizes.append(len(own))
            for run in own:
                self.holders[run].append(at)

    def nearest(self, question: str) -> Twin | None:
        """The most similar one, the first of several; None where no run is shared."""
        own = runs(template(question, self.kinds))
        shared = Counter(at for run in own for at in self.holders.get(run, ()))
        if not shared:
            return None
        similarity = {at: n / (self.sizes[at] + len(own) - n) for at, n in shared.items()}
        at = min(similarity, key=lambda at: (-similarity[at], at))
        return Twin(at, similarity[at])
