"""What a model answered so far, a line each, so that a long preparation resumes where it stopped."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from dapo.errors import DataError
from dapo.files import append_line, read_lines


class Journal:
    """A JSONL file with a header that says what it belongs to. A truncated line costs that line, and no other."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.done: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        if path.exists() and path.stat().st_size:
            self._read(header)
        else:
            append_line(self.path, header)

    def _read(self, header: dict[str, Any]) -> None:
        lines = list(read_lines(self.path))
        if not lines and b"\n" not in self.path.read_bytes():  # truncated while its header was written
            append_line(self.path, header)
        elif lines[:1] != [header]:
            raise DataError(
                f"{self.path}: belongs to another source, model or prompt.",
                remedy="Remove it to start anew, or name another --out.",
            )
        self.done = {line["id"]: line for line in lines[1:] if "id" in line}

    def add(self, line: dict[str, Any]) -> None:
        with self._lock:
            append_line(self.path, line)
            self.done[line["id"]] = line
