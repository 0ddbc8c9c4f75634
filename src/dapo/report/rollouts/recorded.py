"""The recorded steps of a run: parquet files, read with care since a run folder may come from anybody."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dapo.parquet_size import is_text, too_large

DROPPED = "dropped"  # column: why a group was not trained on (all_correct, all_wrong, all_equal); empty where it was
PER_TOKEN = ("tokens", "logp", "logp_old", "entropy", "advantage", "ratio", "clip")

Row = Mapping[str, Any]


def records_of(rollouts: Path) -> Iterable[Path]:
    """The parquet names of all recorded steps, whether the parquet itself or only its scripts are there."""
    names = {p.with_suffix("") for p in rollouts.glob("step-*.parquet")}
    names |= {p for p in rollouts.glob("step-*") if p.is_dir()}
    names |= {rollouts / p.stem for p in (rollouts / DROPPED).glob("step-*.parquet")}
    steps = [p for p in names if p.name.removeprefix("step-").isdigit()]
    return [p.with_suffix(".parquet") for p in sorted(steps, key=lambda p: int(p.name.removeprefix("step-")))]


def chunk_folder(parquet: Path) -> Path:
    return parquet.with_suffix("")


def dropped_path(parquet: Path) -> Path:
    """Groups that no update was made from lie in a folder of their own: a step's file holds what it was trained on."""
    return parquet.parent / DROPPED / parquet.name


def drop_after(rollouts: Path, last_step: int) -> None:
    """Remove the records of steps after `last_step`, parquet and scripts alike: they will be written again."""
    for path in records_of(rollouts):
        if int(path.stem.removeprefix("step-")) > last_step:
            path.unlink(missing_ok=True)
            dropped_path(path).unlink(missing_ok=True)
            shutil.rmtree(chunk_folder(path), ignore_errors=True)


def read_step(parquet: Path) -> pa.Table | None:
    """The rollouts of a step: of the groups it was trained on, and of those that were dropped; None without either."""
    found = [read_table(path) for path in (parquet, dropped_path(parquet))]
    tables = [table for table in found if table is not None]
    try:
        return joined(tables) if tables else None
    except pa.ArrowException:  # columns of one name and two types
        return tables[0]


def why_unread(parquet: Path) -> str:
    """Why a step's file is there and not read, where its size is the reason."""
    return next((why for path in (parquet, dropped_path(parquet)) if (why := too_large(path))), "")


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """One table; a column that one of them lacks is empty there."""
    return pa.concat_tables(tables, promote_options="permissive")


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
