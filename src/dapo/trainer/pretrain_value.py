"""Value pretraining (VAPO): the critic learns Monte-Carlo returns of the fixed policy before the policy moves."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dapo.algorithms.regression import RidgeSums, ridge
from dapo.config.schema import Config, SamplingConfig
from dapo.distributed.shards import reshard
from dapo.learner.batch import make_batch, split_into_updates
from dapo.learner.critic import FOLDS, HeldOutFit, Values, apply_gae, has_stopped_rising, latest_fit
from dapo.learner.forward_passes import old_critic_values
from dapo.learner.memory import fit_activations, within_memory
from dapo.learner.optimizer import warmup_factor
from dapo.learner.ragged import Ragged
from dapo.learner.step import Step
from dapo.learner.update import update_critic
from dapo.report.ledger import VALUE_LEDGER, ledger_line
from dapo.sampling.dynamic import SamplingState
from dapo.sampling.groups import sample_groups
from dapo.tracking.metrics import finite
from dapo.trainer.checkpoint import save_run
from dapo.trainer.faults import UNTRAINED, report_faults
from dapo.trainer.interrupt import check_stop
from dapo.trainer.run import Run

WARMUP_FRACTION = 0.25  # of the stage's steps at most: a short stage would end before its rate has risen


def pretrain_value(run: Run) -> None:
    """Fit the critic to unfiltered responses of the fixed policy, until its fit to new problems stops improving.

    The critic predicts the returns of each step before it trains on them. Problems that come for the first time are
    held-out data until then. A resumed run continues after the last pretraining step of its checkpoint.
    """
    sampling, before = pretraining_of(run), run.value_steps
    with responses_per_prompt(run, sampling.responses_per_prompt):
        for number in run.remaining_value_steps():
            value_step(run, number, sampling)
    if run.value_steps > before and not run.is_pretraining:  # else there was none, or the budget is spent
        run.event("critic", outcome_of(run, sampling))


def outcome_of(run: Run, sampling: SamplingConfig) -> str:
    """How well the critic predicts after the stage, and why the stage ended."""
    n_responses = run.value_steps * sampling.prompts_per_step * sampling.responses_per_prompt
    known = latest_fit(run.held_out_fits) or sum(run.held_out_fits[1:], run.held_out_fits[0])
    if has_stopped_rising(run.held_out_fits):
        end = "no longer rising"
    elif run.value_steps < run.pretrain_steps:
        end = "and every problem was seen"
    else:
        end = "and algorithm.critic.pretrain_responses is used up"
    return (
        f"value pretraining ended after {run.value_steps} steps, {n_responses:,} responses: explained variance on new "
        f"problems {known.explained.variance:+.2f} (the last steps together), {end}"
    )


def value_step(run: Run, number: int, sampling: SamplingConfig) -> None:
    start = time.perf_counter()
    run.begin_step()
    n_before = run.ordered.n_submitted
    sampled = sample_groups(
        run.collector,
        run.source,
        sampling,
        SamplingState(),
        version=run.version,
        filter_truncated=False,
        max_prompts_tried=sampling.prompts_per_step,
        progress=run.on_groups,
    )
    report_faults(run, run.engine, f"step {number} of value pretraining", remedy=UNTRAINED)
    config = run.config
    batch = make_batch(sampled.groups, unfiltered(config), run.policy.dtype)
    update_rows = split_into_updates(batch, config, step=-number, epochs=config.algorithm.critic.pretrain_epochs)
    most = math.ceil(WARMUP_FRACTION * run.pretrain_steps)
    lr = warmup_factor(config.train, number, most=most) * config.critic_lr
    step = Step(run.learner, batch, config, update_rows, critic_lr=lr, event=run.event)
    fit_activations(step)
    step.values = monte_carlo(step)
    new = [g for g, group in enumerate(batch.groups) if group.visit == 0]
    fit = HeldOutFit.of(step.values, batch.loss_rows(new), len(new))
    if any(update_rows) and not any(
        known.explained.tokens for known in run.held_out_fits
    ):  # the first step with responses
        fit_head(step, step.values.outcome)
        step.values = monte_carlo(step)
    for rows in update_rows:
        if rows:
            update_critic(step, rows)
    batch.packs.clear()
    run.end_value_step(number, fit)
    for message in sampled.events:
        run.event("sampling", message)
    sums = step.sums.across(run.world)
    is_trained = sums.total("critic_updates") > 0
    line = finite(
        {
            "step": number,
            "critic/loss": sums.ratio("critic_loss", "critic_updates") if is_trained else math.nan,
            "critic/explained_variance": fit.explained.variance if fit.problems else math.nan,
            "tokens/generated": sampled.accounting.generated_tokens,
            "timing.step_s": time.perf_counter() - start,
        }
    )
    run.write_line(VALUE_LEDGER, ledger_line(number, sampled.entries, (n_before, run.ordered.n_submitted)))
    run.write_line("value.jsonl", line)
    run.budget.spend(line)
    run.tell(lambda observer: observer.on_value_step(line, run.pretrain_steps))
    if run.budget.is_spent:
        run.event("budget", run.budget.spent)
    check_stop(run)
    if run.is_due(config.checkpoint.every_steps, number):
        save_run(run)


def pretraining_of(run: Run) -> SamplingConfig:
    """As many responses per step as in training, but each to another problem: the critic is to learn difficulty.

    Several to each where there are fewer problems than that, and in a control experiment, which shuffles groups.
    """
    sampling, n_responses = run.config.sampling, run.config.responses_per_step
    each = -(-n_responses // len(run.problems.by_id))
    if run.config.rewards.control != "none":
        each = sampling.responses_per_prompt
    update = {"dynamic": False, "responses_per_prompt": each, "prompts_per_step": n_responses // each}
    return sampling.model_copy(update=update)


@contextmanager
def responses_per_prompt(run: Run, each: int) -> Iterator[None]:
    usual = run.collector.responses_per_prompt
    run.collector.responses_per_prompt = each
    try:
        yield
    finally:
        run.collector.responses_per_prompt = usual


def fit_head(step: Step, outcome: Ragged) -> None:
    """Set the value head to the closed-form ridge fit of the outcomes, while the backbone still is the policy's."""
    learner, batch, critic = step.learner, step.batch, step.learner.critic
    assert critic is not None, "only a critic has a head"
    rows = batch.loss_rows()
    device = critic.model.device
    exact = "cpu" if device.type == "mps" else device  # where there is float64

    def accumulate(budget: int) -> RidgeSums:
        sums = RidgeSums.empty(FOLDS, critic.model.value_head.in_features + 1, exact)
        for micro in learner.microbatches(batch, rows, budget):
            with torch.no_grad():
                x = critic.model(batch.packed(micro.rows, device), features_only=True)
            if not micro.is_dummy:
                x = torch.nn.functional.pad(x, (0, 1), value=1.0).to(exact)
                y = outcome.joined(micro.rows, exact)
                fold = [fold_of(batch.groups[int(batch.group[row])].problem.id) for row in micro.rows]
                lengths = torch.tensor([batch.lengths[row] for row in micro.rows])
                sums.add(x, y, torch.repeat_interleave(torch.tensor(fold), lengths).to(exact))
        return sums

    sums = within_memory(step, rows, accumulate)
    learner.world.sum_([sums.gram, sums.moment, sums.square])
    weights = ridge(sums).to(critic.model.dtype).to(device)
    optimizer = critic.optimizer
    for name, head in (("value_head.weight", weights[None, :-1]), ("value_head.bias", weights[-1:])):
        optimizer.assign(name, optimizer.part_of(name, head.contiguous()))
    reshard(critic.model)  # else the next pass would run with the head that this one gathered


def fold_of(problem_id: str) -> int:
    return hashlib.blake2b(problem_id.encode(), digest_size=1).digest()[0] % FOLDS


def unfiltered(config: Config) -> Config:
    """Train the critic on truncated responses too: they also are the fixed policy's."""
    shaping = config.shaping.model_copy(update={"overlong_filter": False})
    return config.model_copy(update={"shaping": shaping})


def monte_carlo(step: Step) -> Values:
    """Old values, and returns with λ = 1 as targets, whatever the policy's λ."""
    gae = step.config.algorithm.gae.model_copy(update={"lam_critic": 1.0, "whiten": False})
    algorithm = step.config.algorithm.model_copy(update={"gae": gae})
    return apply_gae(step.batch, step.config.model_copy(update={"algorithm": algorithm}), old_critic_values(step))
