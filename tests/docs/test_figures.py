"""Every figure of the README is in a results file that names its command; so are the scores in docs/results.md."""

import bisect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import FENCE, ROOT
from safetensors import safe_open

RESULTS = ROOT / "docs" / "results"
LISTED = json.loads((RESULTS / "readme.json").read_text())
README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"(?<![\w.@-])\d[\d,]*(?:\.\d+)?(?![\w@-]*[A-Za-z])")


def looked_up(lookup: dict) -> float:
    """The value that a lookup of readme.json names."""
    if "mean_of" in lookup:
        return sum(map(looked_up, lookup["mean_of"])) / len(lookup["mean_of"])
    text = (RESULTS / lookup["file"]).read_text()
    scale = lookup.get("times", 1) / lookup.get("divided_by", 1)
    if "sum_of" in lookup:
        return scale * sum(json.loads(row)[lookup["sum_of"]] for row in text.splitlines())
    record = json.loads(text.splitlines()[lookup["line"]]) if "line" in lookup else json.loads(text)
    for part in lookup["key"] if isinstance(lookup["key"], list) else [lookup["key"]]:
        record = record[part]
    return scale * float(record)


def as_shown(value: float, shown: str) -> str:
    """`value` with as many decimals as `shown` has."""
    return f"{value:,.{len(shown.partition('.')[2])}f}"


@pytest.mark.parametrize("entry", LISTED["figures"], ids=[entry["text"] for entry in LISTED["figures"]])
def test_a_figure_is_what_its_file_says(entry: dict):
    assert entry["text"] in README
    assert entry["command"]
    shown = NUMBER.findall(entry["text"])
    assert len(shown) == len(entry["values"])
    for number, lookup in zip(shown, entry["values"], strict=True):
        assert number == as_shown(looked_up(lookup), number)


def test_the_readme_has_no_other_figures():
    """What is left of the text without code, names, links and what readme.json lists has no number in it."""
    left = FENCE.sub(lambda fence: fence[2] if fence[1] == "text" else "", README)
    left = re.sub(r"^\d+\. ", "", left, flags=re.MULTILINE)  # a numbered list
    left = re.sub(r"\*\*\d\. ", "**", left)
    left = re.sub(r"`[^`]*`|\]\([^)]*\)|runs/\S+", " ", left)
    for entry in (*LISTED["figures"], *LISTED["settings"]):
        assert entry["text"] in left, f"{entry['text']!r} is not in the README any more"
    for entry in (*LISTED["figures"], *LISTED["settings"]):
        left = left.replace(entry["text"], " ")
    assert NUMBER.findall(left) == [], "list it in docs/results/readme.json, with its file and command"


def test_the_embedded_model_has_as_many_parameters_as_its_file_says():
    path = ROOT / "src/dapo/quickstart/model/model.safetensors"
    with safe_open(path, framework="pt") as weights:
        n = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
    assert json.loads((RESULTS / "model.json").read_text())["millions_of_parameters"] == round(n / 1e6, 3)


def test_dapo_has_about_so_many_lines():
    lines = (ROOT / "src/dapo/config/presets/dapo.toml").read_text().splitlines()
    assert 25 <= len(lines) < 35


# ------------------------------------------------------------------ docs/results.md


def numbers_in(value: object) -> Iterator[float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(inner)


def recorded_numbers() -> list[float]:
    found: list[float] = []
    for path in RESULTS.rglob("*.json*"):
        text = path.read_text()
        records = [json.loads(text)] if path.suffix == ".json" else [json.loads(row) for row in text.splitlines()]
        found += [number for record in records for number in numbers_in(record)]
    return sorted(found)


def test_scores_in_the_tables_of_the_results_are_recorded():
    """Scores have three decimals: each of them is some recorded number, rounded."""
    recorded = recorded_numbers()
    half = 0.0005 + 1e-9

    def is_recorded(score: float) -> bool:
        at = bisect.bisect_left(recorded, score - half)
        return at < len(recorded) and recorded[at] <= score + half

    rows = [line for line in (ROOT / "docs/results.md").read_text().splitlines() if line.startswith("|")]
    scores = [float(score) for row in rows for score in re.findall(r"(?<![\d.])0\.\d{3}(?!\d)", row)]
    assert len(scores) > 50
    assert [score for score in scores if not is_recorded(score)] == []


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.iterdir() if path.is_dir()))
def test_every_folder_of_results_is_told_of_in_the_docs(name: str):
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert f"docs/results/{name}" in pages


def test_a_figure_that_is_wrong_would_be_found():
    entry = {"text": "from 0.321 to 0.999", "values": LISTED["figures"][0]["values"]}
    assert as_shown(looked_up(entry["values"][1]), "0.999") != "0.999"
    assert NUMBER.findall("avg@8 of Qwen2.5-0.5B is 1,234.5 and 12 %, H200, eq. 9") == ["1,234.5", "12", "9"]


def test_the_path_of_the_results_exists():
    assert Path(RESULTS / "install.json").is_file()
