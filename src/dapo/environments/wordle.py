"""`wordle`: find a word of five letters by guessing; each letter is marked. An example of a game."""

from __future__ import annotations

import random
import re
from collections import Counter

from dapo.environments.protocol import Turn
from dapo.types import Problem, Score

_LIST = """
    apple beach bread brick chair clock cloud coast crane dance dream drink earth field flame floor fruit ghost
    glass grape grass green heart horse house juice knife lemon light lunch maple metal money month mouse music night
    ocean paint paper peach pearl phone piano pilot plant plate point pound queen radio river robot salad scale
    sheep shelf shirt shoes skirt sleep smile smoke snake spoon stage stair stone storm sugar sweet table taste teeth
    tiger toast tooth tower track train truck uncle under value video voice wagon water wheat wheel white woman world
    """
WORDS = tuple(_LIST.split())
_WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{5}(?![A-Za-z])", re.ASCII)
_BRACKETS = re.compile(r"\[\s*([A-Za-z]{5})\s*\]", re.ASCII)


class Wordle:
    """Any five letters may be guessed: the last in square brackets, else the last word of five letters."""

    tries = 6

    def start(self, problem: Problem, seed: int) -> str:  # noqa: ARG002  every problem is this game
        self._word = random.Random(seed).choice(WORDS)
        self._left = self.tries
        return (
            f"Find a word of five letters. You have {self.tries} guesses, one in each turn, written as [crane]. Each "
            "is marked: G for a letter in its place, Y for one that stands elsewhere, - for one that is not there."
        )

    def respond(self, said: str) -> Turn:
        self._left -= 1
        guesses = _BRACKETS.findall(said) or _WORD.findall(said)
        guess = guesses[-1].lower() if guesses else ""
        if guess == self._word:
            return Turn("GGGGG", Score(1.0, correct=True))
        if self._left == 0:
            return Turn("That was the last guess.", Score(-1.0, correct=False))
        if not guess:
            return Turn(f"I see no word of five letters. {self._left} left.", failed=True)
        return Turn(f"{guess} {marks(guess, self._word)}, {self._left} left.")


def marks(guess: str, word: str) -> str:
    """G, Y or - for each letter. A letter of the word is used once: first for its place, then from the left."""
    left = Counter(there for said, there in zip(guess, word, strict=True) if said != there)
    found = []
    for said, there in zip(guess, word, strict=True):
        is_elsewhere = said != there and left[said] > 0
        left[said] -= is_elsewhere
        found.append("G" if said == there else "Y" if is_elsewhere else "-")
    return "".join(found)
