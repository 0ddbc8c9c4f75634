"""What a run folder holds, as far as it is there: a running, finished or crashed run."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.errors import DataError
from dapo.tracking.files import read_lines


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The lines of a run, torn ones left out, and what was missing."""

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    events: list[dict[str, Any]]
    rollouts: list[Path]
    missing: list[str]


def load_run(folder: Path) -> RunRecord:
    path = folder / "config.toml"
    if not path.is_file():
        raise DataError(f"{folder}: is not a run: it has no config.toml.", remedy="Name the folder of a run.")
    files = {name: folder / f"{name}.jsonl" for name in ("metrics", "eval", "events")}
    return RunRecord(
        folder=folder,
        config=tomllib.loads(path.read_text(encoding="utf-8")),
        metrics=[line for line in read_lines(files["metrics"]) if "step" in line],
        evaluations=[line for line in read_lines(files["eval"]) if "avg@k" in line],
        events=list(read_lines(files["events"])),
        rollouts=sorted((folder / "rollouts").glob("step-*.parquet")),
        missing=[file.name for name, file in files.items() if name != "events" and not file.exists()],
    )
