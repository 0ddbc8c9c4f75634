"""`second-try`: the problem's own verifier judges, and a wrong answer may be corrected once."""

from __future__ import annotations

from dapo.environments.protocol import Turn
from dapo.errors import ConfigError
from dapo.rewards.decision import Outcome
from dapo.rewards.verifiers import is_judge, named
from dapo.types import Problem, Score, Task, Verdict


class SecondTry:
    """What is said after a wrong answer does not depend on the answer, so it cannot give it away.

    The verifier is the problem's; where it names none, that of reasoning-gym for its problems, else `verifier`. A
    subclass with another one, or with more tries, is an environment of your own.
    """

    verifier = "math"
    tries = 2
    again = "That is wrong. Try again."

    def start(self, problem: Problem, seed: int) -> None:  # noqa: ARG002  nothing is drawn
        name = problem.verifier or ("gym" if "gym" in problem.meta else self.verifier)
        if is_judge(name):
            raise ConfigError(
                f"data.environment = 'second-try': verifier {name!r} asks a server, which an episode cannot.",
                remedy="Use a verifier that judges by itself: math, exact, choice, code, gym or your own function.",
            )
        self._problem, self._verifier, self._left = problem, named(name), self.tries

    def respond(self, said: str) -> Turn:
        self._left -= 1
        task = Task(said, self._problem.answer, None, self._problem.for_verifier(), seconds=self._verifier.seconds)
        score = score_of(self._verifier.decide(task) or self._verifier.work(task))
        return Turn(self.again) if self._left and score.correct is False else Turn(score=score)


def score_of(outcome: Outcome) -> Score:
    """A verdict as +1 or −1 (DAPO eq. 7); what a function gave stays what it is."""
    if isinstance(outcome, Score):
        return outcome
    is_right = outcome.verdict is Verdict.CORRECT
    return Score(1.0 if is_right else -1.0, is_right)
