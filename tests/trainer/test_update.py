"""One update: the same gradient for every micro-batch budget, in float32 too; what its metrics say."""

from pathlib import Path

import numpy as np
import pytest
import torch
from toy import recipe

from dapo.config.schema import Config
from dapo.trainer.batch import Batch, deal_microbatches, make_batch
from dapo.trainer.optimizer import Optimizer
from dapo.trainer.update import Learner, Sums, Totals, microbatch_loss, score_old, update_policy
from dapo.types import Completion, Group, Judgement, Problem, StopReason, Verdict
from tiny_models import tiny_policy


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return recipe(tmp_path_factory.mktemp("update")).config


def groups(n: int, G: int = 4) -> list[Group]:
    """Random responses of 1 to 40 tokens, right and wrong in turn."""
    generator = np.random.default_rng(0)
    made = []
    for p in range(n):
        completions = tuple(
            Completion(
                generator.integers(3, 40, length).astype(np.int32),
                np.zeros(length, np.float32),
                np.zeros(length, np.int32),
                StopReason.EOS,
                "",
            )
            for length in generator.integers(1, 41, G)
        )
        judgements = tuple(
            Judgement(Verdict.CORRECT if i % 2 else Verdict.WRONG, 1.0 if i % 2 else -1.0) for i in range(G)
        )
        made.append(Group(Problem(str(p), "", ""), 0, (5, 6, 7), completions, judgements))
    return made


def learner_of(dtype: torch.dtype) -> Learner:
    policy = tiny_policy("llama", dtype=dtype)
    optimizer = Optimizer(policy.named_parameters(), betas=(0.9, 0.999), weight_decay=0.0, grad_clip=1.0)
    return Learner(policy, optimizer)


def gradient(learner: Learner, batch: Batch, config: Config, budget: int) -> torch.Tensor:
    rows = list(range(len(batch.lengths)))
    learner.policy.zero_grad()
    for micro in deal_microbatches(batch, rows, budget):
        microbatch_loss(learner, batch, micro, Totals.of(batch, rows), config, Sums(), None).backward()
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("mean", ["token", "sequence", "prompt", "constant"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_the_gradient_does_not_depend_on_the_budget(config: Config, mean: str, dtype: torch.dtype, tolerance: float):
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"mean": mean})})
    learner = learner_of(dtype)
    batch = make_batch(groups(12), config, dtype)
    score_old(learner, batch, config)
    with torch.no_grad():  # off policy, so that ratios and clips are at work
        for parameter in learner.policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    whole = gradient(learner, batch, config, 16_384)
    for budget in (1, 64, 512, 2_048):
        assert float((gradient(learner, batch, config, budget) - whole).norm() / whole.norm()) < tolerance


def test_an_update_raises_right_and_lowers_wrong_responses(config: Config):
    learner = learner_of(torch.float64)
    batch = make_batch(groups(4), config, torch.float64)
    score_old(learner, batch, config)
    before = [float(batch.logp_old.row(row).sum()) for row in range(len(batch.lengths))]
    metrics = update_policy(learner, batch, config, step=2)
    assert metrics["updates"] == 2
    score_old(learner, batch, config)
    moved = np.array([float(batch.logp_old.row(row).sum()) - before[row] for row in range(len(before))])
    right = batch.is_correct.numpy()
    assert moved[right].mean() > 0 > moved[~right].mean()


def test_on_policy_the_first_update_clips_nothing(config: Config, tmp_path: Path):  # noqa: ARG001
    one = config.model_copy(update={"train": config.train.model_copy(update={"updates_per_step": 1})})
    metrics = update_policy(learner_of(torch.float64), make_batch(groups(4), one, torch.float64), one, step=1)
    assert (metrics["clip/low"], metrics["clip/high"], metrics["clip/dual"]) == (0, 0, 0)
    assert metrics["policy/kl_old"] == pytest.approx(0, abs=1e-12)


def test_bypass_still_measures_the_gap_to_the_engine(config: Config):
    bypass = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"old_logp": "bypass"})})
    metrics = update_policy(learner_of(torch.float64), make_batch(groups(2), bypass, torch.float64), bypass, step=1)
    assert metrics["engine/gap_mean"] > 0.1  # the made-up engine said log-prob 0 of every token


def test_a_non_finite_loss_is_skipped_counted_and_bounded(config: Config):
    from dapo.errors import EngineError

    learner = learner_of(torch.float64)
    before = [p.detach().clone() for p in learner.policy.parameters()]
    batch = make_batch(groups(4), config, torch.float64)
    batch.advantage.flat.fill_(float("nan"))
    metrics = update_policy(learner, batch, config, step=1)
    assert (metrics["updates"], metrics["policy/skipped_updates"]) == (0, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))
    with pytest.raises(EngineError, match="4 updates in a row"):
        update_policy(learner, batch, config, step=2)
