"""A run in a few lines, as text and as HTML; and the report in a frame: what a model or a name says stays text."""

import html
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from fake_runs import byte_level, evaluation, metrics, row, save_tokenizer, write_rollouts, write_run

from dapo.config import load_recipe
from dapo.report.frame import frame, page_alone
from dapo.report.load import load_run
from dapo.report.page import write_page
from dapo.report.summary import HEIGHT, MARGIN, WIDTH, blocks, chart, html_of, rows_of, text_of
from dapo.trainer.notebook.view import SHOWN_EVENTS, NotebookView

HOSTILE = "</script><script>hacked()</script>\"'><img src=x onerror=hacked()>\u202e"


def test_the_table_says_what_was_learnt(tmp_path: Path):
    folder = write_run(tmp_path / "run", metrics(30), evaluations=[evaluation(0, 0.3), evaluation(30, 0.7)])
    rows = dict(rows_of(load_run(folder)))
    assert rows["state"] == "finished, step 30 of 30"
    assert rows["held-out"] == "avg@8 0.300 → 0.700, improved"
    assert rows["accuracy"] == "0.3 → 0.7"
    assert "resume" not in rows
    text = text_of(load_run(folder))
    assert "0.3 → 0.7  ▁" in text
    assert text.splitlines()[0].startswith("run       ")


def test_an_unfinished_run_says_how_it_goes_on(tmp_path: Path):
    folder = write_run(tmp_path / "run", metrics(5), evaluations=[evaluation(0, 0.3)], wanted=30)
    rows = dict(rows_of(load_run(folder)))
    assert rows["held-out"] == "avg@8 0.300 after step 0"
    assert rows["resume"] == f"dapo resume {folder}"


def test_a_run_without_a_step_has_a_table_and_no_chart(tmp_path: Path):
    folder = write_run(tmp_path / "run", [])
    assert "<svg" not in html_of(load_run(folder))
    assert "step 0 of" in text_of(load_run(folder))


def test_accuracy_that_was_never_anything_is_left_out(tmp_path: Path):
    folder = write_run(tmp_path / "run", metrics(9, accuracy=0, reward__mean=lambda t: t))
    assert "accuracy" not in dict(rows_of(load_run(folder)))
    assert dict(rows_of(load_run(folder)))["reward"] == "0 → 1"


def test_blocks_go_from_the_lowest_to_the_highest():
    assert blocks([0, 7, 3.5, 7]) in ("▁█▄█", "▁█▅█")
    assert blocks([2, 2]) == "▁▁"
    assert len(blocks(list(range(81)), most=40)) == 27  # every third


def test_a_chart_is_drawn_to_scale():
    drawn = ET.fromstring(chart("accuracy", [(1, 0.0), (5, 1.0), (10, 0.5)], 10, [(0, 0.25)]))
    line = next(one for one in drawn if one.tag.endswith("polyline"))
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    inner = WIDTH - 2 * MARGIN
    assert [x for x, _ in places] == [round(MARGIN + inner * step / 10, 1) for step in (1, 5, 10)]
    assert [y for _, y in places] == [HEIGHT - MARGIN, MARGIN, HEIGHT / 2]
    dot = next(one for one in drawn if one.tag.endswith("circle"))
    assert float(dot.attrib["cy"]) == HEIGHT - MARGIN - 0.25 * (HEIGHT - 2 * MARGIN)


def test_a_long_line_keeps_its_last_point():
    series = [(step, float(step)) for step in range(1, 1_002)]
    drawn = chart("length", series, 1_001)
    points = re.search(r'points="([^"]*)"', drawn)
    assert points is not None
    assert len(points[1].split()) <= 402
    assert points[1].endswith(f"{WIDTH - MARGIN:.1f},{MARGIN:.1f}")


def test_names_of_a_run_are_text(tmp_path: Path):
    evaluations = [evaluation(0, 0.3, set=HOSTILE), evaluation(9, 0.4, set=HOSTILE)]
    shown = html_of(load_run(write_run(tmp_path / "run", metrics(9), evaluations=evaluations)))
    assert "<script" not in shown
    assert "<img" not in shown
    assert "\u202e" not in shown


def test_the_frame_cannot_be_closed_by_what_a_model_wrote(tmp_path: Path):
    folder = write_run(tmp_path / "run", metrics(9), evaluations=[evaluation(0, 0.3)])
    write_rollouts(folder, 9, [row(save_tokenizer(folder, byte_level()), HOSTILE)])
    write_page(folder)
    framed = frame(folder)
    assert framed.startswith('<iframe sandbox="allow-scripts" ')
    attribute = re.fullmatch(r"<iframe [^>]*? srcdoc=\"([^\"]*)\"></iframe>", framed)
    assert attribute is not None, "one element, its attribute closed by its own quote alone"
    page = html.unescape(attribute[1])
    nonce = re.search(r"script-src 'nonce-(\w+)';", page)
    assert nonce is not None
    own = re.findall(rf'<script nonce="{nonce[1]}"(?: [^>]*)?>(.*?)</script>', page, re.DOTALL)
    assert page.count("<script") == len(own) + sum(text.count("<script") for text in own)
    data = [text for text in own if text.startswith("dapo.put(")]
    assert any("hacked()" in text for text in data)
    assert all("<" not in text for text in data)


def test_every_frame_has_a_word_of_its_own(tmp_path: Path):
    folder = write_run(tmp_path / "run", metrics(2))
    words = {re.search(r"nonce-(\w+)", page_alone(folder))[1] for _ in range(2)}  # type: ignore[index]
    assert len(words) == 2


def test_a_notebook_shows_events_as_text_and_the_run_to_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[str] = []
    module = ModuleType("IPython.display")
    module.HTML = str  # type: ignore[attr-defined]
    module.display = lambda text, **_: SimpleNamespace(update=drawn.append, first=text)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    folder = write_run(tmp_path / "run", metrics(30), evaluations=[evaluation(0, 0.3), evaluation(30, 0.7)])
    view = NotebookView()
    run = SimpleNamespace(folder=folder, config=load_recipe("quickstart", ["train.steps=30"]).config, step=0)
    view.on_start(run)  # type: ignore[arg-type]
    for number in range(7):
        view.on_event(f"fault {number}", HOSTILE)
    assert drawn[-1].count("hacked()") == 2 * SHOWN_EVENTS
    assert "fault 1" not in drawn[-1]
    assert "fault 6" in drawn[-1]
    assert "<script" not in drawn[-1]
    assert "<img" not in drawn[-1]
    run.step, run.is_complete = 30, True
    view.on_end(run)  # type: ignore[arg-type]
    assert '<progress value="30" max="30">' in drawn[-1]
    assert "step 30 of 30 · finished" in drawn[-1]
    assert "0.300 → 0.700, improved" in drawn[-1]
