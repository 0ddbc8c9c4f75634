"""A reward in parts in page, terminal and doctor: every number derived from a run made by hand."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_runs import byte_level, metrics, row, save_tokenizer, table_of, write_rollouts, write_run
from rich.console import Console

from dapo.cli.running.terminal import step_line
from dapo.report.answers import decided
from dapo.report.behaviour import load_phrases
from dapo.report.doctor.diagnose import examine
from dapo.report.doctor.findings import NOTE, WARNING, Finding, Thresholds
from dapo.report.examined import examine_run
from dapo.report.load import load_run
from dapo.report.page import write_page
from dapo.report.page_data import run_data
from dapo.report.parts import BINS, histogram
from dapo.report.rollouts.chunks import make_chunks, parse_script, read_index
from dapo.report.rollouts.index import is_index
from dapo.report.terminal import print_run

T = Thresholds()
PARTS = '[rewards.parts]\nformat = { function = "mine:format", weight = 0.5 }\n'
Curve = float | Callable[[float], float]


def part_metrics(steps: int = 30, **changes: Curve) -> list[dict[str, float]]:
    """A healthy run with a part `format`: it rises with accuracy, and has a fifth of the advantages."""
    shape: dict[str, Curve] = {"mean": lambda t: 0.2 + 0.5 * t, "std": 0.4, "share": 0.2, "unknown": 0.0}
    named = {f"reward__part__format__{of}": value for of, value in shape.items()}
    own = {"reward__part__correct__mean": 0.1, "reward__part__correct__std": 0.9, "reward__part__correct__share": 0.8}
    return metrics(steps, **{**own, **named, **changes})


# ---------------------------------------------------------------- the doctor


def found(folder: Path, lines: list[dict[str, float]], weight: float = 0.5) -> dict[str, Finding]:
    run = load_run(write_run(folder, lines, config=PARTS.replace("0.5", str(weight))))
    return {finding.name: finding for finding in examine(run) if finding.name.endswith("-part")}


def moves(start: float, end: float) -> Callable[[float], float]:
    return lambda t: start + (end - start) * t


FALLS, STANDS = moves(0.5, 0.3), 0.5
FINDINGS: dict[str, tuple[dict[str, Curve], dict[str, Curve]]] = {
    "constant-part": ({"reward__part__format__std": 0.0}, {"reward__part__format__std": 1e-9}),
    "deciding-part": (
        {"reward__part__format__share": T.deciding_share + 0.01},
        {"reward__part__format__share": T.deciding_share - 0.01},
    ),
    # Accuracy falls from 0.5 to 0.3; the part rises by more than a quarter of its std, 0.4, or by less.
    "gamed-part": (
        {"accuracy": FALLS, "reward__part__format__mean": moves(0.2, 0.5)},
        {"accuracy": FALLS, "reward__part__format__mean": moves(0.2, 0.29)},
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_fires_on_the_run_that_has_it_and_not_on_the_other(tmp_path: Path, name: str):
    has, has_not = FINDINGS[name]
    finding = found(tmp_path / "has", part_metrics(**has))[name]
    assert finding.level == WARNING
    assert "format" in finding.title
    assert "rewards.parts.format" in finding.remedy
    assert name not in found(tmp_path / "not", part_metrics(**has_not))
    assert not found(tmp_path / "young", part_metrics(**has)[: T.min_steps - 1])


def test_a_healthy_run_has_none(tmp_path: Path):
    assert found(tmp_path, part_metrics()) == {}


def test_a_part_that_has_become_constant_is_a_note(tmp_path: Path):
    lines = part_metrics(reward__part__format__std=lambda t: 0.4 if t < 0.5 else 0.0)
    assert found(tmp_path, lines)["constant-part"].level == NOTE


@pytest.mark.parametrize(
    ("accuracy", "mean", "weight", "is_gamed"),
    [
        (FALLS, moves(0.2, 0.5), 0.5, True),
        (STANDS, moves(0.2, 0.5), 0.5, False),  # nothing was lost
        (moves(0.5, 0.46), moves(0.2, 0.5), 0.5, False),  # less than 0.05
        (FALLS, moves(0.5, 0.2), 0.5, False),  # both fall
        (FALLS, moves(0.5, 0.2), -0.5, True),  # a penalty is gamed where it falls
        (FALLS, moves(0.2, 0.5), -0.5, False),
    ],
)
def test_a_part_is_gamed_where_it_pays_more_for_less(
    tmp_path: Path, accuracy: Curve, mean: Curve, weight: float, is_gamed: bool
):
    lines = part_metrics(accuracy=accuracy, reward__part__format__mean=mean)
    assert ("gamed-part" in found(tmp_path, lines, weight)) is is_gamed


def test_a_run_that_was_gamed_until_nothing_was_left_to_train_on_says_so(tmp_path: Path):
    lines = part_metrics(accuracy=FALLS, reward__part__format__mean=moves(0.2, 0.5))
    lines = [{n: x for n, x in line.items() if "/part/" not in n or line["step"] <= 20} for line in lines]
    assert "gamed-part" in found(tmp_path, lines)


@pytest.mark.parametrize("moved", ["accuracy", "part"])
def test_what_scatters_as_much_as_it_moves_is_no_trend(tmp_path: Path, moved: str):
    """Steps jump up and down by 0.4: over windows of 6, three standard errors are 3 · 1.25 · 0.42 · √(2/6) = 0.91."""
    jumps = {"accuracy": FALLS, "reward__part__format__mean": moves(0.2, 0.5)}
    lines = part_metrics(**jumps)
    for at, line in enumerate(lines):
        line["accuracy" if moved == "accuracy" else "reward/part/format/mean"] += 0.4 * (at % 2)
    assert "gamed-part" not in found(tmp_path, lines)


def test_a_part_without_a_weight_and_the_verifiers_own_have_no_finding(tmp_path: Path):
    lines = metrics(
        **{f"reward__part__{name}__{of}": value for name in ("correct", "logged") for of, value in
           (("mean", 1.0), ("std", 0.0), ("share", 1.0))}
    )  # fmt: skip
    assert found(tmp_path, lines) == {}


# ---------------------------------------------------------------- page and terminal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten steps; of the last one two problems with two responses each, and a part that is unknown in one."""
    folder = write_run(tmp_path / "run", part_metrics(10), config=PARTS, every=10)
    pieces = save_tokenizer(folder, byte_level())
    rows = []
    for p, values in (("p1", [1.0, 0.5]), ("p2", [0.5, None])):
        for i, value in enumerate(values):
            one = row(pieces, "the answer is 42", problem=p, index=i, verdict="WRONG" if i else "CORRECT")
            rows.append(one | {"reward_raw": -1.0 if i else 1.0, "reward_part_format": value})
    write_rollouts(folder, 10, rows)
    return folder


def test_the_index_has_a_histogram_per_part_and_a_mean_per_group(run: Path):
    write_page(run)
    index = read_index(run / "rollouts" / "step-000010.parquet")
    assert index is not None
    assert index["groups"]["parts"] == [[0.75], [0.5]]
    assert index["summary"]["parts"] == [
        ["correct", 0, [[-1.0, -1.0, 2], [1.0, 1.0, 2]]],
        ["format", 1, [[0.5, 0.5, 2], [1.0, 1.0, 1]]],
    ]


def test_the_page_knows_parts_weights_curves_and_what_decides(run: Path):
    data = run_data(examine_run(run), "rollouts")
    assert data["parts"] == [["correct", 1.0], ["format", 0.5]]
    assert data["metrics"]["reward/part/format/mean"][-1] == pytest.approx(0.7)
    assert data["metrics"]["reward/part/format/share"] == [0.2] * 10
    answer = next(answer for answer in data["answers"] if answer["name"] == "parts")
    assert answer["answer"] == "correct 80%, format 20%"
    assert "format (weight 0.5) 0.200 → 0.700" in answer["detail"]
    assert dict(answer["fractions"]) == pytest.approx({"correct": 0.8, "format": 0.2})


def test_shares_that_pull_against_each_other_are_drawn_without_the_negative_one(tmp_path: Path):
    lines = part_metrics(reward__part__correct__share=1.25, reward__part__format__share=-0.25)
    answer = decided(load_run(write_run(tmp_path, lines, config=PARTS)))
    assert answer.answer == "correct 125%, format -25%"
    assert answer.fractions == [("correct", 1.0), ("format", 0.0)]


def test_a_run_of_one_part_looks_as_before(tmp_path: Path):
    folder = write_run(tmp_path / "run", metrics(10), every=10)
    write_rollouts(folder, 10, [row(save_tokenizer(folder, byte_level()), "42", index=i) for i in range(2)])
    examined = examine_run(folder)
    data = run_data(examined, "rollouts")
    assert data["parts"] == []
    assert "parts" not in [answer["name"] for answer in data["answers"]]
    assert "parts" not in examined.indexes[10]["summary"]
    assert "parts" not in examined.indexes[10]["groups"]


def test_the_terminal_shows_columns_values_and_shares(run: Path):
    def printed(problem: str | None) -> str:
        stream = io.StringIO()
        print_run(run, problem=problem, step=None, heat="none", console=Console(file=stream, width=160))
        return stream.getvalue()

    listed = printed(None)
    assert "correct 80%, format 20%" in listed
    head, first, second = listed[listed.index("step 000010") :].splitlines()[1:4]
    assert head.split() == ["problem", "correct", "tokens", "format", "question"]
    assert first.split()[:2] + first.split()[3:4] == ["p1", "1/2", "0.75"]
    assert second.split()[3] == "0.50"
    group = printed("p2")
    assert "verdict +1.00, overlong +0.00, format +0.50" in group
    assert "format unknown" in group


def test_a_step_s_line_has_the_mean_of_each_part():
    line = part_metrics(1)[0] | {"timing.step_s": 1.0}
    assert "correct +0.100  format +0.200" in step_line(line)
    assert "format" not in step_line(metrics(1)[0])


@pytest.mark.parametrize("n", [1, BINS - 1, BINS, BINS + 1, 2 * BINS + 1])
def test_border_a_histogram_counts_every_value_once(n: int):
    unknown, bins = histogram([*(i / n for i in range(n)), None])
    assert unknown == 1
    assert sum(count for _, _, count in bins) == n
    assert len(bins) == min(n, BINS)
    assert all((low == high) is (n <= BINS) for low, high, _ in bins)


def test_a_histogram_of_nothing_and_of_numbers_too_far_apart():
    assert histogram([None, None]) == (2, [])
    huge = [-1e308, 1e308, *map(float, range(BINS))]
    assert histogram(huge) == (0, [[-1e308, 1e308, len(huge)]])


def index_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    *_, (_, script) = make_chunks(table_of(rows), "step-000010", None, load_phrases())
    made: dict[str, Any] = parse_script(script)
    return made


def test_columns_that_are_no_parts_are_left_out_whatever_they_hold(run: Path):
    pieces = save_tokenizer(run, byte_level())
    odd = {"reward_part_a/b": 1.0, "reward_part_": 1.0, "reward_part_<b>": 1.0, "reward_part_ok": "<img src=x>"}
    index = index_of([row(pieces, "42") | odd])
    assert index["summary"]["parts"] == [["correct", 0, [[1.0, 1.0, 1]]], ["ok", 1, []]]
    assert index["groups"]["parts"] == [[None]]


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["groups"].update(parts=[["<img>"]]),
        lambda index: index["groups"].update(parts=[1.0]),
        lambda index: index["groups"].update(parts=[]),
        lambda index: index["summary"].update(parts={}),
        lambda index: index["summary"].update(parts=[["a", 0, [["x", 1, 2]]]]),
        lambda index: index["summary"].update(parts=[[{}, 0, []]]),
        lambda index: index["summary"].update(parts=[["a", 0]]),
    ],
)
def test_an_index_with_other_things_for_parts_is_none_of_ours(run: Path, change: Callable[[dict[str, Any]], None]):
    pieces = save_tokenizer(run, byte_level())
    index = index_of([row(pieces, "42") | {"reward_part_ok": 0.5}])
    assert is_index(index, "step-000010")
    change(index)
    assert not is_index(json.loads(json.dumps(index)), "step-000010")
