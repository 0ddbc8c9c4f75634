"""The training loop."""

from __future__ import annotations

from dapo.errors import VerifierStopped
from dapo.learner.batch import make_batch, nothing_to_imitate
from dapo.learner.update import update_policy
from dapo.report.ledger import LEDGER, ledger_line
from dapo.sampling.groups import sample_step
from dapo.trainer.checkpoint import finish_saving, save_run
from dapo.trainer.evaluate import evaluate_run
from dapo.trainer.faults import report_faults
from dapo.trainer.interrupt import Interrupted, stop_on_signals
from dapo.trainer.pretrain_value import pretrain_value
from dapo.trainer.records import begin_record, write_record
from dapo.trainer.run import Run
from dapo.trainer.step_metrics import selection_metrics, step_metrics


def train(run: Run) -> None:
    """Each step: sample groups, verify them, compute advantages, update, hand the weights to the engine."""
    stopped: VerifierStopped | None = None
    with stop_on_signals(run):
        try:
            if run.evaluation_is_due():  # before training, or interrupted by a signal
                evaluate_run(run)
            pretrain_value(run)
            save_run(run)  # a resumed run has this checkpoint already
            for step in run.remaining_steps():
                train_step(run, step)
        except Interrupted:
            run.roll_back_step()
        except VerifierStopped as error:  # no verdicts for now: as if interrupted, and it says why
            stopped = error
            run.roll_back_step()
        if run.saved or run.step or run.value_steps:  # a run stopped before its first update starts over
            save_run(run)
        finish_saving(run)
    if stopped is not None:
        run.event("judge", stopped.message)
        raise stopped
    for observer in run.observers:
        observer.on_end(run)


def train_step(run: Run, step: int) -> None:
    """One step; until `end_step` it can be rolled back."""
    run.begin_step()
    sampled = sample_step(
        run.collector, run.source, run.config, run.sampling, version=run.version, progress=run.on_groups
    )
    faults = report_faults(run, run.engine, f"step {step}")
    batch = make_batch(sampled.groups, run.config, run.policy.dtype)
    record = begin_record(run, step, sampled, batch)
    version = run.version
    updated = update_policy(
        run.learner, batch, run.config, step=step, record=record, progress=run.on_update, event=run.event
    )
    run.publish()
    run.end_step(step, sampled)
    if message := nothing_to_imitate(batch, run.config):
        run.event("reward", message)
    if run.is_recorded(step, sampled.accounting.generated_tokens):
        write_record(run, step, sampled, batch, record)
    run.write_line(LEDGER, ledger_line(step, sampled.entries))
    metrics = step_metrics(step, sampled, batch, version) | updated
    metrics |= selection_metrics(run.config, run.posteriors, [one.name for one in run.problems.sources], sampled)
    run.track(metrics | {"engine/faults": faults} | run.timing(sampled))
    if run.evaluation_is_due():
        evaluate_run(run)
    if run.is_due(run.config.checkpoint.every_steps, step):
        save_run(run)
