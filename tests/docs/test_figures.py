"""Every number in README and docs is in a results file that names its command, or is listed as a setting.

figures.py says how a number is looked up. Left out: docs/log.md, the experiment log, which says what was expected and
tried at the time, and docs/keys.md, which test_pages.py compares with the code.
"""

import json
import runpy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from blocks import ROOT
from figures import (
    LINK,
    NUMBER,
    RESULTS,
    Section,
    is_shown,
    looked_up,
    measured,
    numbers_in,
    read,
    sections_of,
    texts_of,
    unexplained,
    without_code,
    words,
)
from safetensors import safe_open

from dapo.evaluation.avg_at_k import bootstrap
from dapo.report.paired import Difference, paired_difference, resampled_means

LEFT_OUT = ("log.md", "keys.md")
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in LEFT_OUT}
PAGES["README.md"] = (ROOT / "README.md").read_text()
LISTED: dict[str, dict[str, Any]] = {"README.md": read("readme.json"), **read("pages.json")["pages"]}
FIGURES = [(page, entry) for page, listed in LISTED.items() for entry in listed.get("figures", [])]
FILES = sorted(path for folder in ("benchmarks", "figures") for path in (RESULTS / folder).glob("*.json"))


def sections(page: str) -> list[Section]:
    return sections_of(PAGES[page], LISTED.get(page, {}))


@pytest.mark.parametrize("page", PAGES)
def test_every_number_of_a_page_is_in_a_results_file_or_listed(page: str):
    left = {section.title: found for section in sections(page) if (found := unexplained(section))}
    assert left == {}, "put it into the file that the section links, or list it in docs/results/pages.json"


@pytest.mark.parametrize(("page", "entry"), FIGURES, ids=[f"{page}: {entry['text']}" for page, entry in FIGURES])
def test_a_listed_figure_is_what_its_file_says(page: str, entry: dict[str, Any]):
    assert entry["command"]
    for number, lookup in zip(numbers_in(entry["text"]), entry["values"], strict=True):
        assert is_shown(number, looked_up(lookup)), f"{number} in {page}; the file says {looked_up(lookup)}"


@pytest.mark.parametrize("page", LISTED)
def test_what_is_listed_stands_in_the_page(page: str):
    prose = without_code(PAGES[page])
    assert [text for text in texts_of(LISTED[page]) if not words(text).search(prose)] == []


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_results_file_names_command_machine_versions_date_and_load(path):
    for run in json.loads(path.read_text())["runs"]:
        assert all(run[key] for key in ("command", "machine", "versions", "date", "load")), "or say: not recorded"
        assert list(measured(run["values"], run["values"])), "a run without figures"


def test_every_results_file_is_linked_by_a_page():
    linked = {name for text in PAGES.values() for name in LINK.findall(text)}
    assert [str(path) for path in FILES if str(path.relative_to(ROOT / "docs")) not in linked] == []


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.iterdir() if path.is_dir()))
def test_every_folder_of_results_is_told_of_in_the_docs(name: str):
    assert f"results/{name}/" in "".join(PAGES.values())


# ------------------------------------------------------------------ the check can fail


def changed_digits(section: Section) -> list[Section]:
    """The section with the last digit of a number changed, for every number of two digits or more."""
    changed = []
    for number in NUMBER.finditer(section.prose):
        if sum(map(str.isdigit, number[0])) < 2:
            continue
        place = number.end() - 1
        digit = str((int(section.text[place]) + 1) % 10)
        text, prose = (f"{t[:place]}{digit}{t[place + 1 :]}" for t in (section.text, section.prose))
        changed.append(replace(section, text=text, prose=prose))
    return changed


@pytest.mark.parametrize("page", ["benchmarks.md", pytest.param("results.md", marks=pytest.mark.slow)])
def test_a_changed_digit_is_found(page: str):
    """Where it is not, the changed number is another figure of the same section, or of the same row."""
    changed = [section for section in sections(page) if section.files for section in changed_digits(section)]
    found = [section for section in changed if unexplained(section)]
    assert len(changed) > 400
    assert len(found) > 0.9 * len(changed), f"{len(found)} of {len(changed)}"


@pytest.mark.parametrize(
    ("page", "figure", "wrong"),
    [
        ("benchmarks.md", "| **270,600** |", "| **270,700** |"),
        ("benchmarks.md", "by a factor of 4.6", "by a factor of 4.7"),
        ("results.md", "| +0.084 | +0.058 – +0.114 |", "| +0.085 | +0.058 – +0.114 |"),
        ("results.md", "−0.039 – +0.069", "0.039 – −0.069"),
        ("scaling.md", "| 12,915 |", "| 12,916 |"),
        ("doctor.md", "end at 11 to 21 %", "end at 11 to 22 %"),
        ("README.md", "0.321 before, 0.921 after", "0.321 before, 0.931 after"),
        ("faq.md", "between 2.11 and 2.13", "between 2.11 and 2.14"),
    ],
)
def test_a_figure_that_is_wrong_would_be_found(page: str, figure: str, wrong: str):
    assert figure in PAGES[page]
    text = PAGES[page].replace(figure, wrong)
    assert [found for section in sections_of(text, LISTED.get(page, {})) for found in unexplained(section)]


def test_numbers_are_told_from_names():
    text = (
        "avg@8 of Qwen2.5-0.5B is 1,234.5 and −12 %, 1.32x on an H200 in 4-bit, 8.0e-6, verl#953, torch 2.11.0, 1.5B, 7"
    )
    assert numbers_in(without_code(text)) == ["1,234.5", "−12", "1.32", "8.0e-6", "7"]


@pytest.mark.parametrize(
    ("shown", "value", "expected"),
    [
        ("0.62", 0.6249, True),
        ("0.62", 0.626, False),
        ("18,400", 18402.6, True),
        ("18,400", 18460.0, False),
        ("40", 41.0, False),
        ("−0.04", -0.039, True),
        ("−0.04", 0.039, False),
        ("8.0e-6", 8.04e-6, True),
        ("8.0e-6", 8.1e-6, False),
    ],
)
def test_a_figure_is_its_value_rounded(shown: str, value: float, expected: bool):
    assert is_shown(shown, value) is expected


# ------------------------------------------------------------------ figures that can be made again here


def test_the_embedded_model_has_as_many_parameters_as_its_file_says():
    path = ROOT / "src/dapo/quickstart/model/model.safetensors"
    with safe_open(path, framework="pt") as weights:
        n = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
    assert read("model.json")["millions_of_parameters"] == round(n / 1e6, 3)


def test_dapo_has_about_so_many_lines():
    lines = (ROOT / "src/dapo/config/presets/dapo.toml").read_text().splitlines()
    assert 25 <= len(lines) < 35


def test_the_corpus_has_as_many_responses_as_its_file_says():
    corpus = runpy.run_path(str(ROOT / "tests/rewards/corpus.py"))
    labelled, hostile = (
        values["of"] for values in list(read("benchmarks/verdicts.json")["runs"][0]["values"].values())[:2]
    )
    assert (labelled, hostile) == (len(corpus["CASES"]), len(corpus["ALL_HOSTILE"]))


def test_the_intervals_of_gsm8k_are_those_of_its_problems():
    problems = read("gsm8k-coder-1.5b/dapo-seed0/problems.json")
    right = {name: np.array([float(c) for c in row]) for name, row in problems.items() if name != "what"}
    shown = list(read("figures/gsm8k.json")["runs"][1]["values"].values())
    for before, figures in (("base greedy boxed", shown[0]), ("step 20", shown[1])):
        gain = bootstrap(right["step 40"] - right[before])
        assert [round(100 * value, 1) for value in (gain.value, gain.low, gain.high)] == figures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("figures", "folder"),
    [
        *((name, "gsm8k-coder-1.5b/decay") for name in ("gsm8k-decay", "gsm8k-seed1", "gsm8k-twenty")),
        *((name, "gsm8k-coder-1.5b/decay") for name in ("gsm8k-half", "gsm8k-vapo")),
        ("gsm8k-critic", "gsm8k-coder-1.5b/critic"),
        ("math", "math-coder-1.5b"),
        ("gsm8k-python-tool", "gsm8k-python-tool"),
    ],
)
def test_the_differences_of_two_runs_are_those_of_their_problems(figures: str, folder: str):
    problems = read(f"{folder}/problems.json")

    def scores(names: str) -> np.ndarray:
        """[seeds, problems]: `A, step 40 + B, step 40` are two seeds."""
        of = [(name, {"sampled": 4, "aime": 32}.get(name.split(", ")[1], 1)) for name in names.split(" + ")]
        return np.array([[int(right) / k for right in problems[name]] for name, k in of])

    for pair, (value, low, high, p) in read(f"figures/{figures}.json")["runs"][2]["values"].items():
        found = paired_difference(*map(scores, pair.split(" / ")))
        assert [round(100 * x, 1) for x in (found.value, found.low, found.high)] == [value, low, high]
        assert is_shown(str(p), found.p)


@pytest.mark.slow
def test_the_differences_of_the_half_billion_model_are_those_of_its_problems():
    problems = read("gsm8k-coder-0.5b/problems.json")

    def scores(arm: str, n_seeds: int = 5) -> np.ndarray:
        """[seeds, problems]; the untrained model stands beside every seed."""
        k = 4 if arm == "untrained" else 2
        names = ["untrained"] * n_seeds if arm == "untrained" else [f"{arm} seed {seed}" for seed in range(n_seeds)]
        return np.array([[int(right) / k for right in problems[name]] for name in names])

    shown = dict(read("figures/gsm8k-0.5b.json")["runs"][2]["values"])
    ratio = shown.pop("ratio of gains")
    for pair, (value, low, high, *p) in shown.items():
        n_seeds = 3 if "20 steps" in pair else 5  # of the half plan, two were not run
        found = paired_difference(*(scores(arm, n_seeds) for arm in pair.split(" / ")))
        assert [round(100 * x, 1) for x in (found.value, found.low, found.high)] == [value, low, high]
        assert all(is_shown(str(figure), found.p) for figure in p)
    gains = [scores(arm) - scores("untrained") for arm in ("dapo", "naive")]
    resampled = resampled_means(gains[0]) / resampled_means(gains[1])
    found = [gains[0].mean() / gains[1].mean(), *np.quantile(resampled, [0.025, 0.975])]
    assert [round(float(value), 2) for value in found] == ratio
    for pair, shown_of_pair in read("figures/gsm8k-0.5b-arms.json")["runs"][1]["values"].items():
        n_seeds = 1 if {"rft", "ppo"} & set(pair.split(" / ")) else 3
        found_of_pair = paired_difference(*(scores(arm, n_seeds) for arm in pair.split(" / ")))
        assert as_points(found_of_pair) == shown_of_pair
    counts = read("gsm8k-coder-0.5b/long.json")
    means = {
        arm: np.mean([[int(right) / 2 for right in of[str(step)]] for step in range(20, 201, 20)], axis=0)
        for arm, of in counts.items()
        if arm != "what"
    }
    for pair, shown_of_pair in read("figures/gsm8k-0.5b-long.json")["runs"][1]["values"].items():
        assert as_points(paired_difference(*(means[arm][None] for arm in pair.split(" / ")))) == shown_of_pair


def test_what_the_overlong_filter_does_to_long_runs_is_that_of_their_problems():
    counts = read("gsm8k-coder-0.5b/long-filter.json") | {"with, seed 0": read("gsm8k-coder-0.5b/long.json")["DAPO"]}

    def scores(arm: str, steps: range) -> np.ndarray:
        """[seeds, problems], means of the evaluations."""
        of = [counts[f"{arm}, seed {seed}"] for seed in (0, 1)]
        return np.array([np.mean([[int(right) / 2 for right in one[str(step)]] for step in steps], 0) for one in of])

    shown = read("figures/gsm8k-0.5b-filter.json")["runs"][1]["values"]
    for first in (20, 80):
        steps = range(first, 121, 20)
        found = paired_difference(scores("without", steps), scores("with", steps))
        assert as_points(found) == shown[f"without / with, steps {first} to 120"]
        if first == 20:
            assert is_shown(str(shown["p"]), found.p)
            means = [round(100 * scores(arm, steps).mean(), 1) for arm in ("with", "without")]
            assert means == shown["means of steps 20 to 120: with, without"]


def as_points(found: Difference) -> list[float]:
    return [round(100 * x, 1) for x in (found.value, found.low, found.high)]


def test_the_gains_over_four_and_sixteen_bits_are_those_of_the_problems():
    problems = read("qlora-coder-1.5b/problems.json")

    def scores(arm: str, step: int) -> np.ndarray:
        """[seeds, problems]"""
        return np.array([[int(right) / 4 for right in problems[f"{arm}-seed{seed}"][str(step)]] for seed in (0, 1)])

    shown = read("figures/qlora.json")["runs"][1]["values"]
    gains = {arm: scores(arm, 20) - scores(arm, 0) for arm in ("lora", "nf4")}
    assert {arm: round(100 * gain.mean(), 1) for arm, gain in gains.items()} == shown["gains, points"]
    resampled = resampled_means(gains["nf4"]) / resampled_means(gains["lora"])
    ratio = [gains["nf4"].mean() / gains["lora"].mean(), *np.quantile(resampled, [0.025, 0.975])]
    assert [round(float(value), 2) for value in ratio] == shown["ratio of gains"]
    found = paired_difference(scores("nf4", 20), scores("lora", 20))
    *points, p = shown["nf4 / lora, last scores"]
    assert as_points(found) == points
    assert is_shown(str(p), found.p)


def test_the_differences_between_two_ranks_and_one_are_those_of_the_problems():
    problems = read("two-ranks-coder-0.5b/problems.json")
    scores = {
        layout: np.array([[int(right) / 2 for right in problems[layout]["10"]]])
        for layout in ("one", "replicated", "sharded")
    }
    for pair, shown in read("figures/two-ranks.json")["runs"][2]["values"].items():
        assert as_points(paired_difference(*(scores[layout] for layout in pair.split(" / ")))) == shown


@pytest.mark.parametrize("name", ["parity", "toy"])
def test_the_differences_between_trl_and_us_are_those_of_the_problems(name: str):
    found = read(f"parity-coder-0.5b/{name}.json")

    def scores(side: str, step: int) -> np.ndarray:
        """[seeds, problems]"""
        return np.array(
            [[int(right) / 4 for right in of_seed[str(step)]] for of_seed in found["correct"][side].values()]
        )

    for point in found["points"]:
        again = paired_difference(scores("dapo", point["step"]), scores("trl", point["step"]))
        for key in ("value", "low", "high"):
            assert point["difference"][key] == pytest.approx(getattr(again, key), abs=1e-6)
    after = [point["step"] for point in found["points"]][1:]
    means = [np.mean([scores(side, step) for step in after], axis=0) for side in ("dapo", "trl")]
    for n, told in enumerate([found, *found.get("by_seed", ())]):
        of = [mean if n == 0 else mean[n - 1 : n] for mean in means]
        assert told["difference"]["value"] == pytest.approx(paired_difference(*of).value, abs=1e-6)


def test_what_math_shows_of_the_untrained_model_is_that_of_its_problems():
    problems = read("math-coder-1.5b/problems.json")
    shown = read("figures/math.json")["runs"][1]["values"]
    right = {name: np.array([int(c) for c in row]) for name, row in problems.items() if name != "what"}
    greedy, sampled = right["base, greedy"], right["base, sampled"]
    assert np.round([greedy.mean(), sampled.mean() / 4, (sampled > 0).mean()], 4).tolist() == shown["before"][:3]
    examples = right["base, greedy with examples"]
    assert round(float(examples.mean()), 4) == shown["before, three examples in the prompt"][0]
