"""Rollouts as scripts a browser can load from the file system: an index per step, and pieces of a few groups each.

A run writes them next to its parquet as it goes (`rollouts/step-000120/index.js`, `000.js`, …); for a run that has only
parquet, the report does. A script is one call, `dapo.put("step-000120/000", {...})`, and its argument is plain JSON. A
run folder may come from anybody, so a script reaches a browser only if it is exactly that.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dapo.files import folder_written_aside
from dapo.report.behaviour import Phrases, is_answer_only, load_phrases
from dapo.report.parts import PART_COLUMN, recorded_parts
from dapo.report.rollouts.index import Index, is_index
from dapo.report.rollouts.pieces import TokenPieces
from dapo.report.rollouts.recorded import DROPPED, Row, chunk_folder, clean, clip_of, groups_of, number, whole

PIECE_CHARACTERS = 1_000_000  # about what one script holds: quick to load, and not one file per group
PREFIX, SUFFIX = "dapo.put(", ");\n"
MAX_SCRIPT_BYTES = 64 << 20  # a piece holds about a megabyte, or one group that is larger


def write_chunks(table: pa.Table, folder: Path, pieces: TokenPieces | None, phrases: Phrases | None = None) -> None:
    """The scripts of one step's table, in a folder written aside and renamed."""
    with folder_written_aside(folder) as aside:
        for name, text in make_chunks(table, folder.name, pieces, phrases or load_phrases()):
            (aside / f"{name}.js").write_text(text, encoding="ascii")


def make_chunks(
    table: pa.Table, step_name: str, pieces: TokenPieces | None, phrases: Phrases
) -> Iterator[tuple[str, str]]:
    """(name, script) of each piece, and of the index last."""
    index = Index(step_name, phrases, recorded_parts(table.column_names))
    held: list[str] = []
    size = number = 0
    for rows in groups_of(table):
        responses = [readable_or_not(row, pieces, phrases) for row in rows]
        group = json.dumps(group_of(rows[0], responses), allow_nan=False)
        if held and size + len(group) > PIECE_CHARACTERS:
            yield f"{number:03d}", script(f"{step_name}/{number:03d}", f"[{','.join(held)}]")
            held, size, number = [], 0, number + 1
        index.add(rows, responses, piece=number, at=len(held), pieces=pieces)
        held.append(group)
        size += len(group)
    if held:
        yield f"{number:03d}", script(f"{step_name}/{number:03d}", f"[{','.join(held)}]")
    yield "index", script(f"{step_name}/index", json.dumps(index.to_json(), allow_nan=False))


def script(name: str, body: str) -> str:
    return f"{PREFIX}{json.dumps(name)},{body}{SUFFIX}"


def read_script(path: Path) -> Any:
    """The argument of a script of ours; None for a file that is corrupt, a link or something else."""
    try:
        if path.is_symlink() or path.stat().st_size > MAX_SCRIPT_BYTES:
            return None
        return parse_script(path.read_text(encoding="ascii"))
    except (OSError, ValueError, RecursionError):
        return None


def parse_script(text: str) -> Any:
    """The argument. ValueError where there is anything else in the text: a browser would run it."""
    if not text.startswith(PREFIX) or not text.endswith(SUFFIX):
        raise ValueError("not a script of ours")
    name, end = json.JSONDecoder().raw_decode(text, len(PREFIX))
    if not isinstance(name, str) or text[end : end + 1] != ",":
        raise ValueError("not a script of ours")
    return json.loads(text[end + 1 : -len(SUFFIX)], parse_constant=no_number)


def no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def read_index(parquet: Path) -> dict[str, Any] | None:
    """The index that lies beside a recorded step, where it is one that we might have written; else None."""
    folder = chunk_folder(parquet)
    index = None if folder.is_symlink() else read_script(folder / "index.js")
    return index if is_index(index, folder.name) else None


def are_data(parquet: Path, index: Mapping[str, Any]) -> bool:
    """Whether every script that the page will load for this step is a call of ours with plain data."""
    folder = chunk_folder(parquet)
    return all(isinstance(read_script(folder / f"{piece:03d}.js"), list) for piece in set(index["groups"]["piece"]))


def group_of(first: Row, responses: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": str(first["problem_id"]),
        "visit": whole(first.get("visit")),
        "question": clean(first.get("question")),
        "answer": clean(first.get("answer")),
        "source": clean(first.get("source")),
        DROPPED: clean(first.get(DROPPED)),
        "responses": responses,
    }


def readable_or_not(row: Row, pieces: TokenPieces | None, phrases: Phrases) -> dict[str, Any]:
    """One response as the browser shows it. One that cannot be read says so: it is no reason to have no page."""
    try:
        return response_of(row, pieces, phrases)
    except Exception as error:  # a record may hold anything
        return plain_facts(row) | {"text": "", "unreadable": f"{type(error).__name__}: {error}"}


def plain_facts(row: Row) -> dict[str, Any]:
    """What can be said of any row, whatever it holds."""
    tokens = row.get("tokens")
    names = recorded_parts(row)
    return {
        "n": 0 if tokens is None else len(tokens),
        "verdict": clean(row.get("verdict")),
        "extracted": None if row.get("extracted") is None else clean(row["extracted"]),
        "reward": number(row.get("reward")),
        "raw": number(row.get("reward_raw")),
        "overlong": number(row.get("reward_overlong")),
        **({"parts": [[name, number(row[f"{PART_COLUMN}{name}"])] for name in names]} if names else {}),
        "stop": clean(row.get("stop_reason")),
        "behaviour": [],
        "is_answer_only": False,
    }


def response_of(row: Row, pieces: TokenPieces | None, phrases: Phrases) -> dict[str, Any]:
    """One response as the browser shows it; per-token numbers as float16 in base64, ratios as their logarithm."""
    text = clean(row.get("response_text"))
    response = plain_facts(row)
    response["behaviour"] = phrases.of(text)
    response["is_answer_only"] = is_answer_only(text, response["extracted"])
    shown, units = pieces.split(row.get("tokens", ()), text) if pieces is not None else (text, np.zeros(0, np.uint32))
    response["text"] = clean(shown)
    clip = clip_of(row)
    if len(units):
        # Few tokens write more than 65,535 units; a response that has one counts in four bytes, "wide".
        response |= {"units": encode(units), "wide": True} if is_wide(units) else {"units": encode(units.astype("u2"))}
        response["logp"] = half(row.get("logp_old")) or half(row.get("logp"))  # of dropped groups the engine's own
        response["entropy"] = half(row.get("entropy"))
        response["advantage"] = constant_or_half(row.get("advantage"))
        with np.errstate(divide="ignore", invalid="ignore"):
            response["log_ratio"] = half(np.log(np.asarray(row.get("ratio", ()), dtype=np.float64)))
        response["clip"] = [[int(at), int(clip[at])] for at in np.flatnonzero(clip)]
        if row.get("own") is not None:
            response["others"] = spans_of(~np.asarray(row["own"], dtype=bool)[: len(units)])
    return response


def spans_of(marked: NDArray[np.bool_]) -> list[list[int]]:
    """[from, to) of each unbroken span of marked tokens: what the environment said in an episode."""
    edges = np.flatnonzero(np.diff(marked.astype(np.int8), prepend=0, append=0))
    return edges.reshape(-1, 2).tolist()


def is_wide(units: NDArray[np.uint32]) -> bool:
    return int(units.max(initial=0)) > np.iinfo(np.uint16).max


def half(values: Any) -> str | None:
    if values is None or not len(values):
        return None
    with np.errstate(over="ignore"):  # what half precision cannot hold is infinite
        return encode(np.asarray(values, dtype=np.float16))


def constant_or_half(values: Any) -> float | str | None:
    """A group's advantage is one number per response; a critic's is one per token."""
    if values is None or not len(values):
        return None
    array = np.asarray(values)
    return number(float(array[0])) if bool((array == array[0]).all()) else half(array)


def encode(values: NDArray[Any]) -> str:
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()
