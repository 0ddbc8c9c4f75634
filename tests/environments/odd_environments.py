"""Environments that do what they should not, and one that does what it should. Imported in workers: nothing heavy."""

import os
import signal
import time

from dapo.environments.protocol import Turn
from dapo.types import Problem, Score


class Counting:
    """Adds up the words that it is told; three turns, then a score. A turn may ask for trouble."""

    answer_after_ticks = 2

    def start(self, problem: Problem, seed: int) -> str:
        self.seed, self.said = seed, []
        return f"Seed {seed} of {problem.question}."

    def respond(self, said: str) -> Turn:
        self.said.append(said)
        match said:
            case "hang":
                while True:
                    pass
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "long":
                return Turn("x" * 10_000_000)
            case "raise":
                raise ValueError("not today")
            case "odd":
                return "a text"  # type: ignore[return-value]
            case "pid":
                return Turn(str(os.getpid()))
            case "sleep":
                time.sleep(1.0)
            case "infinite":
                return Turn(score=Score(float("inf")))
            case "over":
                return Turn()
        if len(self.said) == 3:
            return Turn("Enough.", Score(0.5, parts={"words": 3.0}))
        return Turn(f"{self.seed}: {' '.join(self.said)}", called=True, failed=said == "no")


class Forgetful:
    """Answers by the process it is in."""

    stop = ("w9", ("<call>", "</call>"))

    def start(self, problem: Problem, seed: int) -> None: ...

    def respond(self, said: str) -> Turn:  # noqa: ARG002
        return Turn(f"I am {os.getpid()}.")


class Marked:
    stop = ("w9",)
    answer_after_ticks = 0

    def start(self, problem: Problem, seed: int) -> None: ...

    def respond(self, said: str) -> Turn:
        return Turn("w20 w21") if said.endswith("w9") else Turn()


class Impatient:
    answer_after_ticks = -1

    def start(self, problem: Problem, seed: int) -> None: ...

    def respond(self, said: str) -> Turn: ...


class Endless:
    stop = (("<call>", ""),)

    def start(self, problem: Problem, seed: int) -> None: ...

    def respond(self, said: str) -> Turn: ...


NO_CLASS = 3
