"""The two pictures of docs/report.md, from a run folder.   python tools/report_pictures.py RUN   (needs a Chromium)

The run: `OMP_NUM_THREADS=1 dapo quickstart`. The second picture shows the first step, and of it the first group with
two correct responses of eight, with the mouse over one of its tokens.
"""

import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from dapo.report.page import write_page

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "browser"))

from install import find_or_get  # noqa: E402


def overview(page: Page) -> None:
    page.wait_for_timeout(1500)  # the curves are drawn


def rollouts(page: Page) -> None:
    page.locator("#step-slider").fill("0")
    page.locator(".group-row", has=page.get_by_text("2/8", exact=True)).first.click()
    page.wait_for_selector(".response")
    page.evaluate("window.scrollTo(0, document.getElementById('rollouts').offsetTop - 60)")
    page.wait_for_timeout(1000)  # scrolling ends, which would hide the tip
    page.locator(".response pre.text span").nth(4).hover()
    page.wait_for_timeout(500)


PICTURES = {"report.png": (overview, "light", 1080), "report-rollouts.png": (rollouts, "dark", 900)}


def draw(run: Path) -> None:
    path = find_or_get()
    with sync_playwright() as playwright:
        options = {} if path == "bundled" else {"executable_path": path}
        browser = playwright.chromium.launch(args=["--no-sandbox"], **options)
        for name, (prepare, scheme, height) in PICTURES.items():
            page = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme=scheme)
            page.goto(write_page(run).absolute().as_uri())
            page.wait_for_selector("[data-ready]")
            prepare(page)
            page.screenshot(path=ROOT / "docs" / name)
        browser.close()


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
