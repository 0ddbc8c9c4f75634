"""Rows of a file (JSONL, JSON, parquet, CSV), streamed with their numbers; errors name the file and the row."""

from __future__ import annotations

import csv
import functools
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from dapo.errors import DataError
from dapo.files import sha256_of
from dapo.parquet_size import too_large

Row = dict[str, Any]
Rows = Iterator[tuple[int, Row]]  # numbered from 1; for JSONL the line

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
MAX_LINE_BYTES = 16 * 2**20  # a problem is a few thousand characters; a code problem's tests a few megabytes
MAX_JSON_BYTES = 2**31  # a JSON list is parsed in one piece
PARQUET_MAGIC = b"PAR1"
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}  # of a CSV's fields
QUOTED = re.compile(r'(^|[,;\t])"(?:[^"]|"")*(?:"|$)')  # a quoted field and what stands before it
ROW_BYTES = (
    128  # that a row of a set counts at least; it is streamed, and a published set repeats each row a hundred times
)


def read_rows(path: Path) -> Rows:
    """The rows of a file, by its suffix. A DataError says what is wrong, in which row, and what to do."""
    check_file(path)
    readers = {".jsonl": read_jsonl, ".json": read_json, ".parquet": read_parquet, ".csv": read_csv}
    return readers[path.suffix.lower()](path)


def check_file(path: Path) -> None:
    """Refuse what cannot be a problem set before any row is read."""
    if exists(path) and path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix.lower() in SUFFIXES)[:3]
        remedy = f"Name a file in it, such as {path / inside[0]}." if inside else f"Name a file: {', '.join(SUFFIXES)}."
        raise DataError(f"{path}: is a folder, not a problem set.", remedy=remedy)
    if not exists(path):
        raise DataError(f"{path}: no such file.", remedy="Check the path; relative paths start at the working folder.")
    if not path.is_file():
        raise DataError(f"{path}: is not a plain file.", remedy="Copy it to a file first; it is read more than once.")
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"{path}: suffix {path.suffix!r} is not a known format.",
            remedy=f"Known formats: {', '.join(SUFFIXES)}. Rename the file if it is one of them.",
        )
    try:
        with path.open("rb") as file:
            head = file.read(len(PARQUET_MAGIC))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.", remedy="Check its permissions.") from None
    if not head:
        raise DataError(f"{path}: the file is empty.", remedy="Fetch or write it again.")
    if head == PARQUET_MAGIC and path.suffix.lower() != ".parquet":
        raise DataError(f"{path}: holds parquet, but is named {path.suffix}.", remedy="Rename it to .parquet.")


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name no file system takes
        return False


def cached_sha256(path: Path) -> str:
    """Hash a problem set once while it does not change: it is checked before a run, and read when it starts."""
    stat = path.stat()
    return _cached_sha256(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _cached_sha256(path: Path, _size: int, _mtime_ns: int) -> str:
    return sha256_of(path)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines as text. A line over the limit is refused without being held in memory."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise too_long(path, number)
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield number, decode(path, number, line)


def too_long(path: Path, number: int) -> DataError:
    return DataError(
        f"{path}: row {number}: longer than {MAX_LINE_BYTES // 2**20} MiB.",
        remedy="No problem is that long. Check that rows end with a line break, or remove this row.",
    )


def decode(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        encoding = "utf-16" if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
        raise DataError(
            f"{path}: row {number}: byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8.",
            remedy=f"Convert the file first, e.g. iconv -f {encoding} -t utf-8 {path.name}.",
        ) from None


def read_jsonl(path: Path) -> Rows:
    for number, line in lines(path):
        if line.strip():
            yield number, as_row(path, number, parse(path, number, line))


def parse(path: Path, number: int, text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or "Unterminated" in error.msg
        where = "the line is truncated" if cut else f"not JSON at character {error.pos + 1}"
        raise DataError(
            f"{path}: row {number}: {where}: {error.msg}.",
            remedy="Fetch the file again, or remove this row." if cut else "Write one JSON object per line.",
        ) from None
    except (ValueError, RecursionError) as error:  # an integer of over 4,300 digits; brackets nested without end
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{path}: row {number}: cannot be parsed: {why}.", remedy="Remove this row.") from None


def as_row(path: Path, number: int, value: object) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            f"{path}: row {number}: is a {type(value).__name__}, not an object with columns.",
            remedy='Write rows such as {"question": "…", "answer": "…"}.',
        )
    return value


def read_json(path: Path) -> Rows:
    """A list of objects; or one object that holds such a list; or, as is common, JSONL under the name .json."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise DataError(f"{path}: over {MAX_JSON_BYTES // 2**30} GiB in one JSON value.", remedy="Convert it to JSONL.")
    whole = decode(path, 1, path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    if whole.lstrip().startswith("["):
        return number_rows(path, parse_list(path, whole))
    try:
        value = json.loads(whole)
    except (ValueError, RecursionError):
        return read_jsonl(path)
    lists = [v for v in value.values() if isinstance(v, list)] if isinstance(value, dict) else []
    return number_rows(path, lists[0] if len(lists) == 1 and len(value) == 1 else [value])


def parse_list(path: Path, whole: str) -> list[object]:
    """The list; where it breaks, the row is found by decoding element by element up to the break."""
    try:
        value = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: row {broken_row(whole)}: not JSON: {error}.",
            remedy="Fetch the file again, or fix this row; JSONL files lose only the broken line.",
        ) from None
    assert isinstance(value, list), "the text starts with a bracket"
    return value


def broken_row(whole: str) -> int:
    """Which element of a JSON list is the first that cannot be decoded."""
    decoder, number = json.JSONDecoder(), 1
    at = whole.index("[") + 1
    while True:
        while at < len(whole) and whole[at] in " \t\r\n,":
            at += 1
        try:
            _, at = decoder.raw_decode(whole, at)
        except (ValueError, RecursionError):
            return number
        number += 1


def number_rows(path: Path, values: list[object]) -> Rows:
    for number, value in enumerate(values, start=1):
        yield number, as_row(path, number, value)


def read_parquet(path: Path) -> Rows:
    """Batch by batch, so that a file repeated a hundred times never stands in memory whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if why := too_large(path, row_bytes=ROW_BYTES):
        raise DataError(
            f"{path}: {why}.",
            remedy="Check where it is from. If it is what you want, write it as JSON lines (.jsonl).",
        )
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    number += 1
                    row.pop("__index_level_0__", None)  # a stray pandas index
                    yield number, row
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path}: row {number + 1}: not a whole parquet file: {first_line(error)}.",
            remedy="It is corrupt or not parquet at all: fetch it again, or rename it to what it is.",
        ) from None


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def read_csv(path: Path) -> Rows:
    """With a header line, whose separator is the file's; quoted fields may span lines."""
    csv.field_size_limit(MAX_LINE_BYTES)
    texts = (line for _, line in lines(path))
    first = next(texts, "")
    separator = separator_in(first)
    reader = csv.reader(chain([first], texts), strict=True, delimiter=separator)
    number = 0
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(set(header)) != len(header) or not all(header):
            raise DataError(
                f"{path}: row 1: the header {header} has an empty or repeated name.",
                remedy="Give every column its own name, e.g. question,answer.",
            )
        for number, fields in enumerate(reader, start=1):
            if not fields:
                continue
            if len(fields) != len(header):
                raise DataError(
                    f"{path}: row {number}: {len(fields)} fields, but the header has {len(header)}.",
                    remedy=f'Quote fields that contain {SEPARATORS[separator]} or line breaks: "a{separator} b".',
                )
            yield number, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(
            f"{path}: row {number + 1}: not CSV: {error}.",
            remedy="Quote fields, double the quotes inside them, or use JSONL.",
        ) from None


def separator_in(header: str) -> str:
    """The first of `SEPARATORS` that the line has outside quotes; a comma where it has none, as with one column."""
    bare = QUOTED.sub(r"\1", header)
    return next((sign for sign in SEPARATORS if sign in bare), ",")
