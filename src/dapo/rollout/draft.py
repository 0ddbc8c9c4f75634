"""Drafting without a draft model: next tokens are guessed from text that is there, and checked in one pass.

A token follows from the logits and from its response's noise at that position (`noise.py`). So a guess is right exactly
where it is the token that is drawn, and a response has the same tokens as without drafting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LONGEST_MATCH = 4  # tokens; further back text seldom decides what follows (docs/log.md)
BETWEEN = -1  # stands between two texts: no token
Tokens = NDArray[np.int32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drafting:
    """Guess up to `tokens` of every response, while at most `below_rows` of them run."""

    tokens: int = 0
    below_rows: int = 8

    @property
    def rows(self) -> int:
        """Rows of the largest pass."""
        return self.below_rows * (self.tokens + 1) if self.tokens else 0


def guess(tokens: Tokens, siblings: Sequence[Tokens], n: int) -> list[int]:
    """Up to n tokens that followed when these last few tokens stood anywhere before; [] where they never did.

    The place with the longest match decides; of equally good ones the latest of the response itself, then of the last
    sibling.
    """
    if n < 1:
        return []
    text = np.concatenate([part for sibling in siblings for part in (sibling, [BETWEEN])] + [tokens])
    place = np.flatnonzero(text[:-1] == tokens[-1]) + 1
    for back in range(2, min(LONGEST_MATCH, len(tokens)) + 1):
        longer = place[place >= back]
        longer = longer[text[longer - back] == tokens[-back]]
        if not len(longer):
            break
        place = longer
    if not len(place):
        return []
    # A text that comes to its present end while it is copied goes on in a circle.
    found: list[int] = text[place[-1] + np.arange(n) % (len(text) - place[-1])].tolist()
    return found[: found.index(BETWEEN)] if BETWEEN in found else found


def n_counting(draft: Sequence[int], drawn: Sequence[int], is_over: Sequence[bool]) -> int:
    """How many of the tokens drawn in a pass are the response's own; drawn[i] follows on the first i of the draft.

    The first wrong guess is replaced by what was drawn there. Nothing counts behind that, nor behind the end.
    """
    for i, guessed in enumerate(draft):
        if is_over[i] or drawn[i] != guessed:
            return i + 1
    return len(draft) + 1


def spread(drafts: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """The tokens of a pass, a row's newest one and its draft: of each its row, and how many drafted ones precede it."""
    n_tokens = np.array([len(draft) + 1 for draft in drafts])
    first = np.repeat(np.cumsum(n_tokens) - n_tokens, n_tokens)
    return np.repeat(np.arange(len(drafts)), n_tokens), np.arange(len(first)) - first


def last_counting(drafts: Sequence[Sequence[int]], drawn: Tokens, is_over: NDArray[np.bool_]) -> Ints:
    """Of each row, which of all tokens drawn in a pass is the last that counts."""
    last, first = [], 0
    for draft in drafts:
        part = slice(first, first + len(draft) + 1)
        last.append(first + n_counting(draft, drawn[part].tolist(), is_over[part].tolist()) - 1)
        first = part.stop
    return np.array(last)


@dataclass(frozen=True, slots=True)
class Running:
    """A running response, as a draft needs it."""

    group: int
    order: int  # of submission
    tokens: Tokens  # prompt and response so far
    start: int  # tokens of the prompt
    room: int  # tokens that may be drafted

    @property
    def text(self) -> Tokens:
        """What others may copy: not the newest token, which the model has yet to read, and perhaps cannot."""
        return self.tokens[max(self.start - LONGEST_MATCH, 0) : -1]


class Drafter:
    """Makes the drafts of an engine, from its running responses and from siblings of theirs that have ended."""

    def __init__(self, drafting: Drafting) -> None:
        self.drafting = drafting
        self.n_drafted = self.n_accepted = 0
        self._ended: dict[int, dict[int, Tokens]] = {}  # group -> order of submission -> text, while others go on

    def is_due(self, n_running: int) -> bool:
        return 0 < n_running <= self.drafting.below_rows and self.drafting.tokens > 0

    def drafts(self, running: Sequence[Running]) -> list[list[int]]:
        """A draft for each of the running responses; it may be empty."""
        texts: dict[int, dict[int, Tokens]] = {}
        for one in running:
            texts.setdefault(one.group, dict(self._ended.get(one.group, {})))[one.order] = one.text
        drafts = []
        for one in running:
            siblings = [text for order, text in sorted(texts[one.group].items()) if order != one.order]
            drafts.append(guess(one.tokens, siblings, min(one.room, self.drafting.tokens)))
        return drafts

    def count(self, drafts: Sequence[Sequence[int]], n_accepted: int) -> None:
        """So many tokens of these drafts were right."""
        self.n_drafted += sum(map(len, drafts))
        self.n_accepted += n_accepted

    def take_counts(self) -> tuple[int, int]:
        counts = self.n_drafted, self.n_accepted
        self.n_drafted = self.n_accepted = 0
        return counts

    def keep(self, ended: Iterable[Running], groups: Iterable[int]) -> None:
        """Remember responses that ended, and forget groups of which none goes on."""
        for one in ended:
            self._ended.setdefault(one.group, {})[one.order] = one.text.copy()
        for group in self._ended.keys() - set(groups):
            del self._ended[group]

    def forget(self) -> None:
        """At a snapshot, here and where it is restored: so both make the same drafts from then on."""
        self._ended = {}
