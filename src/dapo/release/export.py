"""Export a run's checkpoint as a Hugging Face folder with a model card."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from dapo.checkpoints.load import newest_intact, read_state
from dapo.checkpoints.manifest import check_manifest
from dapo.checkpoints.save import ADAPTER, in_order, name_of, step_of
from dapo.commands import dapo_command
from dapo.errors import CheckpointError, ConfigError
from dapo.files import folder_written_aside, read_lines
from dapo.release.bundle import RECORD, write_record
from dapo.release.card import model_card
from dapo.report.load import is_evaluation
from dapo.trainer.resume import read_run_config

RECORD_NOTE = f"""
## The run

`{RECORD}/` holds its record: `config.toml` (`dapo train {RECORD}/config.toml` trains it again), metrics, evaluations,
recorded rollouts, `data.json` (which problems, by digest), `MANIFEST.json` (every file's SHA-256), and `report.html`,
which opens offline.
"""


@dataclass(frozen=True, slots=True)
class Exported:
    folder: Path
    step: int
    skipped: tuple[str, ...]  # newer checkpoints that are corrupt, by name


def export_run(
    run: Path, out: Path, *, step: int | None = None, is_bundle: bool = False, is_adapter: bool = False
) -> Exported:
    """Write the model of a checkpoint of `run`, the newest intact one by default, to the new folder `out`: all of it
    or nothing.

    `is_bundle` adds the run's record, with which the result can be looked into and made again. With `is_adapter` the
    LoRA adapter alone is written, in peft's format, instead of the model that it is merged into.
    """
    config = read_run_config(run, ())
    if is_adapter and not config.model.lora.rank:
        raise ConfigError(
            f"--adapter: {run} trained all weights (model.lora.rank = 0), so it has no adapter.",
            remedy="Leave --adapter out to export the model.",
        )
    refuse_existing(out)
    checkpoint, skipped = newest_intact(run / "checkpoints") if step is None else (checkpoint_of(run, step), [])
    if checkpoint is None:
        why = "; ".join(skipped) or "none was written yet"
        raise CheckpointError(
            f"{run}: this run has no intact checkpoint: {why}.",
            remedy=f"Resume it: {dapo_command('resume', run)}",
        )
    state, evaluations = read_state(checkpoint), list(filter(is_evaluation, read_lines(run / "eval.jsonl")))
    card = model_card(out.name, config, step_of(checkpoint), state, evaluations, is_adapter=is_adapter)
    source = checkpoint / "model" / ADAPTER if is_adapter else checkpoint / "model"
    if not source.is_dir():
        raise CheckpointError(
            f"--adapter: {checkpoint} is of an older version of dapo, which kept no adapter of its own.",
            remedy=f"Train one more step with this version: {dapo_command('resume', run)} --set train.steps=N",
        )
    if is_bundle:
        card += RECORD_NOTE
    try:
        with folder_written_aside(out, overwrite=False) as aside:
            # The critic of PPO and VAPO and the adapter have folders in the model's, which are not exported with it.
            shutil.copytree(source, aside, ignore=shutil.ignore_patterns("critic", ADAPTER), dirs_exist_ok=True)
            (aside / "README.md").write_text(card, encoding="utf-8")
            if is_bundle:
                write_record(run, aside, config, step=step_of(checkpoint), state=state, name=out.name)
    except OSError as error:
        raise CheckpointError(
            f"--out {out}: cannot be written: {reason(error)}.", remedy="Check the folder's permissions and the disk."
        ) from None
    return Exported(out, step_of(checkpoint), tuple(skipped))


def checkpoint_of(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / name_of(step)
    steps = [str(step_of(path)) for path in in_order(folder.parent) if path.name.startswith("step-")]
    if not folder.is_dir():
        named = f"Name one that is there: {', '.join(steps)}. Which are kept: checkpoint.keep, checkpoint.keep_best."
        raise CheckpointError(
            f"--step {step}: {run} has no checkpoint of {'that' if steps else 'any'} step.",
            remedy=named if steps else f"Resume it: {dapo_command('resume', run)}",
        )
    try:
        check_manifest(folder)
    except CheckpointError as error:
        raise CheckpointError(error.message, remedy="Name another step, or leave --step out.") from None
    return folder


def reason(error: OSError) -> str:
    """Why; of copying a folder, which lists every file, the first one's reason."""
    if isinstance(error, shutil.Error):
        _source, target, why = error.args[0][0]
        return f"{Path(target).name}: {str(why).partition(': ')[0]}"
    return error.strerror or str(error)


def refuse_existing(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"--out {out}: exists and is no folder.", remedy="Name a new folder.")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: exists already and is not empty.", remedy="Name a new folder.")
