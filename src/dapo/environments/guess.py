"""`guess`: find a number by asking whether it is higher or lower. An example of a game."""

from __future__ import annotations

import random
import re

from dapo.environments.protocol import Turn
from dapo.types import Problem, Score

_NUMBER = re.compile(r"(?<![\d.-])\d{1,9}(?![\d.]*\d)", re.ASCII)


class Guess:
    """A number from 1 to 100, drawn by the seed; the last number of a turn is the guess."""

    highest = 100
    tries = 7  # halving what is left finds it in seven: 2^7 > 100

    def start(self, problem: Problem, seed: int) -> str:  # noqa: ARG002  every problem is this game
        self._number = random.Random(seed).randint(1, self.highest)
        self._left = self.tries
        return f"I think of a whole number from 1 to {self.highest}. You have {self.tries} guesses: one in each turn."

    def respond(self, said: str) -> Turn:
        self._left -= 1
        guesses = _NUMBER.findall(said)
        if guesses and int(guesses[-1]) == self._number:
            return Turn("Yes.", Score(1.0, correct=True))
        if self._left == 0:
            return Turn("No. That was the last guess.", Score(-1.0, correct=False))
        if not guesses:
            return Turn("I see no number.", failed=True)
        return Turn("Higher." if int(guesses[-1]) < self._number else "Lower.")
