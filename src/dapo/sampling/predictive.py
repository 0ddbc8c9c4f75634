"""Predictive selection (not the paper's algorithm): prefer problems whose past pass rate promises a mixed group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dapo.errors import ConfigError
from dapo.files import read_lines
from dapo.rollout.noise import uniform_of
from dapo.sampling.dynamic import ProblemSource, Submission
from dapo.types import Group

EXPLORATION_FLOOR = 0.1


def chance_mixed(a: float, b: float, G: int) -> float:
    """E[1 − p^G − (1−p)^G] for p ~ Beta(a, b): E[p^G] = Π_{i<G} (a+i)/(a+b+i)."""
    all_correct = all_wrong = 1.0
    for i in range(G):
        all_correct *= (a + i) / (a + b + i)
        all_wrong *= (b + i) / (a + b + i)
    return 1.0 - all_correct - all_wrong


def n_right(group: Group) -> int:
    """Responses that count as right; of graded ones, those above their group's mean: the advantage is positive.

    So a graded group counts as mixed exactly if its values differ, and as all wrong if they are equal.
    """
    return n_above_mean([judgement.value for judgement in group.judgements]) if group.is_graded else group.n_correct


def n_above_mean(values: Sequence[float]) -> int:
    """0 where all are equal, whatever rounding makes of their mean."""
    return sum(value > sum(values) / len(values) for value in values) if len(set(values)) > 1 else 0


@dataclass(slots=True)
class Posteriors:
    """Beta(1 + right, 1 + wrong) per problem, from complete groups only; old counts decay, since the policy changes."""

    decay: float = 0.5  # weight of all that was seen before, at each new visit
    counts: dict[str, tuple[float, float]] = field(default_factory=dict)

    def observe(self, group: Group) -> None:
        right, wrong = self.counts.get(group.problem.id, (0.0, 0.0))
        n = n_right(group)
        self.counts[group.problem.id] = (
            self.decay * right + n,
            self.decay * wrong + len(group.judgements) - n,
        )

    def chance(self, problem: str, G: int) -> float:
        right, wrong = self.counts.get(problem, (0.0, 0.0))
        return chance_mixed(1 + right, 1 + wrong, G)

    def to_state(self) -> dict[str, list[float]]:
        return {problem: list(counts) for problem, counts in self.counts.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, list[float]]) -> Posteriors:
        return cls(counts={problem: (right, wrong) for problem, (right, wrong) in state.items()})


def counts_in(path: Path) -> dict[str, tuple[float, float]]:
    """(right, wrong) per problem from a file of `dapo data probe --out`: what predictive selection may start from."""
    if not path.is_file():
        raise ConfigError(
            f"sampling.posteriors = {path}: no such file.", remedy="Make it: dapo data probe FILE --model M --out PATH."
        )
    counts: dict[str, tuple[float, float]] = {}
    for line in read_lines(path):
        problem, n, correct = line.get("id"), line.get("n"), line.get("correct")
        if not (isinstance(problem, str) and isinstance(n, int) and isinstance(correct, int) and 0 <= correct <= n):
            raise ConfigError(
                f"sampling.posteriors = {path}: line {len(counts) + 1} has no id, n and correct.",
                remedy="Name a file that `dapo data probe --out` wrote.",
            )
        counts[problem] = (float(correct), float(n - correct))
    return counts


class PredictiveSource:
    """Passes a problem on with the probability that its group will be mixed, never less than the exploration floor.

    Whether a visit is passed on is fixed by (seed, problem, visit). What was passed over comes after everything else of
    the step, so that a small set never runs dry. Posteriors change between steps only.
    """

    def __init__(self, base: ProblemSource, posteriors: Posteriors, *, G: int, seed: int) -> None:
        self.base = base
        self.posteriors = posteriors
        self.G = G
        self.seed = seed
        self._passed_over: list[Submission] = []
        self._drawn = 0  # from the base source, this step
        self._drawn_at: list[int] = []  # that count at each submission

    def start_step(self) -> None:
        self.base.start_step()
        self._passed_over, self._drawn, self._drawn_at = [], 0, []

    def next(self) -> Submission | None:
        while (came := self.base.next()) is not None:
            self._drawn += 1
            problem, visit, _ = came
            chance = max(EXPLORATION_FLOOR, self.posteriors.chance(problem.id, self.G))
            if uniform_of(f"{self.seed}/predictive/{problem.id}/{visit}") < chance:
                return self._submitted(came)
            self._passed_over.append(came)
        if not self._passed_over:
            return None
        best = max(self._passed_over, key=lambda came: self.posteriors.chance(came[0].id, self.G))
        self._passed_over.remove(best)
        return self._submitted(best)

    def rewind(self, n_used: int) -> None:
        """Back to just after the last submission used; what was passed over before it stays passed over."""
        self.base.rewind(self._drawn_at[n_used - 1] if n_used else 0)

    def _submitted(self, came: Submission) -> Submission:
        self._drawn_at.append(self._drawn)
        return came
