"""A run's newest checkpoint as a plain Hugging Face folder, with a card that says where the model comes from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo import __version__
from dapo.checkpoints.load import newest_intact, read_state
from dapo.checkpoints.save import step_of, sync_tree
from dapo.config.load import flatten
from dapo.config.schema import Config
from dapo.errors import CheckpointError, ConfigError
from dapo.tracking.files import read_lines, sync
from dapo.trainer.bundle import RECORD, write_record
from dapo.trainer.resume import read_run_config

# What the card shows of a config, beside data and model; the run's config.toml has the rest.
KEY_SETTINGS = (
    "algorithm.advantage",
    "algorithm.mean",
    "algorithm.clip.low",
    "algorithm.clip.high",
    "algorithm.kl.coefficient",
    "shaping.overlong_filter",
    "shaping.overlong_penalty",
    "sampling.dynamic",
    "sampling.prompts_per_step",
    "sampling.responses_per_prompt",
    "sampling.temperature",
    "limits.max_prompt_tokens",
    "limits.max_response_tokens",
    "data.template",
    "data.chat_template",
    "rewards.verifier",
    "train.lr",
    "train.warmup_steps",
    "train.lr_decay",
    "train.updates_per_step",
    "train.seed",
    "model.lora.rank",
)

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
    skipped: tuple[str, ...]  # newer checkpoints that are torn or changed, by name


def export_run(run: Path, out: Path, *, is_bundle: bool = False) -> Exported:
    """Write the model of the newest intact checkpoint of `run` to the new folder `out`: all of it or nothing.

    `is_bundle` adds the run's record, with which the result can be looked into and made again.
    """
    config = read_run_config(run, ())
    refuse_existing(out)
    checkpoint, skipped = newest_intact(run / "checkpoints")
    if checkpoint is None:
        why = "; ".join(skipped) or "none was written yet"
        raise CheckpointError(
            f"{run}: this run has no intact checkpoint: {why}.", remedy=f"Go on with it: dapo resume {run}"
        )
    state, evaluations = read_state(checkpoint), list(read_lines(run / "eval.jsonl"))
    card = model_card(out.name, config, step_of(checkpoint), state, evaluations)
    if is_bundle:
        card += RECORD_NOTE
    aside = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # The critic of PPO and VAPO lies beside the model; it is no part of what is exported.
        shutil.copytree(checkpoint / "model", aside, ignore=shutil.ignore_patterns("critic"))
        (aside / "README.md").write_text(card, encoding="utf-8")
        if is_bundle:
            write_record(run, aside, config, step=step_of(checkpoint), state=state, name=out.name)
        sync_tree(aside)
        aside.replace(out)
        sync(out.parent)
    except OSError as error:
        raise CheckpointError(
            f"--out {out}: cannot be written: {reason(error)}.", remedy="Check the folder's permissions and the disk."
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Exported(out, step_of(checkpoint), tuple(skipped))


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


# ------------------------------------------------------------------ the card


def model_card(
    name: str, config: Config, step: int, state: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]
) -> str:
    """README.md of an exported model: recipe, settings, data, steps, scores; nothing that is not in the run folder."""
    base = config.model.path
    skipped = f" ({state['bad_updates']} skipped in a row at the end)" if state.get("bad_updates") else ""
    parts = [
        front_matter(base),
        f"# {name}",
        f"`{base}` trained by reinforcement learning with the preset `{config.preset}` of dapo {__version__}: "
        f"{step:,} steps, {state['updates']:,} updates{skipped}.",
    ]
    if not config.is_paper_algorithm:
        parts.append(
            f"**Not the paper's algorithm**: {', '.join(switches_on(config))}. Tokens may come from older weights, or "
            "problems are not drawn uniformly."
        )
    parts += ["## Scores", scores(evaluations, step)]
    parts += ["## Data", data(config, state)]
    parts += ["## Settings", settings(config)]
    return "\n\n".join(parts) + "\n"


def front_matter(base: str) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [dapo, reinforcement-learning]"]
    owner, _, model = base.partition("/")
    if owner and model and "/" not in model and not Path(base).exists():
        lines.append(f"base_model: {base}")
    return "\n".join(["---", *lines, "---"])


def switches_on(config: Config) -> list[str]:
    names = ("carry_over", "partial_rollouts", "predictive")
    return [f"`sampling.{name}`" for name in names if getattr(config.sampling, name)]


def scores(evaluations: Sequence[Mapping[str, Any]], step: int) -> str:
    """Before and after, each set and score, with 95 % intervals; evaluations of later steps are not this model's."""
    lines = [line for line in evaluations if int(line["step"]) <= step]
    if not lines:
        return "The run was not evaluated."
    rows = ["| set | problems | score | before | after |", "|---|---|---|---|---|"]
    after_steps = set()
    for name in dict.fromkeys(line["set"] for line in lines):
        own = [line for line in lines if line["set"] == name]
        first, last = own[0], own[-1]
        after_steps.add(int(last["step"]))
        for score in ("avg@k", "pass@k", "maj@k"):
            before = with_interval(first, score) if int(first["step"]) == 0 else "not measured"
            after = with_interval(last, score) if int(last["step"]) > 0 else "not measured"
            shown = score.replace("k", str(last["k"]))
            rows.append(f"| {name} | {last['problems']:,} | {shown} | {before} | {after} |")
    steps = ", ".join(str(number) for number in sorted(after_steps))
    note = f"In brackets: 95 % bootstrap intervals over problems. After: step {steps} of {step}."
    return "\n".join([*rows, "", note])


def with_interval(line: Mapping[str, Any], score: str) -> str:
    low, high = line[f"{score}_interval"]
    return f"{line[score]:.3f} [{low:.3f}, {high:.3f}]"


def data(config: Config, state: Mapping[str, Any]) -> str:
    n_problems = state["sampling"]["order"]["n_problems"]
    lines = [
        f"Trained on `{config.data.train}`: {n_problems:,} problems, "
        f"SHA-256 of their ids, questions and answers `{state['data']}`."
    ]
    if config.data.eval:
        lines.append(f"Evaluated on {', '.join(f'`{name}`' for name in config.data.eval)}.")
    return " ".join(lines)


def settings(config: Config) -> str:
    keys = flatten(config.model_dump(mode="json"))
    rows = [f"| `{key}` | {shown(keys[key])} |" for key in KEY_SETTINGS]
    return "\n".join(["| key | value |", "|---|---|", *rows])


def shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
