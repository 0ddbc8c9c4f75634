"""When value pretraining ends: by what the critic knew of new problems, step by step."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy import recipe

from dapo.algorithms.diagnostics import ExplainedSums
from dapo.config.schema import SamplingConfig
from dapo.learner.critic import HeldOutFit, Values, explained_variance_of, has_stopped_rising, latest_fit
from dapo.learner.ragged import Ragged
from dapo.trainer.pretrain_value import FOLDS, fold_of, outcome_of, pretraining_of
from dapo.trainer.start import start_run


def fit(explained: float, problems: int = 100) -> HeldOutFit:
    """Outcomes of mean 0 and variance 1, of which so much is explained."""
    return HeldOutFit(problems, ExplainedSums(1000, 0.0, 1000.0, 0.0, 1000.0 * (1 - explained)))


def values_of(old: torch.Tensor, outcome: torch.Tensor, lengths: list[int]) -> Values:
    ragged = [Ragged(lengths, torch.float64) for _ in range(2)]
    ragged[0].flat, ragged[1].flat = old, outcome
    return Values(ragged[0], ragged[0], ragged[1])


RESPONSES = "algorithm.critic.pretrain_responses=40"  # 16 in a step


@pytest.mark.parametrize(
    ("keys", "steps", "each"),
    [
        ([RESPONSES], 3, 1),
        ([RESPONSES, "rewards.control=shuffled"], 3, 4),  # one response to a problem cannot be shuffled
        (["algorithm.critic.path=FOLDER/model"], 0, 1),  # it has been pretrained
    ],
)
def test_how_many_steps_it_has_and_how_many_responses_to_a_problem(
    tmp_path: Path, keys: list[str], steps: int, each: int
):
    named = [key.replace("FOLDER", str(tmp_path)) for key in keys]
    run = start_run(recipe(tmp_path, "preset=vapo", *named), tmp_path / "run")
    run.close()
    sampling = pretraining_of(run)
    assert (run.pretrain_steps, sampling.responses_per_prompt, sampling.prompts_per_step) == (steps, each, 16 // each)


def test_sums_of_steps_explain_what_their_tokens_would_together():
    draw = torch.Generator().manual_seed(0)
    old, outcome = (torch.randn(30, generator=draw, dtype=torch.float64) for _ in range(2))
    outcome += 0.7 * old + 1
    values = values_of(old, outcome, [10, 5, 15])
    parts = HeldOutFit.of(values, [0], 1) + HeldOutFit.of(values, [1, 2], 2) + HeldOutFit.of(values, [], 0)
    assert (parts.problems, parts.explained.tokens) == (3, 30)
    assert abs(parts.explained.variance - float(1 - (outcome - old).var() / outcome.var())) < 1e-12
    assert HeldOutFit.of(values, [], 0).explained.variance == 0


def test_it_goes_on_while_three_steps_know_more_than_the_three_before():
    rising = [fit(0.05 * k) for k in range(6)]
    assert not has_stopped_rising(rising[:5])  # too early to say
    assert not has_stopped_rising(rising)
    assert has_stopped_rising([*rising, *(fit(0.2) for _ in range(3))])  # 0.2 after 0.2
    assert not has_stopped_rising([*rising, *(fit(0.2151) for _ in range(3))])
    lucky = [fit(x) for x in (0.0, 0.09, 0.15, 0.25, 0.13, 0.20)]  # one good step is no peak
    assert not has_stopped_rising(lucky)
    assert has_stopped_rising([*lucky, *(fit(x) for x in (0.19, 0.19, 0.20))])


def test_fewer_than_a_hundred_problems_are_not_enough():
    few = [fit(0.1, problems=20) for _ in range(20)]
    pooled = latest_fit(few)
    assert pooled is not None
    assert pooled.problems == 100
    assert latest_fit(few[:4]) is None
    assert not has_stopped_rising(few[:7])  # five now, four before
    assert has_stopped_rising(few[:8])
    assert not has_stopped_rising([fit(0.1, problems=0)] * 20)


def test_a_saved_fit_is_the_same():
    assert HeldOutFit.restore(asdict(fit(0.3, problems=7))) == fit(0.3, problems=7)


def ended(fits: list[HeldOutFit], *, steps: int, planned: int) -> str:
    run: Any = SimpleNamespace(value_steps=steps, pretrain_steps=planned, held_out_fits=fits)
    return outcome_of(run, SamplingConfig(prompts_per_step=50, responses_per_prompt=4))


def test_the_end_is_told_with_its_responses_its_fit_and_its_reason():
    few = [fit(0.1, problems=20), fit(0.2, problems=20), fit(0.6, problems=20)]  # all of them together: 0.3
    assert ended(few, steps=3, planned=3) == (
        "value pretraining ended after 3 steps, 600 responses: explained variance on new problems +0.30 "
        "(the last steps together), and algorithm.critic.pretrain_responses is used up"
    )
    assert ended(few, steps=3, planned=4).endswith("+0.30 (the last steps together), and every problem was seen")
    assert ended([fit(0.4)] * 6, steps=6, planned=9).endswith("+0.40 (the last steps together), no longer rising")


def test_of_no_rows_nothing_is_explained():
    assert explained_variance_of(values_of(torch.ones(2), torch.ones(2), [2]), []) == 0


def test_problems_are_spread_over_the_folds_of_the_heads_fit_whatever_their_names():
    of_problems = [fold_of(f"problem-{i}") for i in range(400)]
    assert of_problems == [fold_of(f"problem-{i}") for i in range(400)]
    assert [of_problems.count(fold) for fold in range(FOLDS)] == pytest.approx([400 / FOLDS] * FOLDS, rel=0.3)
