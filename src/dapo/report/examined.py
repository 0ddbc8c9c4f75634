"""A run read from its folder: the record, the index of every recorded step, and the doctor's findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyarrow import Table

from dapo.report.behaviour import SHIPPED, Phrases, load_phrases
from dapo.report.doctor.diagnose import examine
from dapo.report.doctor.findings import Disk, Finding
from dapo.report.load import RunRecord, load_run
from dapo.report.rollouts.chunks import are_data, make_chunks, parse_script, read_index, write_chunks
from dapo.report.rollouts.pieces import TokenPieces, find_tokenizer
from dapo.report.rollouts.recorded import chunk_folder, read_step, why_unread


@dataclass(frozen=True, slots=True)
class DiagnosedRun:
    """A run with the indexes of its recorded steps and the doctor's findings."""

    run: RunRecord
    indexes: dict[int, dict[str, Any]]
    findings: list[Finding]
    missing: list[str] = field(default_factory=list)

    @property
    def summaries(self) -> list[tuple[int, dict[str, Any]]]:
        return summaries_of(self.indexes)


def examine_run(folder: Path, *, phrases: Path | None = None, is_writing: bool = False) -> DiagnosedRun:
    """Read a run, index its rollouts, and diagnose it."""
    run = load_run(folder)
    indexes, missing = read_indexes(run, phrases, is_writing=is_writing)
    findings = examine(run, summaries_of(indexes), disk=Disk.of(folder))
    return DiagnosedRun(run, indexes, findings, missing)


def summaries_of(indexes: dict[int, dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [
        (step, {"groups": len(index["groups"]["id"])} | index["summary"]) for step, index in sorted(indexes.items())
    ]


def read_indexes(
    run: RunRecord, phrases: Path | None, *, is_writing: bool
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """The index of every recorded step; made again, if writing is allowed, for another phrase list or if missing."""
    listed = phrases_of(run.folder, phrases)
    pieces = None
    indexes, missing = {}, []
    for parquet in run.rollouts:
        index, why = read_index(parquet), ""
        if index is not None and is_writing and not are_data(parquet, index):
            index, why = None, " (its scripts hold more than data)"
        is_stale = index is None or index["phrases"] != listed.name
        if (index is None or (is_stale and is_writing)) and (table := read_step(parquet)) is not None:
            pieces = pieces or find_tokenizer(run.folder, run.config)
            try:
                index = make_index(table, parquet, pieces, listed, is_writing=is_writing)
            except OSError:  # a disk error, not a corrupt record
                raise
            except Exception as error:  # a record may hold anything: the other steps still get their page
                why = f" ({type(error).__name__}: {error})"
        if index is None:
            why = f" (it {said})" if (said := why_unread(parquet)) else why
            missing.append(f"rollouts/{parquet.name}: cannot be read{why}; the rollout browser leaves out its step")
        else:
            indexes[int(index["step"])] = index
    return indexes, missing


def make_index(
    table: Table, parquet: Path, pieces: TokenPieces | None, phrases: Phrases, *, is_writing: bool
) -> dict[str, Any]:
    """The index of a step that has only parquet; its scripts are written if writing is allowed."""
    if is_writing:
        write_chunks(table, chunk_folder(parquet), pieces, phrases)
        index = read_index(parquet)
        assert index is not None, "it was written just now"
        return index
    *_, (_, text) = make_chunks(table, parquet.stem, pieces, phrases)
    made: dict[str, Any] = parse_script(text)
    return made


def phrases_of(folder: Path, given: Path | None) -> Phrases:
    own = folder / "phrases.toml"
    return load_phrases(given or (own if own.is_file() else SHIPPED))
