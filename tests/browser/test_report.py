"""The page in a real browser, from the file system: no error, no network, and everything a reader would do."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from big_run import write_big_run
from fake_ladder import job, write_done
from fake_runs import byte_level, evaluation, metrics, row, save_tokenizer, write_rollouts, write_run
from install import find_or_get

from dapo.ablation.measure import measure
from dapo.ablation.summary import settings_of, summarise, this_machine
from dapo.ablation.write import write_all
from dapo.files import append_line, cut_back
from dapo.report.frame import frame
from dapo.report.page import write_page
from dapo.report.serve import make_server

pytestmark = pytest.mark.browser

HOSTILE = (
    "<script>window.hacked = 1</script> </script> <img src=x onerror='window.hacked = 1'> \u202eright to left\u202c "
    "\u200f "
    "<!-- \u2028 \x00 &lt;b&gt; "
)


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    path = find_or_get()
    with sync_playwright() as playwright:
        options = {} if path == "bundled" else {"executable_path": path}
        browser = playwright.chromium.launch(args=["--no-sandbox"], **options)
        yield browser
        browser.close()


class Watch:
    """A page whose every error and request is remembered."""

    def __init__(self, browser, width: int = 1360, height: int = 900, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("requestfailed", lambda request: self.errors.append(f"failed: {request.url}"))

    def open(self, path: Path):
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("[data-ready]")
        return self.page

    def check(self) -> None:
        assert self.errors == []
        assert [url for url in self.requests if not url.startswith(("file://", "data:", "blob:"))] == []
        assert self.page.evaluate("window.hacked") is None


@pytest.fixture
def watch(browser) -> Iterator[Watch]:
    watch = Watch(browser)
    yield watch
    watch.page.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Twenty steps; problem p1 in both recorded steps; hostile and very long responses; some clipped tokens."""
    folder = tmp_path_factory.mktemp("runs") / "a run"
    write_run(folder, metrics(20), evaluations=[evaluation(0, 0.5), evaluation(20, 1.0)], every=10)
    pieces = save_tokenizer(folder, byte_level())
    for step in (10, 20):
        rows = []
        for p in ("p1", f"p{step}", "hostile"):
            for i in range(4):
                text = (
                    f"step {step}: the answer is 4{i}. wait, {'zebra ' if (p, step) == ('p10', 10) else ''}let me check"
                )
                if p == "hostile":
                    text = [HOSTILE, "x" * 100_000, HOSTILE * 20, "a plain one"][i]
                one = row(pieces, text, problem=p, index=i, verdict="WRONG" if i else "CORRECT", extracted=f"4{i}")
                one["clip"][[3, 5]] = -1, 1
                rows.append(
                    one
                    | {
                        "question": f"{p}? {HOSTILE if p == 'hostile' else ''}",
                        "stop_reason": "LENGTH" if i == 3 else "EOS",
                    }
                )
        write_rollouts(folder, step, rows)
    with (folder / "eval_problems.jsonl").open("w") as file:
        for step, correct in ((0, [0, 8]), (20, [8, 8])):
            line = {
                "step": step,
                "set": "held-out",
                "k": 8,
                "ids": ["a", "b"],
                "questions": [HOSTILE, "q"],
                "correct": correct,
            }
            file.write(json.dumps(line) + "\n")
    write_page(folder)
    return folder


def until(page, holds: str, seconds: float = 1800) -> None:
    """Wait for an expression; Playwright's own way needs eval, which the page's policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(holds):
        assert time.monotonic() < end, holds
        page.wait_for_timeout(50)


def pick(page, problem: str) -> None:
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.locator(".group-row", has_text=f"{problem}?").first.click()
    page.wait_for_selector(f".question code:text-is('{problem}')")


def text_of(element) -> str:
    """What is shown of a response: the browser lays one out when it comes into view, and before that has no text."""
    element.scroll_into_view_if_needed()
    for _ in range(2400):
        if text := element.inner_text():
            return text
        element.page.wait_for_timeout(50)
    raise AssertionError("it came into view, and nothing is shown")


def test_the_page_opens_and_draws_without_error_or_network(watch: Watch, run: Path):
    page = watch.open(run / "report.html")
    assert page.locator(".figure .to.inconclusive").inner_text() == "1.000"  # of two problems nothing can be said
    assert page.locator(".figure .what").inner_text() == "avg@8 on held-out problems, before → after step 20"
    assert page.locator(".answer").count() == 6
    page.locator("#chart-accuracy").scroll_into_view_if_needed()
    page.wait_for_selector("#chart-accuracy .plot path.js-line")
    for _ in range(12):  # every chart comes into view
        page.mouse.wheel(0, 800)
        page.wait_for_timeout(120)
    drawn = page.locator(".chart .plot .main-svg").count()
    assert drawn >= 14
    watch.check()


def test_the_page_in_a_notebooks_frame_is_whole_and_stays_inside(watch: Watch, run: Path, tmp_path: Path):
    around = tmp_path / "notebook.html"
    around.write_text(f"<!doctype html><meta charset='utf-8'><body>{frame(run)}</body>", encoding="utf-8")
    watch.page.goto(around.as_uri())
    inner = watch.page.frames[1]
    inner.wait_for_selector("[data-ready]")
    inner.click("#links >> text=Curves")
    inner.wait_for_selector("#chart-accuracy .plot path.js-line")
    inner.click("#links >> text=Rollouts")
    inner.locator(".group-row", has_text="hostile?").first.click()
    inner.wait_for_selector(".question code:text-is('hostile')")
    assert "<script>window.hacked = 1</script>" in text_of(inner.locator(".response").first)
    assert inner.url == "about:srcdoc", "a link to a section does not leave the page"
    assert inner.evaluate("window.origin") == "null"
    assert inner.evaluate("window.hacked") is None
    watch.check()


def test_smoothing_the_axis_and_the_paper_change_the_curves(watch: Watch, run: Path):
    page = watch.open(run / "report.html")
    page.locator("#chart-entropy").scroll_into_view_if_needed()
    line = page.locator("#chart-accuracy .plot path.js-line")
    line.first.wait_for()
    assert line.count() == 1
    page.get_by_role("button", name="smoother").click()
    until(page, "document.querySelectorAll('#chart-accuracy .plot path.js-line').length === 2")  # raw, and smooth
    page.get_by_role("button", name="tokens", exact=True).click()
    page.wait_for_timeout(300)
    assert page.locator("#chart-entropy .paper").is_hidden()
    page.check("#paper")
    assert page.locator("#chart-entropy .paper").is_visible()
    watch.check()


def test_one_hover_moves_all_charts(watch: Watch, run: Path):
    page = watch.open(run / "report.html")
    page.locator("#chart-reward, #chart-entropy").first.scroll_into_view_if_needed()
    page.wait_for_selector("#chart-accuracy .plot path.js-line")
    page.wait_for_selector("#chart-entropy .plot path.js-line", state="attached")  # flat: no height to see
    page.wait_for_timeout(300)
    box = page.locator("#chart-accuracy .plot .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#chart-entropy .readout .where")
    assert page.locator("#chart-entropy .readout .where").inner_text().startswith("step 1")  # the middle of 1 to 20
    assert page.locator("#chart-entropy .cross").is_visible()
    watch.check()


def test_a_group_opens_and_its_heat_maps_switch(watch: Watch, run: Path):
    page = watch.open(run / "report.html")
    pick(page, "p1")
    assert page.locator(".response").count() == 4
    assert text_of(page.locator(".response").first).startswith("correct")
    seen = set()
    for heat in ("probability", "entropy", "ratio", "advantage", "clipped", "plain"):
        page.locator("#heat").get_by_role("button", name=heat).click()
        colours = page.eval_on_selector_all(
            ".response:first-child pre span", "spans => spans.map(s => s.style.backgroundColor)"
        )
        seen.add(tuple(colours))
        if heat == "clipped":
            assert [at for at, colour in enumerate(colours) if colour] == [3, 5]
            assert "--low" in colours[3]
            assert "--high" in colours[5]
        if heat == "plain":
            assert not any(colours)
    assert len(seen) == 6
    page.locator(".response pre span").nth(4).hover()
    assert "token 5" in page.locator("#tip").inner_text()
    watch.check()


def test_a_word_is_found_here_and_in_other_steps(watch: Watch, run: Path):
    page = watch.open(run / "report.html")
    pick(page, "p1")
    page.fill("#search", "zebra")
    page.click("#search-go")
    page.wait_for_selector(".status:has-text('0 of 3 problems')")  # not in step 20
    page.check("#filter-everywhere")
    page.click("#search-go")
    page.wait_for_selector(".question code:text-is('p10')")
    assert page.locator(".step-label").inner_text() == "step 10"
    assert "zebra" in "".join(page.locator(".response mark").all_text_contents())
    page.fill("#search", "")
    page.wait_for_selector(".status:has-text('3 of 3 problems')")
    watch.check()


def test_filters(watch: Watch, run: Path):
    page = watch.open(run / "report.html")
    pick(page, "p1")
    rows = page.locator(".group-row")
    assert rows.count() == 3
    page.select_option("#filter-behaviour", "check")
    assert rows.count() == 2  # not the hostile one
    page.select_option("#filter-behaviour", "any")
    page.select_option("#filter-verdict", "UNPARSEABLE")
    assert rows.count() == 0
    page.select_option("#filter-verdict", "WRONG")
    for name in ("onlyTruncated", "onlySplit", "onlyClipped"):
        page.check(f"#filter-{name}")
    assert rows.count() == 3
    watch.check()


def test_a_mixture_has_a_curve_per_source_and_a_filter(watch: Watch, tmp_path: Path):
    names, measured = ("one", "__proto__"), ("share_submitted", "share_kept", "accuracy")
    lines = [line | {f"source/{name}/{metric}": 0.5 for name in names for metric in measured} for line in metrics(10)]
    run = write_run(tmp_path / "run", lines, every=10, train="{one = {}, __proto__ = {weight = 2.0}}")
    pieces = save_tokenizer(run, byte_level())
    problems = ("one/a", "__proto__/a", "__proto__/b")
    write_rollouts(run, 10, [row(pieces, "42", problem=p, index=i) for p in problems for i in range(2)])
    page = watch.open(write_page(run))
    chart = page.locator("#chart-sources-share")
    chart.scroll_into_view_if_needed()
    page.wait_for_selector("#chart-sources-share .readout b")
    shown = chart.locator(".readout").inner_text()
    assert all(f"{name} {what}" in shown for name in names for what in ("submitted", "trained on"))
    assert page.locator("#chart-sources-length").count() == 0  # nothing to draw
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.wait_for_selector(".group-row")
    rows = page.locator(".group-row")
    assert rows.count() == 3
    page.select_option("#filter-source", "__proto__")
    assert rows.count() == 2
    watch.check()


def test_a_problem_is_followed_over_the_steps(watch: Watch, run: Path):
    page = watch.open(run / "report.html")
    pick(page, "p1")
    page.wait_for_selector(".visit")
    assert page.locator(".over .visit").all_inner_texts() == ["10 1/4", "20 1/4"]
    page.locator(".over .visit").first.click()
    page.wait_for_selector(".response pre:has-text('step 10: the answer')")
    assert page.locator(".step-label").inner_text() == "step 10"
    watch.check()


def test_hostile_and_very_long_text_is_shown_as_text(watch: Watch, run: Path):
    page = watch.open(run / "report.html")
    pick(page, "hostile")
    first = text_of(page.locator(".response pre").first)
    assert "<script>window.hacked = 1</script> </script> <img src=x onerror=" in first
    for mark in ("⟨U+202E⟩", "⟨U+200F⟩", "⟨U+2028⟩", "⟨U+0000⟩"):
        assert mark in first
    page.locator(".response").nth(1).get_by_role("button").click()  # all of the 100,000 characters
    until(page, "document.querySelectorAll('.response pre')[1].textContent.length >= 100000")
    assert page.locator("#rollouts img, #rollouts script, #flips img").count() == 0
    page.locator("#flips").scroll_into_view_if_needed()
    assert "<script>" in page.locator(".flip .text").first.inner_text()
    watch.check()


def test_an_episode_is_shown_turn_by_turn(watch: Watch, tmp_path: Path):
    folder = tmp_path / "episodes"
    write_run(folder, metrics(10), evaluations=[], every=10)
    pieces = save_tokenizer(folder, byte_level())
    said = {"Is it 50?": True, " Higher.": False, " Is it 75?": True}
    own = [is_own for text, is_own in said.items() for _ in pieces.tokenizer.encode(text).ids]
    rows = [row(pieces, "".join(said), problem="p", index=i) for i in range(2)]
    own.append(True)  # the end token
    write_rollouts(folder, 10, [one | {"own": own} for one in rows])
    write_page(folder)
    page = watch.open(folder / "report.html")
    pick(page, "p")
    first = page.locator(".response").first
    assert first.locator(".speaker").all_text_contents() == ["model", "environment", "model"]
    assert "".join(first.locator(".is-other").all_text_contents()) == " Higher."
    assert "2 turns" in text_of(first.locator("header"))
    first.locator(".is-other").first.hover()
    assert "not trained on" in page.locator("#tip").inner_text()
    watch.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_reads_it_without_scrolling_sideways(browser, run: Path, scheme: str):
    watch = Watch(browser, width=375, height=740, scheme=scheme)
    page = watch.open(run / "report.html")
    pick(page, "hostile")
    page.wait_for_selector(".response pre")
    for section in ("overview", "curves", "behaviour", "rollouts", "flips", "record"):
        page.locator(f"#{section}").scroll_into_view_if_needed()
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, section
    watch.check()
    page.close()


def test_light_and_dark(watch: Watch, run: Path):
    page = watch.open(run / "report.html")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    watch.check()


def test_two_runs_are_compared(watch: Watch, run: Path, tmp_path: Path):
    other = write_run(
        tmp_path / "other", metrics(30, accuracy=0.2), evaluations=[evaluation(0, 0.2), evaluation(30, 0.25)]
    )
    page = watch.open(write_page(run, other, out=tmp_path / "both"))
    assert page.locator(".run").count() == 2
    page.locator("#chart-accuracy").scroll_into_view_if_needed()
    until(page, "document.querySelectorAll('#chart-accuracy .plot path.js-line').length === 2")
    pick(page, "p1")  # its responses are read from the other folder
    assert page.locator(".response").count() == 4
    watch.check()


def test_which_run_is_better_is_said_with_its_interval(watch: Watch, tmp_path: Path):
    """150 and 190 of 300 problems, the same 150 among them: 0.133 above, and a mark on the good side of zero."""
    runs = []
    for name, n in (("first", 150), ("second <b>", 190)):
        runs.append(write_run(tmp_path / name, metrics(20), evaluations=[evaluation(0, 0.3), evaluation(20, n / 300)]))
        line = {
            "step": 20,
            "set": "held-out",
            "k": 1,
            "ids": [f"{at:03}" for at in range(300)],
            "questions": ["?"] * 300,
        }
        (runs[-1] / "eval_problems.jsonl").write_text(
            json.dumps(line | {"correct": [int(at < n) for at in range(300)]}) + "\n"
        )
    page = watch.open(write_page(*runs, out=tmp_path / "both"))
    card = page.locator(".difference")
    assert card.locator(".short.good").text_content() == "0.133 above first"
    assert card.locator("tbody tr").count() == 1
    assert "second <b>" in card.locator(".question").text_content()
    assert card.locator(".whisker.good circle").count() == 1
    assert page.locator(".figure .to.improved").count() == 2
    watch.check()


def test_all_charts_are_drawn_without_scrolling(watch: Watch, run: Path):
    """As a printed page needs them."""
    page = watch.open(run / "report.html")
    until(page, "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('.main-svg'))")
    assert page.evaluate("document.querySelectorAll('.plot').length") > 10
    watch.check()


@pytest.mark.parametrize("what", ["no steps", "torn", "no rollouts"])
def test_what_is_missing_is_said(watch: Watch, tmp_path: Path, what: str):
    folder = write_run(
        tmp_path / "run", [] if what == "no steps" else metrics(5), every=5 if what == "no rollouts" else 0
    )
    if what == "torn":
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 6, "acc')
    page = watch.open(write_page(folder))
    text = page.locator("main").inner_text()
    expected = {
        "no steps": "No step has finished yet",
        "torn": "line 6 is corrupt",
        "no rollouts": "step-000005.parquet: missing",
    }
    assert expected[what] in text
    assert "No step has been recorded" in text
    watch.check()


def test_a_piece_that_is_gone_is_said(browser, tmp_path: Path):
    folder = write_run(tmp_path / "run", metrics(10), every=10)
    pieces = save_tokenizer(folder, byte_level())
    write_rollouts(folder, 10, [row(pieces, "x", index=i) for i in range(2)])
    page_path = write_page(folder)
    (folder / "rollouts" / "step-000010" / "000.js").unlink()
    watch = Watch(browser)
    page = watch.open(page_path)
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.wait_for_selector(".group .missing")
    assert "000.js" in page.locator(".group .missing").inner_text()
    page.close()


def test_a_run_of_a_thousand_steps(watch: Watch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    writing = write_big_run(tmp_path / "big")
    start = time.perf_counter()
    command = [sys.executable, "-m", "dapo", "report", str(tmp_path / "big")]
    subprocess.run(command, check=True, capture_output=True, timeout=1800)
    indexing = time.perf_counter() - start
    start = time.perf_counter()
    page = watch.open(tmp_path / "big" / "report.html")
    interactive = time.perf_counter() - start
    page.locator("#chart-accuracy").scroll_into_view_if_needed()
    page.wait_for_selector("#chart-accuracy .plot path.js-line")
    curves = time.perf_counter() - start
    start = time.perf_counter()
    page.locator("#rollouts").scroll_into_view_if_needed()
    page.wait_for_selector(".response")
    group = time.perf_counter() - start
    with capsys.disabled():
        print(
            f"\n1,000 steps, 512 x 16 every tenth: scripts of one step {writing:.1f} s, indexed in {indexing:.1f} s, "
            f"page interactive after {interactive:.2f} s, curves after {curves:.2f} s, a group in {group:.2f} s"
        )
    assert page.locator(".group-row").count() == 512
    page.wait_for_selector(".over .visit")
    assert page.locator(".over .visit").count() == 100
    watch.check()


def test_the_live_page_shows_new_steps_and_survives_a_resume(browser, tmp_path: Path):
    folder = write_run(tmp_path / "run", metrics(5), evaluations=[evaluation(0, 0.3)], wanted=50)
    server = make_server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        page = browser.new_page()
        errors: list[str] = []
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.wait_for_selector(".state:has-text('step 5 of 50')")
        append_line(folder / "metrics.jsonl", metrics(6)[-1])
        page.wait_for_selector(".state:has-text('step 6 of 50')", timeout=1_800_000)
        cut_back(folder / "metrics.jsonl", 3)
        page.wait_for_selector(".state:has-text('step 3 of 50')", timeout=1_800_000)
        for line in metrics(50)[3:]:
            append_line(folder / "metrics.jsonl", line)
        page.wait_for_selector(".state:has-text('finished')", timeout=1_800_000)
        assert errors == []
        page.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_ladders_page_draws_its_table_and_plots_and_keeps_text_as_text(watch: Watch, tmp_path: Path):
    planned = [job(tmp_path, name, 0, "train.steps=4") for name in ("naive", "overlong-filter")]
    for at, own in enumerate(planned):
        write_done(own, {0: [0, 2], 4: [2, 3 + at]})
    settings = settings_of(HOSTILE, planned, seeds=[0], budget="steps=4", command=HOSTILE, extra=[])
    runs = {own.arm.name: [measure(own)] for own in planned}
    write_all(
        summarise([own.arm for own in planned], runs, settings=settings, machine=this_machine(), failed={}), tmp_path
    )
    page = watch.open(tmp_path / "ladder.html")
    assert page.locator("#table tbody tr").count() == 2
    assert page.locator("#published tbody tr").count() == 2
    assert "<script>window.hacked" in page.locator("h1").inner_text()
    page.get_by_role("button", name="generated tokens").click()
    assert page.locator("#curves-plot .xtitle").text_content() == "generated tokens"
    assert page.locator("#dots .point").count() == 2
    watch.check()


@pytest.fixture(scope="module")
def run_in_parts(tmp_path_factory) -> Path:
    """A reward of two parts beside what is correct, one of them without a weight."""
    folder = tmp_path_factory.mktemp("runs") / "in parts"
    shape = {"mean": lambda t: 0.2 + 0.5 * t, "std": 0.4, "unknown": 0.0}
    named = {
        f"reward__part__{name}__{of}": value for name in ("correct", "neat", "words") for of, value in shape.items()
    }
    named |= {"reward__part__correct__share": 0.8, "reward__part__neat__share": 0.2}
    config = '[rewards.parts]\nneat = { function = "mine:neat", weight = -0.5 }\n'
    write_run(folder, metrics(20, **named), every=20, config=config)
    pieces = save_tokenizer(folder, byte_level())
    rows = []
    for p in ("p1", "p2"):
        for i in range(4):
            values = {"reward_part_neat": None if i == 3 else i / 4, "reward_part_words": float(3 * i)}
            rows.append(row(pieces, f"the answer is 4{i}", problem=p, index=i, reward_raw=-1.0 if i else 1.0) | values)
    write_rollouts(folder, 20, rows)
    write_page(folder)
    return folder


def test_every_part_has_its_curve_its_histogram_and_its_column(watch: Watch, run_in_parts: Path):
    page = watch.open(run_in_parts / "report.html")
    assert "correct 80%, neat 20%" in page.locator(".answer", has_text="Which part of the reward decides?").inner_text()
    page.locator("#chart-part-neat").scroll_into_view_if_needed()
    page.wait_for_selector("#chart-part-neat .plot path.js-line")
    assert page.locator("#chart-part-shares .readout").inner_text().split() == ["correct", "80", "%", "neat", "20", "%"]
    assert "before its weight of -0.5" in page.locator("#chart-part-neat .note").inner_text()
    assert "only recorded" in page.locator("#chart-part-words .note").inner_text()
    pick(page, "p1")
    shown = page.locator("#part-histograms .histogram")
    assert [part.split("\n")[0] for part in shown.all_inner_texts()] == ["correct", "neat unknown in 2", "words"]
    heights = shown.nth(0).locator(".bins span").evaluate_all("bars => bars.map(bar => bar.style.height)")
    assert [round(float(height.rstrip("%"))) for height in heights] == [100, 33]  # six responses at -1, two at 1
    assert page.locator(".group-row.head .part").all_inner_texts() == ["neat", "words"]
    assert page.locator(".group-row", has_text="p1?").locator(".part").all_inner_texts() == ["0.250", "4.500"]
    heads = page.locator(".response header")
    assert "neat +0.00 words +0.00" in text_of(heads.first)
    assert "neat unknown words +9.00" in text_of(heads.last)
    watch.check()


def test_curves_of_episodes_are_there_where_a_run_has_some(browser, tmp_path: Path):
    own = {"episode/turns": 2.5, "episode/tool_calls": 1.5, "episode/tool_failures": 0.1, "timing.environments_s": 0.2}
    charts = {"chart-episodes", "chart-tool-failures", "chart-environments"}
    for name, lines, expected in (("with", metrics(**own), charts), ("without", metrics(), set())):
        watch = Watch(browser)
        page = watch.open(write_page(write_run(tmp_path / name, lines)))
        found = set(page.eval_on_selector_all("figure.chart", "figures => figures.map((one) => one.id)"))
        assert found & charts == expected
        assert watch.errors == []
        page.close()
