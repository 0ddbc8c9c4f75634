"""Selection by past pass rates (not the paper's algorithm): prefers likely mixed groups, retires solved problems."""

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

    def pass_rate(self, problem: str) -> float:
        """The posterior's mean; 1/2 for a problem never visited."""
        right, wrong = self.counts.get(problem, (0.0, 0.0))
        return (1 + right) / (2 + right + wrong)

    def is_solved(self, problem: str, above: float) -> bool:
        return self.pass_rate(problem) >= above

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


class Selection:
    """Passes some problems of a source on and others over; those come after everything else of the step.

    So a small set never runs dry. Whether a problem is passed on does not change while a step fills.
    """

    def __init__(self, base: ProblemSource) -> None:
        self.base = base
        self._passed_over: list[Submission] = []
        self._drawn = 0  # from the base source, this step
        self._drawn_at: list[int] = []  # that count at each submission

    def passes(self, came: Submission) -> bool:
        raise NotImplementedError

    def best(self, passed_over: Sequence[Submission]) -> Submission:
        """Which of those passed over comes first."""
        return passed_over[0]

    def start_step(self) -> None:
        self.base.start_step()
        self._passed_over, self._drawn, self._drawn_at = [], 0, []

    def next(self) -> Submission | None:
        while (came := self.base.next()) is not None:
            self._drawn += 1
            if self.passes(came):
                return self._submitted(came)
            self._passed_over.append(came)
        if not self._passed_over:
            return None
        best = self.best(self._passed_over)
        self._passed_over.remove(best)
        return self._submitted(best)

    def rewind(self, n_used: int) -> None:
        """Back to just after the last submission used; what was passed over before it stays passed over."""
        self.base.rewind(self._drawn_at[n_used - 1] if n_used else 0)

    def _submitted(self, came: Submission) -> Submission:
        self._drawn_at.append(self._drawn)
        return came


class PredictiveSource(Selection):
    """Passes a problem on with the probability that its group will be mixed, never less than the exploration floor.

    Whether a visit is passed on is fixed by (seed, problem, visit). Posteriors change between steps only.
    """

    def __init__(self, base: ProblemSource, posteriors: Posteriors, *, G: int, seed: int) -> None:
        super().__init__(base)
        self.posteriors = posteriors
        self.G = G
        self.seed = seed

    def passes(self, came: Submission) -> bool:
        problem, visit, _ = came
        chance = max(EXPLORATION_FLOOR, self.posteriors.chance(problem.id, self.G))
        return uniform_of(f"{self.seed}/predictive/{problem.id}/{visit}") < chance

    def best(self, passed_over: Sequence[Submission]) -> Submission:
        return max(passed_over, key=lambda came: self.posteriors.chance(came[0].id, self.G))


class RetiringSource(Selection):
    """Retires problems that are solved by now: those whose posterior pass rate is at or above a bound.

    ScaleRL (arXiv:2510.13786) drops prompts with a pass rate of 0.9 for good. Differs from it: the pass rate is that of
    the last visits, older ones count half each time, and where a step has nothing else left, retired ones come.
    """

    def __init__(self, base: ProblemSource, posteriors: Posteriors, *, above: float) -> None:
        super().__init__(base)
        self.posteriors = posteriors
        self.above = above

    def passes(self, came: Submission) -> bool:
        return not self.posteriors.is_solved(came[0].id, self.above)
