"""The same recorded rollouts through TRL's GRPOTrainer and through our update, and what happens if a line is wrong."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dapo.algorithms import advantages, aggregate, losses, parts
from dapo.bench.parity.cases import CASES, Case
from dapo.bench.parity.command import SHIPPED, read_config
from dapo.bench.parity.replay import Gap, Replayed, compare, replay
from dapo.learner import batch, update
from dapo.types import StopReason

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    return replay(tmp_path_factory.mktemp("parity"), read_config(SHIPPED), sys.executable, peer_minutes=10)


def gap_of(replayed: Replayed, name: str) -> Gap:
    folder, case = next((folder, case) for folder, case in replayed.cases.items() if case.name == name)
    return compare(folder, case, replayed.steps)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_do_the_same_or_differ_as_told(replayed: Replayed, case: Case):
    gap = gap_of(replayed, case.name)
    assert gap.is_as_told, gap


def test_the_rollouts_have_everything_that_a_key_could_look_at(replayed: Replayed):
    for groups in replayed.steps:
        rewards = [{judgement.value for judgement in group.judgements} for group in groups]
        completions = [completion for group in groups for completion in group.completions]
        assert min(map(len, rewards)) == 1
        assert len({len(group.prompt_tokens) for group in groups}) == len(groups)
        assert len({len(completion.tokens) for completion in completions}) > 3
        assert {completion.stop_reason for completion in completions} == {StopReason.EOS, StopReason.LENGTH}
        assert any(group.is_graded and len(of_group) > 1 for group, of_group in zip(groups, rewards, strict=True))


def test_ratios_leave_the_clip(replayed: Replayed):
    assert gap_of(replayed, "dapo").clipped > 0.1


SURROGATE = losses.clipped_surrogate


def surrogate(**changes: Any) -> Callable[..., torch.Tensor]:
    return lambda *parts, **more: SURROGATE(*parts, **more | changes)


def turned(sign: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *parts, **more: -sign(*parts, **more)


# A case, and a line of ours that is wrong in it.
BROKEN: dict[str, tuple[str, Any, str, Any]] = {
    "the sign of the loss": ("dapo", losses, "clipped_surrogate", turned(SURROGATE)),
    "one clip for two": ("dapo", losses, "clipped_surrogate", surrogate(clip_high=0.2)),
    "no dual clip": ("delta", losses, "clipped_surrogate", surrogate(dual_clip=None)),
    "the sign of the KL term": ("beta", update, "kl_penalty", turned(losses.kl_penalty)),
    "k2 for k3": ("beta", update, "kl_penalty", lambda a, b, kind: losses.kl_penalty(a, b, kind="k2")),  # noqa: ARG005
    "a mean over one token less": (
        "dapo", update, "token_mean", lambda x, total_tokens: aggregate.token_mean(x, total_tokens=total_tokens - 1)
    ),
    "the population's std": (
        "grpo", batch, "group_advantage",
        lambda x, std, eps: advantages.group_advantage(x, std="population", eps=eps),  # noqa: ARG005
    ),
    "parts summed before they are normalized": (
        "normalize_then_sum, two rewards", batch, "normalize_then_sum",
        lambda x, w, std, eps: advantages.group_advantage(parts.weighted_sum(x, w), std=std, eps=eps),
    ),
    "no normalisation over the step": (
        "normalize_then_sum", batch, "normalize_then_sum",
        lambda x, w, std, eps: parts.normalized_contributions(x, w, std=std, eps=eps).sum(dim=0),
    ),
    "parts without their weights": (
        "two rewards", batch, "weighted_sum", lambda x, w: parts.weighted_sum(x, torch.ones_like(w)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_wrong_line_shows(replayed: Replayed, what: str, monkeypatch: pytest.MonkeyPatch):
    name, module, attribute, wrong = BROKEN[what]
    monkeypatch.setattr(module, attribute, wrong)
    assert not gap_of(replayed, name).is_equal
