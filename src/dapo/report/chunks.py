"""Rollouts as scripts a browser can load from the file system: an index per step, and pieces of a few groups each.

A run writes them next to its parquet as it goes (`rollouts/step-000120/index.js`, `000.js`, …); for a run that has only
parquet, the report does. A script is one call, `dapo.put("step-000120/000", {...})`, and its argument is plain JSON. A
run folder may come from anybody, so a script reaches a browser only if it is exactly that.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dapo.files import folder_written_aside
from dapo.parquet_size import is_text, too_large
from dapo.report.behaviour import KINDS, Phrases, is_answer_only, load_phrases
from dapo.report.part_columns import PART_COLUMN, histogram, is_histogram, is_row_of_parts, mean_of, part_names
from dapo.report.pieces import TokenPieces
from dapo.rewards.math.answer_values import Value, value_of
from dapo.types import CORRECT

FORMAT = 1
PIECE_CHARACTERS = 1_000_000  # about what one script holds: quick to load, and not one file per group
QUESTION_CHARACTERS = 120
TOP = 12
PREFIX, SUFFIX = "dapo.put(", ");\n"
MAX_SCRIPT_BYTES = 64 << 20  # a piece holds about a megabyte, or one group that is larger

DROPPED = "dropped"  # column: why a group was not trained on (all_correct, all_wrong, all_equal); empty where it was
PER_TOKEN = ("tokens", "logp", "logp_old", "entropy", "advantage", "ratio", "clip")

Row = Mapping[str, Any]


def chunk_folder(parquet: Path) -> Path:
    return parquet.with_suffix("")


def dropped_path(parquet: Path) -> Path:
    """Groups that no update was made from lie in a folder of their own: a step's file holds what it was trained on."""
    return parquet.parent / DROPPED / parquet.name


def write_chunks(table: pa.Table, folder: Path, pieces: TokenPieces | None, phrases: Phrases | None = None) -> None:
    """The scripts of one step's table, in a folder written aside and renamed."""
    with folder_written_aside(folder) as aside:
        for name, text in make_chunks(table, folder.name, pieces, phrases or load_phrases()):
            (aside / f"{name}.js").write_text(text, encoding="ascii")


def make_chunks(
    table: pa.Table, step_name: str, pieces: TokenPieces | None, phrases: Phrases
) -> Iterator[tuple[str, str]]:
    """(name, script) of each piece, and of the index last."""
    index = Index(step_name, phrases, part_names(table.column_names))
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


def is_index(index: Any, step_name: str) -> bool:
    """Whether it has the shape of `Index.to_json`, and is of the step whose name it lies under."""
    if not (isinstance(index, dict) and index.get("format") == FORMAT and is_whole(index.get("step"))):
        return False
    groups, summary = index.get("groups"), index.get("summary")
    if index["step"] < 0 or step_name != f"step-{index['step']:06d}" or not isinstance(index.get("phrases"), str):
        return False
    return isinstance(groups, dict) and is_columns(groups) and isinstance(summary, dict) and is_summary(summary)


def is_columns(groups: dict[str, Any]) -> bool:
    texts, numbers = ("id", "question", "answer", DROPPED), ("tokens", "reward")
    counts = ("visit", "piece", "at", "size", "correct", "unparseable", "truncated", "answers", "low", "high", *KINDS)
    columns = [groups.get(name) for name in (*texts, *numbers, *counts, *(("parts",) if "parts" in groups else ()))]
    if not all(isinstance(column, list) and len(column) == len(columns[0] or ()) for column in columns):
        return False
    return (
        all(is_row_of_parts(row) for row in groups.get("parts", ()))
        and all(isinstance(value, str) for name in texts for value in groups[name])
        and all(value is None or isinstance(value, int | float) for name in numbers for value in groups[name])
        and all(is_whole(value) for name in counts for value in groups[name])
        and all(value >= 0 for value in (*groups["piece"], *groups["at"], *groups["size"]))
    )


def is_summary(summary: dict[str, Any]) -> bool:
    counts = ("responses", "pieces", "groups", DROPPED, "answer_only")
    behaviour, top = summary.get("behaviour"), summary.get("top_answer")
    pairs = [summary.get(name) for name in ("verdicts", "clipped_low", "clipped_high")]
    parts = summary.get("parts", [])  # of a reward that has several
    return (
        isinstance(parts, list)
        and all(map(is_histogram, parts))
        and summary.keys() - {"parts"}
        == {*counts, "behaviour", "top_answer", "verdicts", "clipped_low", "clipped_high"}
        and all(is_whole(summary[name]) for name in counts)
        and isinstance(behaviour, dict)
        and behaviour.keys() == set(KINDS)
        and all(map(is_whole, behaviour.values()))
        and all(isinstance(pair, list) and all(map(is_counted, pair)) for pair in pairs)
        and (top is None or (isinstance(top, list) and len(top) == 3 and is_counted(top[:2]) and is_whole(top[2])))
    )


def is_counted(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and is_whole(pair[1])


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def are_data(parquet: Path, index: Mapping[str, Any]) -> bool:
    """Whether every script that the page will load for this step is a call of ours with plain data."""
    folder = chunk_folder(parquet)
    return all(isinstance(read_script(folder / f"{piece:03d}.js"), list) for piece in set(index["groups"]["piece"]))


def read_table(parquet: Path) -> pa.Table | None:
    """The rollouts of a step; None for a file that is missing, corrupt or `too_large`."""
    try:
        if too_large(parquet):
            return None
        schema = pq.read_schema(parquet)
        return pq.read_table(parquet, columns=[name for name in schema.names if is_recorded(schema.field(name).type)])
    except (OSError, pa.ArrowException):
        return None


def is_recorded(kind: pa.DataType) -> bool:
    """Whether a run writes columns of this type: text and numbers, and lists of numbers. Others are left unread."""
    of = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    is_plain = is_text(kind) or pa.types.is_null(kind)
    return is_plain or is_number(kind) or (of is not None and (is_number(of) or pa.types.is_null(of)))


def is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def why_unread(parquet: Path) -> str:
    """Why a step's file is there and not read, where its size is the reason."""
    return next((why for path in (parquet, dropped_path(parquet)) if (why := too_large(path))), "")


def read_step(parquet: Path) -> pa.Table | None:
    """The rollouts of a step: of the groups it was trained on, and of those that were dropped; None without either."""
    found = [read_table(path) for path in (parquet, dropped_path(parquet))]
    tables = [table for table in found if table is not None]
    try:
        return joined(tables) if tables else None
    except pa.ArrowException:  # columns of one name and two types
        return tables[0]


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """One table; a column that one of them lacks is empty there."""
    return pa.concat_tables(tables, promote_options="permissive")


def groups_of(table: pa.Table) -> Iterator[list[dict[str, Any]]]:
    """Rows group by group, as they stand in the table: one problem's visit after another."""
    lists = {name: ragged(table[name]) for name in PER_TOKEN if is_list(table, name)}
    left_out = {*PER_TOKEN, "version", "prompt_tokens"}
    plain = {name: values_of(table[name]) for name in table.column_names if name not in left_out}
    held: list[dict[str, Any]] = []
    for at in range(len(table)):
        row = {name: values[at] for name, values in plain.items()}
        row |= {name: values[offsets[at] : offsets[at + 1]] for name, (values, offsets) in lists.items()}
        row["problem_id"] = clean(row.get("problem_id"))
        if held and any(row.get(name) != held[0].get(name) for name in ("problem_id", "visit", DROPPED)):
            yield held
            held = []
        held.append(row)
    if held:
        yield held


def is_list(table: pa.Table, name: str) -> bool:
    return name in table.column_names and (
        pa.types.is_list(table[name].type) or pa.types.is_large_list(table[name].type)
    )


def values_of(column: pa.ChunkedArray) -> list[Any]:
    """A column as Python values; bytes that are no text in UTF-8 are replaced, and the rest of it stays."""
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        raw = column.cast(pa.large_binary()).to_pylist()
        values = [None if value is None else value.decode("utf-8", "replace") for value in raw]
    return values


def ragged(column: pa.ChunkedArray) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All values of a list column in one array, and where each row begins."""
    chunks = column.chunks
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
    lengths = [np.nan_to_num(chunk.value_lengths().to_numpy(zero_copy_only=False)) for chunk in chunks]
    joined = np.concatenate(lengths) if lengths else np.zeros(0)
    return (
        np.concatenate(values) if values else np.zeros(0),
        np.concatenate([[0], np.cumsum(joined)]).astype(np.int64),
    )


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
    except Exception as error:
        return plain_facts(row) | {"text": "", "unreadable": f"{type(error).__name__}: {error}"}


def plain_facts(row: Row) -> dict[str, Any]:
    """What can be said of any row, whatever it holds."""
    tokens = row.get("tokens")
    names = part_names(row)
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
    return response


def is_wide(units: NDArray[np.uint32]) -> bool:
    return int(units.max(initial=0)) > np.iinfo(np.uint16).max


def clip_of(row: Row) -> NDArray[np.int8]:
    """Which tokens were clipped, -1 low and 1 high; as many as the response has tokens, at most."""
    clip = np.nan_to_num(np.asarray(row.get("clip", ()), dtype=np.float64))
    return np.sign(clip[: len(row.get("tokens", ()))]).astype(np.int8)


def clean(text: object) -> str:
    return "" if text is None else str(text)


def whole(value: object) -> int:
    return int(value) if isinstance(value, int | float) and np.isfinite(value) else 0


def number(value: object) -> float | None:
    return round(float(value), 6) if isinstance(value, int | float) and np.isfinite(value) else None


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


class Index:
    """What the page knows of a step without loading its responses: one line per group, and sums over all of them."""

    def __init__(self, step_name: str, phrases: Phrases, parts: Sequence[str] = ()) -> None:
        self.parts = list(parts)
        self.values: dict[str, list[float | None]] = {name: [] for name in (CORRECT, *parts)} if parts else {}
        self.step = int(step_name.removeprefix("step-"))
        self.phrases = phrases.name
        self.groups: dict[str, list[Any]] = {
            name: []
            for name in (
                "id", "visit", "question", "answer", "piece", "at", "size", "correct", "unparseable", "truncated",
                "answers", "tokens", "reward", "low", "high", DROPPED, *KINDS, *(("parts",) if parts else ()),
            )
        }  # fmt: skip
        self.answers: Counter[Value] = Counter()
        self.spellings: dict[Value, Counter[str]] = {}
        self.references: Counter[Value] = Counter()
        self.clipped: dict[int, Counter[str]] = {-1: Counter(), 1: Counter()}
        self.verdicts: Counter[str] = Counter()
        self.answer_only = 0

    def add(
        self,
        rows: Sequence[Row],
        responses: Sequence[Mapping[str, Any]],
        *,
        piece: int,
        at: int,
        pieces: TokenPieces | None,
    ) -> None:
        first = rows[0]
        clips = [
            np.zeros(0, np.int8) if "unreadable" in response else clip_of(row)
            for row, response in zip(rows, responses, strict=True)
        ]
        line = {
            "id": str(first["problem_id"]),
            "visit": whole(first.get("visit")),
            "question": " ".join(clean(first.get("question"))[: 2 * QUESTION_CHARACTERS].split())[:QUESTION_CHARACTERS],
            "answer": clean(first.get("answer"))[:QUESTION_CHARACTERS],
            "piece": piece,
            "at": at,
            "size": len(rows),
            "correct": sum(r["verdict"] == "CORRECT" for r in responses),
            "unparseable": sum(r["verdict"] == "UNPARSEABLE" for r in responses),
            "truncated": sum(r["stop"] == "LENGTH" for r in responses),
            "answers": len({None if r["extracted"] is None else value_of(r["extracted"]) for r in responses}),
            "tokens": round(float(np.mean([r["n"] for r in responses])), 1),
            "reward": number(float(np.mean([r["reward"] or 0.0 for r in responses]))),
            "low": int(sum((clip < 0).sum() for clip in clips)),
            "high": int(sum((clip > 0).sum() for clip in clips)),
            DROPPED: clean(first.get(DROPPED)),
        }
        if self.parts:
            by_part = list(zip(*([value for _, value in r["parts"]] for r in responses), strict=True))
            line["parts"] = [mean_of(values) for values in by_part]
        for kind in KINDS:
            line[kind] = sum(kind in r["behaviour"] for r in responses)
        for name, value in line.items():
            self.groups[name].append(value)
        if line[DROPPED]:  # shown, but in no sum: the sums describe what the step was trained on
            return
        if self.parts:
            for name, values in zip(self.values, ([r["raw"] for r in responses], *by_part), strict=True):
                self.values[name] += values
        self.references[value_of(clean(first.get("answer")))] += 1
        for said in (r["extracted"] for r in responses if r["extracted"] is not None):
            self.answers[value_of(said)] += 1
            self.spellings.setdefault(value_of(said), Counter())[said[:QUESTION_CHARACTERS]] += 1
        self.verdicts.update(r["verdict"] for r in responses)
        self.answer_only += sum(r["is_answer_only"] for r in responses)
        if pieces is not None:
            for row, clip in zip(rows, clips, strict=True):
                for place in np.flatnonzero(clip):
                    token = int(row["tokens"][place])
                    self.clipped[int(np.sign(clip[place]))][token_name(pieces, token)] += 1

    def trained(self, name: str) -> int:
        """The sum of a column over the groups that were trained on."""
        return sum(n for n, why in zip(self.groups[name], self.groups[DROPPED], strict=True) if not why)

    def to_json(self) -> dict[str, Any]:
        n = self.trained("size")
        top = [(value, self.spellings[value].most_common(1)[0][0], n) for value, n in self.answers.most_common(1)]
        return {
            "format": FORMAT,
            "step": self.step,
            "phrases": self.phrases,
            "groups": self.groups,
            "summary": {
                "responses": n,
                "pieces": max(self.groups["piece"], default=-1) + 1,
                "groups": sum(not why for why in self.groups[DROPPED]),
                DROPPED: sum(bool(why) for why in self.groups[DROPPED]),
                "behaviour": {kind: self.trained(kind) for kind in KINDS},
                "answer_only": self.answer_only,
                "verdicts": sorted(self.verdicts.items()),
                "top_answer": [*top[0][1:], self.references[top[0][0]]] if top else None,
                "clipped_low": self.clipped[-1].most_common(TOP),
                "clipped_high": self.clipped[1].most_common(TOP),
                **(
                    {"parts": [[name, *histogram(values)] for name, values in self.values.items()]}
                    if self.parts
                    else {}
                ),
            },
        }


def token_name(pieces: TokenPieces, token: int) -> str:
    return pieces.bytes[token].decode(errors="replace") if 0 <= token < len(pieces.bytes) else f"#{token}"


def drop_after(rollouts: Path, last_step: int) -> None:
    """Remove the records of steps after `last_step`, parquet and scripts alike: they will be written again."""
    for path in records_of(rollouts):
        if int(path.stem.removeprefix("step-")) > last_step:
            path.unlink(missing_ok=True)
            dropped_path(path).unlink(missing_ok=True)
            shutil.rmtree(chunk_folder(path), ignore_errors=True)


def records_of(rollouts: Path) -> Iterable[Path]:
    """The parquet names of all recorded steps, whether the parquet itself or only its scripts are there."""
    names = {p.with_suffix("") for p in rollouts.glob("step-*.parquet")}
    names |= {p for p in rollouts.glob("step-*") if p.is_dir()}
    names |= {rollouts / p.stem for p in (rollouts / DROPPED).glob("step-*.parquet")}
    steps = [p for p in names if p.name.removeprefix("step-").isdigit()]
    return [p.with_suffix(".parquet") for p in sorted(steps, key=lambda p: int(p.name.removeprefix("step-")))]
