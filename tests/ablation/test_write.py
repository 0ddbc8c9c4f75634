"""The ladder's files: JSON that is whole, a table and a plot that stay what they are whatever text was typed."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fake_ladder import job, write_done

from dapo.ablation.arms import ARMS
from dapo.ablation.measure import measure
from dapo.ablation.plots import COLOURS, PANEL, curves_plot, round_numbers
from dapo.ablation.summary import machine_of, settings_of, summarise, this_machine
from dapo.ablation.write import write_all
from dapo.report.rollouts.chunks import parse_script

TAG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</script><script>alert(1)</script>|`"<img src=x onerror=alert(1)>\n# mine \u202e'


@pytest.fixture
def written(tmp_path: Path) -> Path:
    planned = [job(tmp_path, name, 0, "train.steps=4") for name in ("naive", "overlong-filter")]
    for at, own in enumerate(planned):
        write_done(own, {0: [0, 2], 4: [2, 3 + at]})
    runs = {own.arm.name: [measure(own)] for own in planned}
    settings = settings_of(
        HOSTILE, planned, seeds=[0], budget="steps=4", command=f"dapo ladder {HOSTILE}", extra=[HOSTILE]
    )
    arms = [own.arm for own in planned] + [ARMS["dapo"]]
    write_all(
        summarise(arms, runs, settings=settings, machine=this_machine(), failed={"dapo seed 0": HOSTILE}), tmp_path
    )
    return tmp_path


def test_the_json_is_the_whole_result(written: Path):
    summary = json.loads((written / "ladder.json").read_text())
    assert [line["name"] for line in summary["arms"]] == ["naive", "overlong-filter"]
    assert summary["arms"][1]["difference"]["value"] == pytest.approx(1 / 8)  # one right of 2 x 4 more
    assert summary["settings"]["recipe"] == HOSTILE
    assert {"torch", "python", "date", "cores"} <= summary["machine"].keys()


def test_text_that_was_typed_cannot_leave_its_place(written: Path):
    table = (written / "ladder.md").read_text()
    assert "<script" not in table
    assert "<img" not in table
    assert "\n# mine" not in table
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in rows} == {17}  # 16 columns
    page = (written / "ladder.html").read_text()
    assert "alert" not in page
    assert "default-src 'none'" in page
    data = (written / "page" / "data.js").read_text()
    assert data.isascii()
    assert parse_script(data)["settings"]["recipe"] == HOSTILE


def test_one_seed_is_said_to_be_one(written: Path):
    note = "With one seed, intervals and p are over problems only"
    assert note in (written / "ladder.md").read_text()
    assert note in (written / "page" / "data.js").read_text()


def test_two_tiny_steps_have_no_p(written: Path):
    change = json.loads((written / "ladder.json").read_text())["arms"][1]["difference"]
    assert change["p"] is None
    assert change["insufficient_evidence"] == "4 steps, at least 6 needed"
    table = (written / "ladder.md").read_text()
    assert "- No p where there is too little evidence: 4 steps, at least 6 needed." in table
    row = next(line for line in table.splitlines() if line.startswith("| + overlong filtering"))
    assert row.split("|")[8].strip() == ""  # arm, late, interval, end, best, difference, interval, p


def test_the_page_finds_everything_beside_it(written: Path):
    page = (written / "ladder.html").read_text()
    for name in ("base.js", "data.js", "plotly.min.js", "ladder.js", "style.css"):
        assert f"page/{name}" in page
        assert (written / "page" / name).stat().st_size > 0
    assert "http" not in page.replace("http-equiv", "")


def test_the_plot_is_a_drawing_with_a_dot_and_a_name_per_arm(written: Path):
    root = ElementTree.fromstring((written / "ladder.svg").read_text())
    assert len(root.findall(f"{TAG}circle")) == 2
    assert {"naive GRPO", "+ overlong filtering"} <= {text.text for text in root.findall(f"{TAG}text")}
    root = ElementTree.fromstring((written / "curves.svg").read_text())
    assert len(root.findall(f"{TAG}polyline")) == 6  # two arms of one seed in three panels


def points_of(line: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (point.split(",") for point in line.get("points", "").split())]


def test_curves_by_updates_tokens_and_minutes_end_where_each_arm_ended():
    """The second arm makes as many updates with twice the tokens in three times the minutes; its seeds are thin."""

    def curve(times: float, last: float) -> list[dict[str, float]]:
        return [
            {"updates": 16.0 * n, "tokens": 1e6 * n * (1 + times), "minutes": n * (1 + 2 * times), "avg": avg}
            for n, avg in enumerate((0.2, last))
        ]

    arms = [
        {"label": "naive", "curve": curve(0, 0.5), "seed_curves": []},
        {"label": "DAPO & more", "curve": curve(1, 0.7), "seed_curves": [curve(1, 0.6), curve(1, 0.8)]},
    ]
    root = ElementTree.fromstring(curves_plot(arms, k=8, target={"avg": 0.5}))
    lines = root.findall(f"{TAG}polyline")
    naive, dapo = ([line for line in lines if line.get("stroke") == colour] for colour in COLOURS[:2])
    assert (len(naive), len(dapo)) == (3, 9)  # a mean in each panel, and two seeds
    ends = [[points_of(line)[-1] for line in own if line.get("stroke-width")] for own in (naive, dapo)]
    left = [points_of(line)[0][0] for line in naive]
    widths = [[x - start for (x, _), start in zip(own, left, strict=True)] for own in ends]
    assert [b / a for a, b in zip(*widths, strict=True)] == pytest.approx([1, 2, 3], rel=1e-3)
    assert max(widths[1]) == pytest.approx(PANEL)
    heights = {y for line in dapo if not line.get("stroke-width") for _, y in points_of(line)[1:]}
    mean = ends[1][0][1]
    assert max(heights) - mean == pytest.approx(mean - min(heights), abs=0.2)  # 0.6 and 0.8 about 0.7
    dotted = {line.get("y1") for line in root.findall(f"{TAG}line") if line.get("stroke-dasharray") == "2 3"}
    assert dotted == {str(ends[0][0][1])}  # the baseline's best is where its curve ends
    assert "DAPO & more" in {text.text for text in root.findall(f"{TAG}text")}


@pytest.mark.parametrize(
    ("most", "numbers"),
    [(160, [0, 50, 100, 150]), (8.4, [0, 2, 4, 6, 8]), (0.005, [0, 0.001, 0.002, 0.003, 0.004, 0.005])],
)
def test_axes_have_round_numbers(most: float, numbers: list[float]):
    assert round_numbers(most) == pytest.approx(numbers)


def test_curves_of_nothing_are_empty_panels():
    root = ElementTree.fromstring(curves_plot([], k=None, target=None))
    assert root.findall(f"{TAG}polyline") == []


def test_a_table_made_later_names_the_machine_of_the_runs_or_none(tmp_path: Path):
    assert machine_of(tmp_path, is_running=False) == {}
    ran = machine_of(tmp_path, is_running=True)
    assert ran == this_machine()
    (tmp_path / "machine.json").write_text(json.dumps(ran | {"cores": 12345}))
    assert machine_of(tmp_path, is_running=False)["cores"] == 12345
