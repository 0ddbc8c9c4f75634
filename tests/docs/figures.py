"""Figures: the numbers in a page's text, and the results files that must hold them.

Two ways, one for each kind of page:

- A section that links a file of docs/results is looked up in it. The file has `runs`, each with its command, machine,
  versions, date and load, the measured `values` under speaking keys, and `settings` in words (sizes, limits, goals).
- The numbers of any other section are listed in docs/results/pages.json (README.md: readme.json) by the words around
  them: `figures` with a lookup for each number, and `settings`, which nobody measured, with the reason.

A value is a number, a list or a table of values, or a lookup: {"file", "line", "key"} in a file of docs/results ("key"
alone: in the same values), {"file", "column"} for all lines of a metrics.jsonl, or what CALCULATED makes of values, for
example {"ratio_of": [a, b]}. "only" picks parts of what was found, "times" and "divided_by" scale it.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from operator import sub, truediv
from statistics import fmean
from typing import Any

from blocks import FENCE, ROOT

RESULTS = ROOT / "docs" / "results"

# 1,234.5 or 8.0e-6 or the 1.32 of 1.32x; not the numbers in names: Qwen2.5-0.5B, avg@8, 4-bit, float32, verl#953.
NUMBER = re.compile(
    r"(?<![\w.@#§-])−?(?>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e-?\d+)?)(?:(?=x\b)|(?![\w@-]*[A-Za-z])(?![.]\d))"
)
# What holds no figures, though it may hold numbers. Of blocks only what a command printed is looked at.
NO_FIGURES = [
    re.compile(pattern, re.MULTILINE | re.DOTALL)
    for pattern in (
        r"^\$ [^\n]*",  # a command, in a block that shows what it printed
        r"^    (?:dapo |torchrun |    --)[^#\n]*",  # an indented command; a remark behind it stays
        r"\$\$.*?\$\$|\$[^$\n]*\$",  # formulas
        r"^(?:#+ |\*\*)?\d+\. ",  # numbering
        r"`[^`]*`|\]\([^)]*\)|runs/\S+|arXiv:\S+",  # code, addresses, papers
        r"\d{4}-\d\d-\d\d|\b\d+(?:\.\d+){2,}\S*",  # dates, full versions
        r"\b(?:eq\.|[Ee]quation|Fig\.|section|AIME|seeds?) \d[\d.]*(?:(?:–|, | and | to )\d+)*",
    )
]
NAMED_VALUE = re.compile(r"^\| `[^`|]+` \| ([\d.e-]+) \|", re.MULTILINE)  # a key's value, which other tests compare
LINK = re.compile(r"\]\((results/[^)#]+\.json)\)")
HEADING = re.compile(r"^(#{1,6}) (.*)$", re.MULTILINE)
IN_WORDS = ("command", "machine", "versions", "date", "load", "settings", "note")


# ------------------------------------------------------------------ the text


def blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def printed(fence: re.Match[str]) -> str:
    """Of a block what a command printed, else nothing."""
    if fence[1].split(" ")[0] not in ("text", "console"):
        return blank(fence)
    return re.sub(r"^```.*$", blank, fence[0], flags=re.MULTILINE)


def without_code(text: str) -> str:
    """The text with blanks in place of what holds no figures; every other character stays where it is."""
    text = FENCE.sub(printed, text)
    for no_figures in NO_FIGURES:
        text = no_figures.sub(blank, text)
    return text


def words(text: str) -> re.Pattern[str]:
    """`text` wherever the line breaks, and not as the beginning or end of another number."""
    pattern = r"\s+".join(re.escape(word) for word in text.split())
    return re.compile(rf"(?<![\d.,]){pattern}(?!\d|[.,]\d)")


def numbers_in(text: str) -> list[str]:
    return NUMBER.findall(text)


@dataclass(frozen=True)
class Section:
    """What stands under one heading, as written and with blanks for what holds no figures, and its results files."""

    title: str
    text: str
    prose: str
    files: tuple[str, ...]  # where it links none, those of its chapter


def texts_of(listed: dict[str, Any]) -> list[str]:
    entries = [entry["text"] for kind in ("figures", "settings") for entry in listed.get(kind, [])]
    return [text for entry in entries for text in ([entry] if isinstance(entry, str) else entry)]


def sections_of(text: str, listed: dict[str, Any]) -> list[Section]:
    prose = without_code(text)
    for known in sorted(texts_of(listed), key=len, reverse=True):
        prose = words(known).sub(blank, prose)
    starts = [heading.start() for heading in HEADING.finditer(FENCE.sub(blank, text))]
    found: list[Section] = []
    of_chapter: tuple[str, ...] = ()
    for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
        heading = HEADING.match(text, start)
        files = tuple(dict.fromkeys(LINK.findall(text[start:end])))
        if heading and len(heading[1]) <= 2:
            of_chapter = files
        found.append(Section(heading[2] if heading else "", text[start:end], prose[start:end], files or of_chapter))
    return found


# ------------------------------------------------------------------ the files


@cache
def read(name: str) -> Any:
    text = (RESULTS / name).read_text(encoding="utf-8")
    return [json.loads(row) for row in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)


def at(record: Any, key: str | list[str | int]) -> Any:
    for part in key if isinstance(key, list) else [key]:
        record = record[part]
    return record


def flat(value: Any) -> list[float]:
    return [number for part in value for number in flat(part)] if isinstance(value, list) else [value]


def pairwise(operator: Callable[[float, float], float], a: Any, b: Any) -> Any:
    return [operator(x, y) for x, y in zip(a, b, strict=True)] if isinstance(a, list) else operator(a, b)


CALCULATED: dict[str, Callable[[list[Any]], Any]] = {
    "sum_of": lambda parts: sum(flat(parts)),
    "mean_of": lambda parts: fmean(flat(parts)),
    "min_of": lambda parts: min(flat(parts)),
    "max_of": lambda parts: max(flat(parts)),
    "ratio_of": lambda parts: pairwise(truediv, *parts),
    "difference_of": lambda parts: pairwise(sub, *parts),
}
LOOKUPS = {"file", "key", *CALCULATED}


def looked_up(value: Any, values: Any = None) -> Any:
    """The number, or the numbers, that a value names; a lookup without a file is one in `values`."""
    if not isinstance(value, dict) or not LOOKUPS & value.keys():
        return value
    if calculation := CALCULATED.keys() & value.keys():
        name = calculation.pop()
        found = CALCULATED[name]([looked_up(part, values) for part in value[name]])
    elif "column" in value:
        steps = [row for row in read(value["file"]) if row["step"] <= value.get("up_to_step", row["step"])]
        found = [row[value["column"]] for row in steps]
    else:
        record = read(value["file"]) if "file" in value else values
        found = at(record[value["line"]] if "line" in value else record, value["key"])
    if "only" in value:
        found = [at(found, key) for key in value["only"]]
    return scaled(found, value.get("times", 1) / value.get("divided_by", 1))


def scaled(found: Any, scale: float) -> Any:
    if isinstance(found, list):
        return [scaled(part, scale) for part in found]
    if isinstance(found, dict):
        return {key: scaled(part, scale) for key, part in found.items()}
    return found * scale if isinstance(found, int | float) and scale != 1 else found


def measured(value: Any, values: Any = None) -> Iterator[float]:
    """Every number of a value, lookups followed."""
    value = looked_up(value, values)
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from measured(inner, values)


def under_label(value: Any, label: str) -> Iterator[Any]:
    """Whatever stands under a key that is the label of a table's row, at any depth."""
    if isinstance(value, dict) and not LOOKUPS & value.keys():
        for key, inner in value.items():
            if key == label:
                yield inner
            else:
                yield from under_label(inner, label)


@dataclass(frozen=True)
class Known:
    """What results files say: numbers in words (settings, machine, versions), and measured ones by label."""

    runs: tuple[Any, ...]
    in_words: frozenset[str]
    anywhere: tuple[float, ...]

    def under(self, label: str) -> list[float]:
        found = [(value, run["values"]) for run in self.runs for value in under_label(run["values"], label)]
        return [number for value, values in found for number in measured(value, values)]


@cache
def known_to(files: tuple[str, ...]) -> Known:
    runs = [run for name in files for run in read(name.removeprefix("results/"))["runs"]]
    in_words = [json.dumps(run.get(key, ""), ensure_ascii=False) for run in runs for key in IN_WORDS]
    anywhere = [number for run in runs for number in measured(run["values"], run["values"])]
    return Known(tuple(runs), frozenset(numbers_in("\n".join(in_words))), tuple(anywhere))


# ------------------------------------------------------------------ both


def is_shown(shown: str, value: float) -> bool:
    """Whether `shown` is `value` rounded; from 1,000 on trailing zeros are rounding too. A minus must be meant."""
    if shown.startswith("−") and value > 0:
        return False
    digits = shown.lstrip("−").replace(",", "")
    mantissa, _, exponent = digits.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    if "." not in digits and float(digits) >= 1000:
        unit = 10.0 ** (len(digits) - len(digits.rstrip("0")))
    return abs(abs(value) - float(digits)) <= unit * (0.5 + 1e-6)


def unexplained(section: Section) -> list[str]:
    """The numbers of a section that are neither listed nor in its files.

    A row of a table is looked up under its label, where the files have it as a key; anything else may be any value of
    the files. Without files nothing may be left but 0 and 1 (bounds, switches, exit states) and the values of keys.
    """
    if not section.files:
        values = {match.start(1) for match in NAMED_VALUE.finditer(section.text)}
        left = [number for number in NUMBER.finditer(section.prose) if number.start() not in values]
        return [number[0] for number in left if number[0] not in ("0", "1")]

    known = known_to(section.files)

    def missing(prose: str, values: tuple[float, ...] | list[float]) -> list[str]:
        shown = [number for number in numbers_in(prose) if number not in known.in_words]
        return [number for number in shown if not any(is_shown(number, value) for value in values)]

    found = []
    lines = section.text.split("\n")
    for line, prose, below in zip(lines, section.prose.split("\n"), [*lines[1:], ""], strict=True):
        label = re.sub(r"[*`]", "", line[2:].partition(" | ")[0]).strip()
        is_row = line.startswith("| ") and not below.startswith("|--")
        own = known.under(label) if is_row else []
        found += missing(prose[line.index(" | ") :], own) if own else missing(prose, known.anywhere)
    return found
