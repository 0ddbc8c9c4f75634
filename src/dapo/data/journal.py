"""What a model answered so far, a line each, so that a long preparation goes on where it stopped."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from dapo.errors import DataError
from dapo.tracking.files import append_line


class Journal:
    """A JSONL file with a header that says what it belongs to. A torn last line is cut off; the rest is kept."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.done: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        if path.exists() and path.stat().st_size:
            self._read(header)
        else:
            append_line(self.path, header)

    def _read(self, header: dict[str, Any]) -> None:
        whole, _, torn = self.path.read_bytes().rpartition(b"\n")
        lines: list[dict[str, Any]] = []
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            raise DataError(
                f"{self.path}: row {len(lines) + 1}: not a journal.",
                remedy="Remove it to start anew, or name another --out.",
            ) from None
        if whole and lines[0] != header:
            raise DataError(
                f"{self.path}: belongs to another source, model or prompt.",
                remedy="Remove it to start anew, or name another --out.",
            )
        if torn:
            with self.path.open("r+b") as file:
                file.truncate(len(whole) + 1 if whole else 0)
        if not whole:
            append_line(self.path, header)
        self.done = {line["id"]: line for line in lines[1:]}

    def add(self, line: dict[str, Any]) -> None:
        with self._lock:
            append_line(self.path, line)
            self.done[line["id"]] = line
