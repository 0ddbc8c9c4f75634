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

NAMES_FRACTION = 0.25  # of all words that are capitals inside sentences; above, it is the language's nouns (German)
STOCK_FRACTION = 1 / 3  # of all questions that begin or end alike; above, it is an instruction and not the problem
STOCK_TOKENS = 5  # of an instruction, at least
MANY = 30  # questions; of fewer, a share says nothing about a language or a habit

_WORDS = (
    "(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|"
    "(?:twen|thir|for|fif|six|seven|eigh|nine)ty|dozen|hundred|thousand|million|billion)"
)
NUMBER_WORDS = rf"(?:a\s+(?=dozen|hundred|[tmb]\w+lion|thousand))?{_WORDS}(?:-{_WORDS})*(?![^\W_])"
_PART = r"(?:\{\s*\d+\s*\}|\d)"
FRACTION = rf"\\[dt]?frac\s*{_PART}\s*{_PART}"
FIGURES = rf"{FRACTION}|\d[\d,]*(?:\.\d+)?(?:/\d+)?(?:st|nd|rd|th)?"
TOKEN = re.compile(rf"{FIGURES}|(?i:{NUMBER_WORDS})|[一-鿿]|[^\W\d_](?:(?![一-鿿])[^\W_])*|[-+*/^=<>|!]")
NUMBER_TOKEN = re.compile(rf"{FIGURES}|{NUMBER_WORDS}")
_OPERATOR = r"(?:[-+*/^×÷]|\\(?:cdot|times|div)\b)"
_VALUE = rf"(?:{FRACTION}|\d+(?:,\d{{3}})*(?:\.\d+)?(?:/\d+)?+)"
_TERM = rf"[(\[]*-?[(\[]*{_VALUE}[)\]]*"
EXPRESSION = re.compile(rf"{_TERM}(?:\s*{_OPERATOR}\s*{_TERM})+")
WORD_OR_STOP = re.compile(r"[^\W\d_]+|[.?!:;\n\"“]")
PRONOUNS = {"he", "she", "him", "her", "his", "hers", "himself", "herself", "they", "them", "their", "theirs"}

OPERATORS = frozenset("-+*/^=<>|!")

Run = tuple[str, ...]


def names_among(questions: Iterable[str]) -> frozenset[str]:
    """The words, in lower case, that these questions use as names; none where capitals are no sign of a name."""
    n_questions = n_first = 0
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
        n_questions += 1
        n_first += len(first)
        if n_lower >= len(inside):  # else capitals are this question's style and say nothing
            capital_inside.update(inside)
            capital_inside.update(dict.fromkeys(first, 0))
    n_all = n_first + capital_inside.total() + lower.total()
    if n_questions >= MANY and capital_inside.total() > NAMES_FRACTION * n_all:
        return frozenset()
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
        if NUMBER_TOKEN.fullmatch(word):
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


def n_words(tokens: Sequence[str]) -> int:
    return sum(token[0].isalpha() for token in tokens)


def runs(tokens: Sequence[str], structure: str = "") -> frozenset[Run]:
    """The runs of three tokens; empty where the template has too few words of its own to be recognised by.

    Each run carries the structure of the question's sums, so that only questions with the same one share any.
    """
    if n_words(tokens) < MIN_WORDS:
        return frozenset()
    return frozenset((structure, *tokens[at : at + RUN]) for at in range(len(tokens) - RUN + 1))


def structure_of(question: str) -> str:
    """Its sums of plain numbers, with # for every number: `(3 + 5) * 2` is `(#+#)*#`."""
    sums = (re.sub(_VALUE, NUMBER, found[0]) for found in EXPRESSION.finditer(question))
    return " ".join("".join(one.split()) for one in sums)


def shared_head(all_tokens: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The longest beginning that more than a third of many questions have in common; empty where it is short."""
    alike, length = list(all_tokens), 0
    while len(all_tokens) >= MANY:
        counts = Counter(tokens[length] for tokens in alike if len(tokens) > length)
        token, n = counts.most_common(1)[0] if counts else ("", 0)
        if n <= STOCK_FRACTION * len(all_tokens):
            break
        alike = [tokens for tokens in alike if len(tokens) > length and tokens[length] == token]
        length += 1
    return tuple(alike[0][:length]) if length >= STOCK_TOKENS else ()


@dataclass(frozen=True, slots=True)
class Nearest:
    """The indexed question whose template is nearest. `similarity`: shared runs by all runs of both, 1 when equal."""

    at: int
    similarity: float


class Templates:
    """Questions indexed by the runs of their templates. `others`: what they are compared with; names come from both."""

    def __init__(self, questions: Sequence[str], others: Iterable[str]) -> None:
        others = list(others)
        self.kinds = Kinds(names_among([*questions, *others]))
        self.tokens = {question: template(question, self.kinds) for question in (*questions, *others)}
        self.head = shared_head([*self.tokens.values()])
        self.tail = shared_head([tokens[::-1] for tokens in self.tokens.values()])[::-1]
        self.sizes: list[int] = []
        self.holders: dict[Run, list[int]] = defaultdict(list)
        for at, question in enumerate(questions):
            own = self.runs_of(question)
            self.sizes.append(len(own))
            for run in own:
                self.holders[run].append(at)

    def runs_of(self, question: str) -> frozenset[Run]:
        tokens = self.tokens.get(question) or template(question, self.kinds)
        return runs(self.without_stock(tokens), structure_of(question))

    def without_stock(self, tokens: list[str]) -> list[str]:
        """Without the instruction that a third of the questions begin or end with, where a problem is left."""
        start = len(self.head) if tuple(tokens[: len(self.head)]) == self.head else 0
        end = (
            len(tokens) - len(self.tail) if tuple(tokens[len(tokens) - len(self.tail) :]) == self.tail else len(tokens)
        )
        own = tokens[start:end]
        return own if n_words(own) >= MIN_WORDS or any(token in OPERATORS for token in own) else tokens

    def nearest(self, question: str) -> Nearest | None:
        """The most similar one, the first of several; None where no run is shared."""
        own = self.runs_of(question)
        shared = Counter(at for run in own for at in self.holders.get(run, ()))
        if not shared:
            return None
        similarity = {at: n / (self.sizes[at] + len(own) - n) for at, n in shared.items()}
        at = min(similarity, key=lambda at: (-similarity[at], at))
        return Nearest(at, similarity[at])
