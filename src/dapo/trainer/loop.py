"""The training loop."""

from __future__ import annotations

from dapo.checkpoints.save import name_of
from dapo.errors import VerifierStopped, WaitedTooLong
from dapo.learner.batch import make_batch, why_rft_has_no_loss
from dapo.learner.update import update_policy
from dapo.report.ledger import LEDGER, ledger_line
from dapo.sampling.groups import sample_step
from dapo.trainer.checkpoint import best_checkpoint, finish_saving, save_run
from dapo.trainer.evaluate import evaluate_run
from dapo.trainer.faults import report_faults
from dapo.trainer.interrupt import Interrupted, stop_on_signals
from dapo.trainer.pretrain_value import pretrain_value
from dapo.trainer.records import begin_record, write_record
from dapo.trainer.run import Run
from dapo.trainer.step_metrics import selection_metrics, step_metrics


def train(run: Run) -> None:
    """Each step: sample groups, verify them, compute advantages, update, hand the weights to the engine."""
    stopped: VerifierStopped | WaitedTooLong | None = None
    with stop_on_signals(run):
        try:
            if run.evaluation_is_due():  # the initial evaluation, or one that a signal cut short
                evaluate_run(run)
            pretrain_value(run)
            save_run(run)  # not if this very checkpoint is there already, or none can be resumed
            for step in run.remaining_steps():
                train_step(run, step)
        except Interrupted:
            run.roll_back_step()
        except (VerifierStopped, WaitedTooLong) as error:  # checkpoint and stop, then raise it
            stopped = error
            run.roll_back_step()
        if run.saved or run.step or run.value_steps:  # else there is nothing to save: it starts from scratch
            save_run(run)
        finish_saving(run)
    if stopped is not None:
        run.event("judge" if isinstance(stopped, VerifierStopped) else "wait", stopped.message)
        raise stopped
    run.tell(lambda observer: observer.on_end(run))


def train_step(run: Run, step: int) -> None:
    """One step; an interruption while it samples rolls it back."""
    run.begin_step()
    n_before = run.ordered.n_submitted
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
    if message := why_rft_has_no_loss(batch, run.config):
        run.event("reward", message)
    if run.is_recorded(step, sampled.accounting.generated_tokens):
        write_record(run, step, sampled, batch, record)
    run.write_line(LEDGER, ledger_line(step, sampled.entries, (n_before, run.ordered.n_submitted)))
    metrics = step_metrics(step, sampled, batch, version) | updated
    metrics |= selection_metrics(run.config, run.posteriors, [one.name for one in run.problems.sources], sampled)
    run.track(metrics | {"engine/faults": faults} | run.drafts() | run.timing(sampled))
    is_due = run.is_due(run.config.checkpoint.every_steps, step)
    if run.evaluation_is_due():
        evaluate_run(run)
        is_due = is_due or best_checkpoint(run) == name_of(step)
    if is_due:
        save_run(run)
