"""The labelled lines of `answers_lines.tsv`: final answers that must not be CORRECT, and odd ones that must be."""

from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    label: str
    reference: str
    response: str


def labelled_lines() -> list[Line]:
    text = (Path(__file__).with_name("answers_lines.tsv")).read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if line.strip("# ") and not line.startswith("# ")]
    return [Line(label, reference, _response(said)) for label, reference, said in rows]


def _response(said: str) -> str:
    said = said.replace("⏎", "\n")
    return said.removeprefix("~ ") if said.startswith("~ ") else f"Answer: {said}"
