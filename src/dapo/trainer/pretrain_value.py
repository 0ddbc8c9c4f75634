"""Value pretraining (VAPO): the critic learns Monte-Carlo returns of the fixed policy before the policy moves."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence

from dapo.config.schema import Config
from dapo.sampling.carry import CarryState
from dapo.sampling.dynamic import fill_step
from dapo.tracking.metrics import finite
from dapo.trainer.batch import Batch, deal_minibatches, make_batch
from dapo.trainer.checkpoint import save_run
from dapo.trainer.faults import UNTRAINED, report_faults
from dapo.trainer.interrupt import check_stop
from dapo.trainer.memory import fit_activations
from dapo.trainer.run import Run
from dapo.trainer.scoring import old_values_of_critic
from dapo.trainer.sums import Sums
from dapo.trainer.update import update_critic
from dapo.trainer.value import Values, estimate_advantages, explained_variance_of

HELD_OUT_SHARE = 8  # one problem in eight is never trained on here, so that explained variance means something


def pretrain_value(run: Run) -> None:
    """Sample from the fixed policy without any filter, fit the critic, measure it on held-out problems.

    Goes on after the last step of the stage that a checkpoint holds.
    """
    sampling = run.config.sampling.model_copy(update={"dynamic": False})
    for step in run.remaining_value_steps():
        start = time.perf_counter()
        run.begin_step()
        filled = fill_step(
            run.collector,
            run.source,
            sampling,
            CarryState(),
            filter_truncated=False,
            max_prompts_tried=sampling.prompts_per_step,
            progress=run.on_fill,
        )
        report_faults(run, run.engine, f"step {step} of value pretraining", remedy=UNTRAINED)
        batch = make_batch(filled.groups, unfiltered(run.config), run.policy.dtype)
        if run.config.train.gradient_checkpointing == "auto" and batch.lengths:
            fit_activations(run.learner, batch, run.config)
        held_out = [g for g, group in enumerate(batch.groups) if is_held_out(group.problem.id)]
        deals = [
            in_loss(batch, [g for g in groups if g not in held_out])
            for groups in deal_minibatches(
                len(batch.groups), run.config.train.updates_per_step, seed=run.config.train.seed, step=-step, epoch=0
            )
        ]
        values, measured = monte_carlo(run, batch, deals), in_loss(batch, held_out)
        sums = Sums()
        for rows in deals:
            if rows:
                update_critic(run.learner, batch, values, rows, run.config, sums, run.event)
        batch.packs.clear()
        run.end_value_step(step)
        for message in filled.events:
            run.event("fill", message)
        sums = sums.across(run.world)
        is_taught = sums.total("critic_updates") > 0
        line = finite(
            {
                "step": step,
                "critic/loss": sums.ratio("critic_loss", "critic_updates") if is_taught else math.nan,
                "critic/explained_variance": explained_variance_of(values, measured) if measured else math.nan,
                "tokens/generated": filled.accounting.generated_tokens,
                "timing.step_s": time.perf_counter() - start,
            }
        )
        run.write_line("value.jsonl", line)
        run.budget.spend(line)
        for observer in run.observers:
            observer.on_value_step(line, run.pretrain_steps)
        if run.budget.is_spent:
            run.event("budget", run.budget.spent)
        check_stop(run)
        if run.is_due(run.config.checkpoint.every_steps, step):
            save_run(run)


def unfiltered(config: Config) -> Config:
    """Truncated responses are the fixed policy's too: only those that the engine gave up teach nothing."""
    shaping = config.shaping.model_copy(update={"overlong_filter": False})
    return config.model_copy(update={"shaping": shaping})


def in_loss(batch: Batch, groups: Sequence[int]) -> list[int]:
    return [row for row in batch.rows_of(groups) if batch.is_in_loss[row]]


def monte_carlo(run: Run, batch: Batch, deals: Sequence[Sequence[int]]) -> Values:
    """Old values, and returns with λ = 1 as targets, whatever the policy's λ."""
    assert run.learner.value is not None, "only a critic is pretrained"
    gae = run.config.algorithm.gae.model_copy(update={"lam_critic": 1.0, "whiten": False})
    algorithm = run.config.algorithm.model_copy(update={"gae": gae})
    old = old_values_of_critic(run.learner, run.learner.value, batch, run.config, run.event, deals=deals)
    return estimate_advantages(batch, run.config.model_copy(update={"algorithm": algorithm}), old)


def is_held_out(problem_id: str) -> bool:
    return hashlib.blake2b(problem_id.encode(), digest_size=1).digest()[0] % HELD_OUT_SHARE == 0
