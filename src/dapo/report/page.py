"""A page from run folders alone: it opens offline from the file system, and everything a model wrote stays text.

`report.html` lies beside a folder `report/` with its style, its scripts, plotly and the data; responses are loaded on
demand from the scripts that the run wrote beside its parquet.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pyarrow import Table

from dapo.errors import DataError
from dapo.report import differences
from dapo.report.answers import answer_all, flips_of
from dapo.report.behaviour import MEANINGS, SHIPPED, Phrases, load_phrases
from dapo.report.chunks import (
    FORMAT,
    chunk_folder,
    make_chunks,
    parse_script,
    read_script,
    read_table,
    script,
    write_chunks,
)
from dapo.report.doctor import examine, to_json, verdict
from dapo.report.findings import Disk, Finding
from dapo.report.load import RunRecord, load_run
from dapo.report.pieces import TokenPieces, find_tokenizer
from dapo.tracking.files import replace_file
from dapo.tracking.metrics import METRICS

SCRIPTS = ("base.js", "overview.js", "curves.js", "rollouts.js", "main.js")
ASSETS = (*SCRIPTS, "style.css")
SHOWN_EVENTS = 200
SHOWN_FLIPS = 400

# What the page may do: run the scripts beside it and draw. No network, no inline script, no frame, no form.
POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file: 'unsafe-inline'; img-src data:; "
    "connect-src {connect}; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True, slots=True)
class Examined:
    """A run with the indexes of its recorded steps and what the doctor says."""

    run: RunRecord
    indexes: dict[int, dict[str, Any]]
    findings: list[Finding]
    missing: list[str] = field(default_factory=list)

    @property
    def summaries(self) -> list[tuple[int, dict[str, Any]]]:
        return summaries_of(self.indexes)


def write_page(
    folder: Path,
    *others: Path,
    out: Path | None = None,
    phrases: Path | None = None,
    beside: Path | None = None,
) -> Path:
    """`report.html` in the run's folder, or in `out`; scripts that are missing are made from parquet."""
    runs = [examine_run(run, phrases=phrases, is_writing=True) for run in (folder, *others)]
    home = out or (folder if not others else folder.parent / "comparison")
    assets = home / "report"
    assets.mkdir(parents=True, exist_ok=True)
    for name in ASSETS:
        replace_file(assets / name, asset(name))
    copy_plotly(assets / "plotly.min.js")
    for at, examined in enumerate(runs):
        replace_file(assets / f"history-{at}.js", script(f"history-{at}", json.dumps(history_of(examined))))
    places = [os.path.relpath(run.run.folder.resolve() / "rollouts", home.resolve()) for run in runs]
    data = page_data(runs, [quote(place) for place in places], read_beside(beside))
    replace_file(assets / "data.js", script("page", dumps(data)))
    path = home / "report.html"
    replace_file(path, html(is_live=False))
    return path


def examine_run(folder: Path, *, phrases: Path | None = None, is_writing: bool = False) -> Examined:
    """Read a run, index its rollouts, and let the doctor look at it."""
    run = load_run(folder)
    indexes, missing = read_indexes(run, phrases, is_writing=is_writing)
    findings = examine(run, summaries_of(indexes), disk=Disk.of(folder))
    return Examined(run, indexes, findings, missing)


def summaries_of(indexes: dict[int, dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [
        (step, index["summary"] | {"groups": len(index["groups"]["id"])}) for step, index in sorted(indexes.items())
    ]


def read_indexes(
    run: RunRecord, phrases: Path | None, *, is_writing: bool
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """The index of every recorded step; where it is missing or of another phrase list, it is made if we may write."""
    listed = phrases_of(run.folder, phrases)
    pieces = None
    indexes, missing = {}, []
    for parquet in run.rollouts:
        index = read_script(chunk_folder(parquet) / "index.js")
        is_stale = index is None or index.get("format") != FORMAT or index.get("phrases") != listed.name
        if (index is None or (is_stale and is_writing)) and (table := read_table(parquet)) is not None:
            pieces = pieces or find_tokenizer(run.folder, run.config)
            index = make_index(table, parquet, pieces, listed, is_writing=is_writing)
        if index is None or index.get("format") != FORMAT:
            missing.append(f"rollouts/{parquet.name}: cannot be read; its step is left out of the browser")
        else:
            indexes[int(index["step"])] = index
    return indexes, missing


def make_index(
    table: Table, parquet: Path, pieces: TokenPieces | None, phrases: Phrases, *, is_writing: bool
) -> dict[str, Any]:
    """The index of a step that has only parquet; its scripts are written where we may write."""
    if is_writing:
        write_chunks(table, chunk_folder(parquet), pieces, phrases)
        index: dict[str, Any] = read_script(chunk_folder(parquet) / "index.js")
        return index
    *_, (_, text) = make_chunks(table, parquet.stem, pieces, phrases)
    made: dict[str, Any] = parse_script(text)
    return made


def phrases_of(folder: Path, given: Path | None) -> Phrases:
    own = folder / "phrases.toml"
    return load_phrases(given or (own if own.is_file() else SHIPPED))


def html(*, is_live: bool) -> str:
    """The frame: no data, no text of a model; the scripts fill it."""
    scripts = "\n".join(f'<script src="report/{name}" defer></script>' for name in SCRIPTS)
    data = "" if is_live else '<script src="report/data.js" defer></script>'
    return (
        asset("page.html")
        .replace("{{policy}}", POLICY.format(connect="'self'" if is_live else "'none'"))
        .replace("{{live}}", " data-live" if is_live else "")
        .replace("{{scripts}}", scripts.replace("</script>\n", f"</script>\n{data}\n", 1) if data else scripts)
    )


def asset(name: str) -> str:
    return files("dapo.report").joinpath("assets", name).read_text(encoding="utf-8")


def plotly_path() -> Path:
    return Path(str(files("plotly").joinpath("package_data", "plotly.min.js")))


def copy_plotly(target: Path) -> None:
    source = plotly_path()
    if not target.is_file() or target.stat().st_size != source.stat().st_size:
        aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        shutil.copyfile(source, aside)
        aside.replace(target)


# ------------------------------------------------------------------ what the page knows


def page_data(runs: Sequence[Examined], places: Sequence[str], beside: list[dict[str, Any]]) -> dict[str, Any]:
    used = {name for examined in runs for line in examined.run.metrics for name in line}
    return {
        "runs": [run_data(examined, place) for examined, place in zip(runs, places, strict=True)],
        "differences": [differences.to_json(differences.compare(examined.run, runs[0].run)) for examined in runs[1:]],
        "glossary": [[name, unit, meaning] for name, (unit, meaning) in METRICS.items() if name in used],
        "behaviour": list(MEANINGS.items()),
        "beside": beside,
    }


def run_data(examined: Examined, place: str) -> dict[str, Any]:
    run = examined.run
    flips = flips_of(run) if run.eval_problems else []
    evaluations = [trimmed(line) for line in run.evaluations]
    folder = shlex.quote(str(run.folder))
    return {
        "name": run.folder.resolve().name,
        "folder": str(run.folder),
        "place": place,
        "state": run.state,
        "step": run.steps,
        "steps": run.wanted_steps,
        "preset": str(run.key("preset", default="?")),
        "is_paper_algorithm": run.is_paper_algorithm,
        "model": str(run.key("model", "path", default="?")),
        "data": str(run.key("data", "train", default="?")),
        "verifier": str(run.key("rewards", "verifier", default="?")),
        "commands": [
            ["go on", f"dapo resume {folder}"],
            ["evaluate", f"dapo eval --model {folder} --data FILE --k 32"],
            ["export", f"dapo export {folder} --out DIR"],
            ["watch", f"dapo watch {folder}"],
        ],
        "config": flat(run.config),
        "verdict": verdict(examined.findings, run),
        "findings": to_json(examined.findings),
        "answers": [
            asdict(answer) for answer in answer_all(run, examined.findings, examined.summaries, flips)
        ],
        "missing": [*run.missing, *examined.missing],
        "metrics": columns(run.metrics),
        "evaluations": evaluations,
        "flips": flips[:SHOWN_FLIPS],
        "events": [
            [int(e.get("step") or 0), str(e.get("kind", "")), str(e.get("message", ""))]
            for e in run.events[-SHOWN_EVENTS:]
        ],
        "rollouts": [{"step": step, **summary} for step, summary in examined.summaries],
    }  # fmt: skip


def trimmed(line: dict[str, Any]) -> dict[str, Any]:
    """An evaluation with its sources as pairs: names from data are never keys of the page."""
    sources = line.get("by_source")
    return {
        "step": line["step"],
        "set": str(line["set"]),
        "k": line["k"],
        "problems": line.get("problems"),
        "avg": line["avg@k"],
        "avg_interval": line["avg@k_interval"],
        "pass": line.get("pass@k"),
        "maj": line.get("maj@k"),
        "unparseable": line.get("unparseable"),
        "truncated": line.get("truncated"),
        "faults": line.get("faults"),
        "mean_tokens": line.get("mean_tokens"),
        "seconds": line.get("timing.evaluation_s"),
        "by_source": sorted(sources.items()) if isinstance(sources, dict) else [],
    }


def columns(lines: Sequence[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Metrics by name, one entry per step, None where a step has none. Only declared names: others are not ours."""
    names = [name for name in METRICS if any(name in line for line in lines)]
    return {name: [finite(line.get(name)) for line in lines] for name in names}


def finite(value: object) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def flat(tree: dict[str, Any], prefix: str = "") -> list[list[str]]:
    rows: list[list[str]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            rows += flat(value, f"{prefix}{name}.")
        else:
            rows.append([f"{prefix}{name}", json.dumps(value, ensure_ascii=False)])
    return rows


def history_of(examined: Examined) -> dict[str, Any]:
    """Every recorded visit to every problem: which steps, where its group lies, how many were right."""
    steps = sorted(examined.indexes)
    visits: dict[str, list[list[int]]] = {}
    for at, step in enumerate(steps):
        groups = examined.indexes[step]["groups"]
        for row, name in enumerate(groups["id"]):
            visits.setdefault(name, []).append([at, row, groups["correct"][row], groups["size"][row]])
    return {"steps": steps, "problems": list(visits.items())}


def read_beside(path: Path | None) -> list[dict[str, Any]]:
    """Curves to lay beside the run's, such as figures read off a paper: a CSV with metric, step, value and label."""
    if path is None:
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise DataError(f"--beside {path}: {error.strerror}.", remedy="Name a CSV file.") from None
    curves: dict[tuple[str, str], dict[str, Any]] = {}
    for at, row in enumerate(rows, start=2):
        metric, label = (row.get("metric") or "").strip(), (row.get("label") or path.stem).strip()
        try:
            step, value = float(row["step"]), float(row["value"])
        except (KeyError, TypeError, ValueError):
            raise DataError(
                f"--beside {path}: line {at} has no number for step and value.",
                remedy="Columns: metric,step,value,label (label may be left out).",
            ) from None
        if metric not in METRICS and metric != "avg@k":
            raise DataError(
                f"--beside {path}: line {at}: {metric!r} is no metric.", remedy="Names: docs/metrics.md, or avg@k."
            )
        curve = curves.setdefault((metric, label), {"metric": metric, "label": label, "x": [], "y": []})
        curve["x"].append(step)
        curve["y"].append(value)
    return list(curves.values())


def dumps(data: Any) -> str:
    """JSON that is also safe as a script: ASCII only, and no NaN."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False)
