"""Where a step's tokens went: trained on, or wasted, and by which cause."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dapo.types import Group, StopReason

CAUSES = ("all_correct", "all_wrong", "all_equal", "surplus", "aborted", "truncated", "stale")


def outcome_of(group: Group) -> str:
    """Why a group is not mixed. Equal graded values are neither right nor wrong: their best is not known."""
    if group.is_graded:
        return "all_equal"
    return "all_correct" if group.n_correct else "all_wrong"


@dataclass(slots=True)
class Accounting:
    """Counts of one step. Every generated token is either trained on or wasted by exactly one cause."""

    prompts_tried: int = 0
    groups_resolved: int = 0
    groups_mixed: int = 0
    groups_all_correct: int = 0
    groups_all_wrong: int = 0
    groups_all_equal: int = 0  # graded
    groups_trained: int = 0
    responses_judged: int = 0
    responses_correct: int = 0
    responses_truncated: int = 0
    trained_tokens: int = 0
    groups_overtaken: int = 0  # left unfinished by the step
    groups_stale: int = 0  # dropped: a token was too old
    overtaken_responses: int = 0  # of mixed groups that an earlier step left unfinished: complete now, or dropped
    overtaken_tokens: int = 0
    wasted_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    ticks: int = 0

    @property
    def generated_tokens(self) -> int:
        return self.trained_tokens + sum(self.wasted_tokens.values())

    @property
    def acceptance(self) -> float:
        """Share of the resolved groups that are mixed."""
        return self.groups_mixed / self.groups_resolved if self.groups_resolved else 0.0

    @property
    def accuracy(self) -> float:
        """Accuracy over all judged responses of resolved groups, those not mixed included."""
        return self.responses_correct / self.responses_judged if self.responses_judged else 0.0

    @property
    def mixed_per_1000_tokens(self) -> float:
        return 1000 * self.groups_mixed / self.generated_tokens if self.generated_tokens else 0.0

    def resolved(self, group: Group) -> None:
        """Count a group whose verdicts are all known; one that is not mixed is waste."""
        self.groups_resolved += 1
        self.responses_judged += len(group.judgements)
        self.responses_correct += group.n_correct
        self.responses_truncated += sum(completion.is_truncated for completion in group.completions)
        if group.is_mixed:
            self.groups_mixed += 1
            return
        match outcome_of(group):
            case "all_correct":
                self.groups_all_correct += 1
            case "all_wrong":
                self.groups_all_wrong += 1
            case _:
                self.groups_all_equal += 1

    def overtaken(self, tokens: int, responses: int) -> None:
        """A group that an earlier step did not wait for: how long it became."""
        self.overtaken_tokens += tokens
        self.overtaken_responses += responses

    def wasted(self, group: Group) -> None:
        """Tokens of a group that is not mixed."""
        self.wasted_tokens[outcome_of(group)] += n_tokens(group)

    def trained(self, groups: Iterable[Group], *, filter_truncated: bool) -> None:
        """The step's groups; tokens of truncated responses that are filtered, or that the engine gave up, are waste."""
        for group in groups:
            self.groups_trained += 1
            for completion in group.completions:
                if completion.stop_reason is StopReason.ABORTED:
                    self.wasted_tokens["aborted"] += completion.n_own
                elif filter_truncated and completion.is_truncated:
                    self.wasted_tokens["truncated"] += completion.n_own
                else:
                    self.trained_tokens += completion.n_own


def n_tokens(group: Group) -> int:
    return sum(completion.n_own for completion in group.completions)
