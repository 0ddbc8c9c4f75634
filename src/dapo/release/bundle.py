"""The record that goes with a released model: config, curves, evaluations, sample rollouts, data manifest, report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dapo import __version__
from dapo.checkpoints.manifest import FORMAT, described
from dapo.config.schema import Config
from dapo.config.sources import is_mixture, train_in_words, train_sources
from dapo.files import read_lines
from dapo.report.ledger import LEDGER, VALUE_LEDGER
from dapo.report.load import is_evaluation
from dapo.report.page import write_page
from dapo.report.rollouts.recorded import dropped_path, records_of

RECORD = "run"  # the folder inside the bundle
LINES = ("metrics.jsonl", "eval.jsonl", "eval_problems.jsonl", "events.jsonl", LEDGER)
BEFORE_STEP_1 = ("value.jsonl", VALUE_LEDGER)  # their steps are those of value pretraining
ALL_ROLLOUTS_BYTES = 64 << 20  # recorded steps up to so much go along whole; of more, the first, middle and last


def write_record(run: Path, folder: Path, config: Config, *, step: int, state: Mapping[str, Any], name: str) -> None:
    """Fill `folder`/run with the record of `run` up to `step`: later lines are not about this model.

    `name` is what the bundle will be called; the page then names it so, wherever it is made.
    """
    record = folder / RECORD
    record.mkdir()
    shutil.copyfile(run / "config.toml", record / "config.toml")
    for file in (*LINES, *BEFORE_STEP_1):
        kept = [line for line in read_lines(run / file) if file in BEFORE_STEP_1 or (line.get("step") or 0) <= step]
        if kept:
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
            (record / file).write_text(text, encoding="utf-8")
    copy_rollouts(run / "rollouts", record / "rollouts", step)
    copy_data_manifest(config, record)
    write_json(record / "data.json", data_manifest(config, state, record))
    write_page(record)
    for path in (record / "report.html", *(record / "report").glob("*.js")):
        own = path.read_text(encoding="utf-8")
        if folder.name in own:
            path.write_text(own.replace(folder.name, name), encoding="utf-8")
    write_json(record / "MANIFEST.json", manifest(record, step))


def copy_rollouts(source: Path, target: Path, step: int) -> None:
    """Recorded steps with their browser scripts: all of them, or a sample where they are large."""
    recorded = [path for path in records_of(source) if int(path.stem.rpartition("-")[2]) <= step and files_of(path)]
    if sum(file.stat().st_size for path in recorded for file in files_of(path)) > ALL_ROLLOUTS_BYTES:
        recorded = [recorded[at] for at in sorted({0, len(recorded) // 2, len(recorded) - 1})]
    for path in recorded:
        for file in files_of(path):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        if (source / path.stem).is_dir() and not (source / path.stem).is_symlink():
            shutil.copytree(source / path.stem, target / path.stem, ignore=links_in)


def links_in(folder: str, names: list[str]) -> list[str]:
    """Links are left out: they may lead to private files."""
    return [name for name in names if (Path(folder) / name).is_symlink()]


def files_of(parquet: Path) -> list[Path]:
    """What there is of a recorded step: the groups it was trained on, and those that were dropped; no links."""
    return [path for path in (parquet, dropped_path(parquet)) if path.is_file() and not path.is_symlink()]


def copy_data_manifest(config: Config, record: Path) -> None:
    """The manifest that `dapo data prepare` wrote with the training file, if it made that file."""
    for source in train_sources(config):
        prepared = Path(f"{source.path}.manifest.json")
        if prepared.is_file():
            of_source = f"data.{source.name}.prepared.json" if is_mixture(config) else "data.prepared.json"
            shutil.copyfile(prepared, record / of_source)


def data_manifest(config: Config, state: Mapping[str, Any], record: Path) -> dict[str, Any]:
    """Which problems: by name, number and digest, and how they were put to the model and judged."""
    sets = {line["set"]: line.get("problems") for line in filter(is_evaluation, read_lines(record / "eval.jsonl"))}
    return {
        "train": {
            "name": train_in_words(config),
            "problems": state["sampling"]["order"]["n_problems"],
            "sha256_of_ids_questions_answers": state["data"],
        },
        "eval": [{"name": name, "problems": n} for name, n in sets.items()],
        "template": config.data.template,
        "chat_template": config.data.chat_template,
        "verifier": config.rewards.verifier,
        **({"sources": [asdict(source) for source in train_sources(config)]} if is_mixture(config) else {}),
        "seed": config.train.seed,
    }


def manifest(record: Path, step: int) -> dict[str, Any]:
    """Every file of the record with its size and SHA-256."""
    paths = [path for path in sorted(record.rglob("*")) if path.is_file()]
    files = {path.relative_to(record).as_posix(): described(path) for path in paths}
    return {"format": FORMAT, "dapo": __version__, "step": step, "files": files}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
