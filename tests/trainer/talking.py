"""An environment for the toy task: two answers that depend on what was said, then a score. Imported in workers."""

import random
import re

from dapo.environments.protocol import Turn
from dapo.types import Problem, Score


class Talker:
    """Many words end a turn, because the toy model ends few by itself."""

    stop = tuple(f"w{i}" for i in range(3, 13))
    answer_after_ticks = 2

    def start(self, problem: Problem, seed: int) -> str:
        self.answer, self.random, self.said = problem.answer, random.Random(seed), []
        return f" w{13 + seed % 20}"

    def respond(self, said: str) -> Turn:
        self.said.append(said)
        if len(self.said) < 3:
            words = " ".join(f"w{self.random.randint(13, 39)}" for _ in range(1 + len(said) % 3))
            return Turn(words, called=len(said) % 2 == 0, failed=len(said) % 4 == 0)
        n = sum(int(word) % 3 == int(self.answer) for word in re.findall(r"w(\d+)", " ".join(self.said)))
        return Turn(score=Score(1.0 if n % 2 else -1.0, n % 2 == 1))


class Parted(Talker):
    """Its score has a part of its own."""

    def respond(self, said: str) -> Turn:
        turn = super().respond(said)
        if turn.score is None:
            return turn
        return Turn(score=Score(turn.score.value, turn.score.correct, parts={"chatty": 3.0 + len(said) % 2}))


class Quiet(Talker):
    """Answers once, and leaves the verdict to the run's verifier."""

    def start(self, problem: Problem, seed: int) -> None:
        super().start(problem, seed)

    def respond(self, said: str) -> Turn:
        turn = super().respond(said)
        return turn if len(self.said) == 1 else Turn()


class Broken(Talker):
    """Dies on what has many words, and raises on the rest of the odd ones."""

    def respond(self, said: str) -> Turn:
        if len(said) % 3 == 1:
            raise SystemExit(3)
        if len(said) % 5 == 1:
            raise ValueError("odd")
        return super().respond(said)


class Plain(Talker):
    """Ends no turn by itself."""

    stop = ()
