"""Verdicts of a judge by what was asked, in a file that only grows: a line is on disk before its verdict counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.files import append_line, read_lines
from dapo.rewards.judging.dialogue import Unreadable, checked
from dapo.rewards.judging.rubric import Rubric

PATTERN = "verdicts*.jsonl"


@dataclass(slots=True)
class Spent:
    """What asking has cost so far, replies that could not be read included."""

    requests: int = 0
    seconds: float = 0.0
    usd: float = 0.0

    def add(self, seconds: float, usd: float) -> None:
        self.requests += 1
        self.seconds += seconds
        self.usd += usd


class VerdictCache:
    """`folder` is the run's, with a file for each rank; all files are read. None keeps nothing on disk."""

    def __init__(self, folder: Path | None, rubric: Rubric, *, rank: int = 0) -> None:
        self.path = folder / (f"verdicts-{rank}.jsonl" if rank else "verdicts.jsonl") if folder else None
        self.known: dict[str, dict[str, float]] = {}
        self.spent = Spent()
        self._lock = threading.Lock()
        for path in sorted(folder.glob(PATTERN)) if folder else ():
            for line in read_lines(path):
                self._recall(line, rubric)

    def _recall(self, line: dict[str, Any], rubric: Rubric) -> None:
        """One line of a file, which may be anybody's: what does not fit the rubric is no verdict."""
        try:
            self.spent.add(max(0.0, float(line.get("seconds", 0))), max(0.0, float(line.get("usd", 0))))
            if isinstance(line.get("key"), str) and "scores" in line:
                self.known[line["key"]] = checked(line["scores"], rubric)
        except (Unreadable, TypeError, ValueError):
            return

    def note(self, key: str, scores: dict[str, float] | None, *, seconds: float, usd: float, model: str) -> None:
        """A reply: its verdict, or only its cost where it could not be read."""
        with self._lock:
            self.spent.add(seconds, usd)
            if scores is not None:
                self.known[key] = scores
            if self.path is not None:
                line = {"key": key, "model": model, "seconds": round(seconds, 3), "usd": usd}
                self.path.parent.mkdir(parents=True, exist_ok=True)
                append_line(self.path, line if scores is None else {**line, "scores": scores})
