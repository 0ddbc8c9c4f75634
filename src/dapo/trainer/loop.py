"""The loop: the table of contents of the system."""

from __future__ import annotations

import time

from dapo.sampling.fill import fill
from dapo.trainer.batch import make_batch, nothing_to_imitate
from dapo.trainer.checkpoint import finish_saving, save_run
from dapo.trainer.evaluate import evaluate_run
from dapo.trainer.faults import report_faults
from dapo.trainer.interrupt import Interrupted, stop_on_signals
from dapo.trainer.pretrain_value import pretrain_value
from dapo.trainer.records import dropped_groups, new_record, write_rollouts
from dapo.trainer.run import Run
from dapo.trainer.step_metrics import step_metrics
from dapo.trainer.update import update_policy


def train(run: Run) -> None:
    """Each step: sample groups, score them, turn scores into advantages, update, publish the new weights."""
    with stop_on_signals(run):
        try:
            if run.evaluation_is_due():  # before training, or cut short by a signal
                evaluate_run(run)
            pretrain_value(run)
            save_run(run)  # a run that goes on has this checkpoint already
            for step in run.remaining_steps():
                train_step(run, step)
        except Interrupted:
            run.take_back_step()
        if run.saved or run.step or run.value_steps:  # stopped before anything was learnt, a run simply starts over
            save_run(run)
        finish_saving(run)
    for observer in run.observers:
        observer.on_end(run)


def train_step(run: Run, step: int) -> None:
    config = run.config
    start = time.perf_counter()
    run.begin_step()
    version = run.collector.journal.version = run.learner.updates
    filled = fill(run.collector, run.source, config, run.fill, version=version, progress=run.on_fill)
    sampled = time.perf_counter()
    faults = report_faults(run, run.engine, f"step {step}")
    batch = make_batch(filled.groups, config, run.policy.dtype)
    is_recorded = run.is_recorded(step, filled.accounting.generated_tokens)
    record = new_record(batch) if is_recorded and filled.groups else None
    learnt = update_policy(
        run.learner, batch, config, step=step, record=record, progress=run.on_update, event=run.event
    )
    run.publish()

    run.end_step(step, filled.resolved)
    for message in filled.events:
        run.event("fill", message)
    if message := nothing_to_imitate(batch, config):
        run.event("reward", message)
    if is_recorded and run.world.is_first:
        path = run.folder / "rollouts" / f"step-{step:06d}.parquet"
        dropped = make_batch(dropped_groups(filled), config, run.policy.dtype)
        if problem := write_rollouts(path, step, batch, record, dropped, run.token_pieces):
            run.event("rollouts", problem)
    learnt["engine/faults"] = faults
    took = time.perf_counter() - start
    timing = {
        "timing.sampling_s": sampled - start,
        "timing.step_s": took,
        "timing.tokens_per_s": filled.accounting.generated_tokens / took,
    }
    run.track(step_metrics(step, filled, batch, version) | learnt | timing)
    if run.evaluation_is_due():
        evaluate_run(run)
    if run.is_due(config.checkpoint.every_steps, step):
        save_run(run)
