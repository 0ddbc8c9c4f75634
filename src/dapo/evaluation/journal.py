"""The answers of an evaluation on disk, so that a killed one can be resumed: a line of settings, a line per answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dapo.errors import DataError, DiskError
from dapo.evaluation.runner import Answered, Answers
from dapo.files import read_lines, replace_file
from dapo.types import Verdict


class AnswerJournal:
    """The file of one evaluation. A file with other settings is refused; a truncated last line is dropped."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        if path.is_dir():
            raise DataError(f"{path}: is a folder.", remedy="Name a file.")
        lines = list(read_lines(path))
        if path.exists() and path.stat().st_size and (not lines or lines[0].get("settings") != settings):
            raise DataError(
                f"{path}: holds something else than this evaluation's responses.", remedy="Name a new file."
            )
        try:
            answers = [Answered(**{**line, "verdict": Verdict(line["verdict"])}) for line in lines[1:]]
        except (TypeError, KeyError, ValueError):
            raise DataError(f"{path}: holds lines that are no responses.", remedy="Name a new file.") from None
        self.known: Answers = {(answer.problem_id, answer.response_index): answer for answer in answers}
        self._lines = lines or [{"settings": dict(settings)}]

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines))
            self._file = self.path.open("a", encoding="utf-8")
        except (OSError, DiskError) as error:
            raise self._cannot_write(error) from None
        return self

    def add(self, answer: Answered) -> None:
        try:
            self._file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError | DiskError) -> DataError:
        why = error.message if isinstance(error, DiskError) else f"{self.path}: cannot be written: {error.strerror}."
        return DataError(why, remedy="Name another file, or free space: then run the same command again to resume.")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # `add` has reported what could not be written
            self._file.close()
