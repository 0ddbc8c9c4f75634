"""Resume a run: find its checkpoint, refuse unsafe changes, drop the lines written after the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapo.checkpoints.load import Checkpoint, newest_intact, read_checkpoint
from dapo.config.keys import refuse_unknown
from dapo.config.load import flatten, read_toml, resolve, to_toml, with_changes
from dapo.config.model_shapes import model_location
from dapo.config.renamed import in_todays_keys
from dapo.config.schema import Config
from dapo.config.toml_text import with_run_format
from dapo.distributed.world import ALONE, World
from dapo.errors import CheckpointError, ConfigError
from dapo.files import cut_back, read_lines, replace_file
from dapo.report.ledger import LEDGER, VALUE_LEDGER
from dapo.report.rollouts.recorded import drop_after
from dapo.trainer.assemble import assemble
from dapo.trainer.checkpoint import restore_run
from dapo.trainer.claim import claim
from dapo.trainer.observer import Observer
from dapo.trainer.run import Run
from dapo.trainer.trust import trust_run

# Keys that may change on resume: they decide what is written, when the run ends and how fast, not what it learns.
# train.steps only while the learning rate does not depend on it: `refuse_other_end`.
SAFE_TO_CHANGE = (
    "train.steps",
    "train.max_generated_tokens",
    "train.max_minutes",
    "train.tokens_per_microbatch",
    "train.gradient_checkpointing",
    "model.kernels",
    "model.gpu_memory_gib",
    "train.max_bad_updates",
    "train.max_wait_s",
    "checkpoint.",
    "eval.",
    "records.",
    "tracking.",
    "rewards.workers",
    "data.eval",
    "cluster.",
)


def resume_run(
    folder: Path,
    overrides: Sequence[tuple[str, Any]] = (),
    observers: Sequence[Observer] = (),
    *,
    world: World = ALONE,
) -> Run:
    """Continue from the newest intact checkpoint; without one, from the start."""
    config = read_run_config(folder, overrides)
    if world.is_first:
        claim(folder)
    newest, skipped = world.from_first(newest_intact_of(folder) if world.is_first else None)
    checkpoint = None if newest is None else read_checkpoint(Path(newest))
    if checkpoint is not None:
        refuse_model_alone(checkpoint)
        refuse_changes(config, checkpoint)
    from_base = checkpoint is None or config.model.lora.rank > 0
    path = model_location(config.model.path) if from_base or checkpoint is None else str(checkpoint.model_folder)
    critic = str(checkpoint.model_folder / "critic") if checkpoint is not None else None
    run = assemble(config, folder, path, observers, critic_path=critic, is_start=checkpoint is None, world=world)
    if checkpoint is not None:
        restore_run(run, checkpoint)
    kept = keep_lost_record(folder) if world.is_first and checkpoint is None else None
    if world.is_first:
        truncate_files(run, has_checkpoint=checkpoint is not None)
        if overrides:
            replace_file(folder / "config.toml", with_run_format(to_toml(config)))
        trust_run(folder, config)  # whoever resumes it has started it or passed --trust
    world.barrier()
    run.budget.spend(*read_lines(folder / "value.jsonl"), *read_lines(folder / "metrics.jsonl"))
    for message in skipped:
        run.event("checkpoint", message)
    if kept is not None:
        run.event("resume", kept)
    where = f" of value pretraining {run.value_steps}" if run.is_pretraining and run.value_steps else f" {run.step}"
    run.event("resume", f"resumed after step{where}")
    return run


def newest_intact_of(folder: Path) -> tuple[str | None, list[str]]:
    """The newest intact checkpoint, and why newer ones were skipped. Only the first rank hashes the files."""
    newest, skipped = newest_intact(folder / "checkpoints")
    return (None if newest is None else str(newest)), skipped


def keep_lost_record(folder: Path) -> str | None:
    """Keep the metrics of a run that starts over without an intact checkpoint; returns the message for the user."""
    metrics = folder / "metrics.jsonl"
    n_steps = sum(1 for _ in read_lines(metrics))
    if not n_steps:
        return None
    aside = folder / "metrics.lost.jsonl"
    replace_file(aside, metrics.read_text(encoding="utf-8", errors="replace"))
    return f"no intact checkpoint: the run starts over; the {n_steps} steps it had recorded are in {aside.name}"


def truncate_files(run: Run, *, has_checkpoint: bool) -> None:
    """Drop what was written after the checkpoint: the resumed run writes it again."""
    for name in ("metrics.jsonl", "eval.jsonl", "eval_problems.jsonl", "events.jsonl", LEDGER):
        cut_back(run.folder / name, run.step if has_checkpoint else -1)
    for name in ("value.jsonl", VALUE_LEDGER):
        cut_back(run.folder / name, run.value_steps)
    drop_after(run.folder / "rollouts", run.step)


def read_run_config(folder: Path, overrides: Sequence[tuple[str, Any]]) -> Config:
    path = folder / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{folder}: is not a run: it has no config.toml.", remedy="Name the folder of a run.")
    refuse_unknown(flatten(dict(overrides)), "--set")
    keys = with_changes(in_todays_keys(flatten(read_toml(path))), dict(overrides))
    refuse_unknown(keys, "config.toml")
    return resolve(folder.name, keys, {}).config


def refuse_model_alone(checkpoint: Checkpoint) -> None:
    if not checkpoint.state.get("resumable", True):
        raise CheckpointError(
            f"{checkpoint.folder}: holds the model alone (checkpoint.resumable = false): no run can resume from it.",
            remedy=f"Start a new run from that model: --set model.path={checkpoint.model_folder}",
        )


def refuse_changes(config: Config, checkpoint: Checkpoint) -> None:
    """A resumed run must be the same run: only keys in SAFE_TO_CHANGE may differ."""
    before, now = checkpoint.state["config"], flatten(config.model_dump(mode="json"))
    changed = [key for key in now if now[key] != before.get(key, now[key])]
    if "train.steps" in changed:
        refuse_other_end(config, checkpoint, before["train.steps"])
        refuse_past_end(config, checkpoint.step)
    unsafe = [key for key in changed if not key.startswith(SAFE_TO_CHANGE)]
    if unsafe:
        what = ", ".join(f"{key} = {now[key]} (was {before[key]})" for key in unsafe)
        raise ConfigError(
            f"{what}: cannot change in a run that is under way.",
            remedy="Start a new run. Safe to change on resume: "
            + ", ".join(key.rstrip(".") for key in SAFE_TO_CHANGE)
            + ".",
        )


def refuse_past_end(config: Config, done: int) -> None:
    """The config must not state fewer steps than the run has trained."""
    if config.train.steps < done:
        raise ConfigError(
            f"train.steps = {config.train.steps}: the run has trained {done} steps already.",
            remedy=f"Set {done} or more. Its model as it is: dapo export RUN --out DIR",
        )


def refuse_other_end(config: Config, checkpoint: Checkpoint, steps: int) -> None:
    """A decay is laid out over all steps of the run: with another number of them the past ones had the wrong rate."""
    train = config.train
    if train.lr_decay != "none":
        raise ConfigError(
            f"train.steps = {train.steps} (was {steps}): train.lr_decay = {train.lr_decay} falls towards 0 at "
            "train.steps, so the steps behind would have had another learning rate.",
            remedy=f"Go on without it; to end earlier, set train.max_minutes or train.max_generated_tokens; to train "
            f"longer, start a new run from this model: --set model.path={checkpoint.model_folder}",
        )
