"""A batch of episodes: what the environment said is read, and nothing is learned from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_update import groups, learner_of
from toy import recipe

from dapo.learner.batch import make_batch
from dapo.learner.update import update_policy
from dapo.models import policy as policy_module
from dapo.sampling.accounting import Accounting
from dapo.sampling.state import groups_from_state, groups_to_state
from dapo.trainer.step_metrics import episode_metrics
from dapo.types import EpisodeRecord, Group, Judgement, Verdict


def episodes(n: int) -> list[Group]:
    """Every third token is the environment's, and the last one too."""
    made = []
    for group in groups(n):
        own = [np.arange(len(c.tokens)) % 3 != 1 for c in group.completions]
        for mask in own:
            mask[-1:] = len(mask) == 1
        told = EpisodeRecord("7", Judgement(Verdict.WRONG, 0.5, graded=True), turns=2, calls=1, failures=1)
        completions = [replace(c, own=m, episode=told) for c, m in zip(group.completions, own, strict=True)]
        made.append(replace(group, completions=tuple(completions)))
    return made


def test_lengths_count_what_the_model_said_and_the_penalty_counts_all(tmp_path: Path):
    config = recipe(
        tmp_path,
        "limits.max_response_tokens=40",
        "shaping.overlong_penalty=1",
        "shaping.overlong_buffer_tokens=30",
    ).config
    made = episodes(3)
    batch, plain = make_batch(made, config, torch.float64), make_batch(groups(3), config, torch.float64)
    assert batch.lengths == [c.n_own for group in made for c in group.completions] < plain.lengths
    assert batch.advantage.lengths == batch.logp_engine.lengths == batch.lengths
    assert torch.equal(batch.overlong_penalty, plain.overlong_penalty)
    assert [batch.tokens(row) for row in range(12)] == [plain.tokens(row) for row in range(12)]
    accounting = Accounting()
    accounting.trained(made, filter_truncated=False)
    assert accounting.trained_tokens == sum(batch.lengths)


def test_failures_are_a_share_of_the_calls(tmp_path: Path):
    told = EpisodeRecord("7", None, turns=2, calls=4, failures=1)
    made = [
        replace(group, completions=tuple(replace(c, episode=told) for c in group.completions)) for group in episodes(2)
    ]
    batch = make_batch(made, recipe(tmp_path, "shaping.overlong_penalty=0").config, torch.float64)
    assert episode_metrics(batch) == {"episode/turns": 2, "episode/tool_calls": 4, "episode/tool_failures": 0.25}


def test_nothing_flows_back_into_the_prediction_of_what_the_environment_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Exactly 0: the states that its tokens would be drawn from have no part in the loss."""
    hidden_of, seen = policy_module.packed_hidden, []

    def watched(backbone: Any, packed: Any) -> Any:
        hidden = hidden_of(backbone, packed)
        if hidden.requires_grad:
            hidden.retain_grad()
            seen.append((hidden, packed))
        return hidden

    monkeypatch.setattr(policy_module, "packed_hidden", watched)
    config = recipe(tmp_path, "algorithm.entropy_coefficient=0.1", "train.updates_per_step=1").config
    learner = learner_of(torch.float64)
    batch = make_batch(episodes(2), config, torch.float64)
    update_policy(learner, batch, config, step=1)
    for hidden, packed in seen:
        is_asked = torch.zeros(len(hidden), dtype=torch.bool)
        is_asked[packed.target_index] = True
        assert (hidden.grad[~is_asked] == 0).all()
        assert (hidden.grad[is_asked].abs().amax(dim=-1) > 0).any()
    said = sum(len(tokens) for tokens in batch.responses)
    assert sum(packed.n_targets for _, packed in seen) == sum(batch.lengths) < said


def test_an_episode_in_a_checkpoint_is_the_same_when_it_is_read():
    made = episodes(2)
    state, tensors = groups_to_state(made, "held")
    again = groups_from_state(state, tensors, {group.problem.id: group.problem for group in made}, "held")
    for group, other in zip(made, again, strict=True):
        for one, two in zip(group.completions, other.completions, strict=True):
            assert np.array_equal(one.own, two.own)
            assert one.episode == two.episode
