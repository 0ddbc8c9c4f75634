"""The size of a parquet file in memory, before it is read: a small file can unpack to gigabytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dapo.errors import refuse_newer

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

FORMAT = 1  # of the rollouts that a run records
FORMAT_KEY = b"dapo.format"  # in the schema's metadata
MAX_RATIO = 50  # of the file's own size: what a run records unpacks to less than ten times
LEAST_LIMIT = 256 << 20  # bytes that any file may unpack to, however small it is
MAX_TEXT = 16 << 20  # bytes of one text
ROW_BYTES = 1024  # about what a row costs as Python values, whatever it holds
VALUE_BYTES = 8


def too_large(path: Path, *, row_bytes: int = ROW_BYTES) -> str:
    """Why a file must not be read; empty where it may be, and for a file that cannot be opened at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        limit = max(LEAST_LIMIT, MAX_RATIO * path.stat().st_size)
        with pq.ParquetFile(path) as file:
            refuse_newer(path, format_of(file), FORMAT)
            size = declared_bytes(file) + row_bytes * file.metadata.num_rows
            columns = [file.schema.column(at) for at in range(len(file.schema))]
            texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        for text in texts if size <= limit else ():
            total, longest = text_bytes(path, text)
            size += total
            if longest > MAX_TEXT:
                return f"holds a text of {in_mb(longest)}, and {in_mb(MAX_TEXT)} are the most that is read"
            if size > limit:
                break
    except (OSError, pa.ArrowException):
        return ""
    if size <= limit:
        return ""
    return f"unpacks to {in_mb(size)} or more, and {in_mb(limit)} are the most that is read of a file of its size"


def format_of(file: pq.ParquetFile) -> int:
    """0 for a file of another program's, and for rollouts from before formats had numbers."""
    found = (file.schema_arrow.metadata or {}).get(FORMAT_KEY, b"0")
    return int(found) if found.isdigit() else 0


def declared_bytes(file: pq.ParquetFile) -> int:
    """Of all values, as the file itself counts them, each list's included; and of its pages before they are decoded."""
    groups = [file.metadata.row_group(at) for at in range(file.metadata.num_row_groups)]
    chunks = [group.column(at) for group in groups for at in range(group.num_columns)]
    return sum(max(VALUE_BYTES * chunk.num_values, chunk.total_uncompressed_size) for chunk in chunks)


def text_bytes(path: Path, column: str) -> tuple[int, int]:
    """(all of a column, its longest text). Read as numbers and a list of different texts: repeats cost nothing."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    total = longest = 0
    with pq.ParquetFile(path, read_dictionary=[column]) as file:
        for batch in file.iter_batches(columns=[column]):
            values = innermost(batch.column(0))
            if not pa.types.is_dictionary(values.type):  # bytes of another type, such as a number
                total += values.nbytes
                continue
            lengths = pc.binary_length(values.dictionary)
            total += pc.sum(pc.take(lengths, values.indices)).as_py() or 0
            longest = max(longest, pc.max(lengths).as_py() or 0)
    return total, longest


def innermost(values: pa.Array) -> pa.Array:
    """The texts of a column of lists or records, of which one part was read."""
    import pyarrow as pa

    while pa.types.is_nested(values.type):
        values = values.flatten() if pa.types.is_struct(values.type) else [values.flatten()]
        values = values[0]
    return values


def is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def in_mb(size: int) -> str:
    return f"{size / 2**20:,.0f} MB"
