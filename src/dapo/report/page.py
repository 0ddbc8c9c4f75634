"""A page made from run folders alone: it opens offline from the file system, and model output stays text.

`report.html` lies next to a folder `report/` with its style, its scripts, plotly and the data; responses are loaded on
demand from the scripts that the run wrote next to its parquet.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dapo.files import refuse_links, replace_file, written_aside
from dapo.report.examined import examine_run
from dapo.report.page_data import history_of, page_data, read_overlay
from dapo.report.rollouts.chunks import script

SCRIPTS = ("base.js", "overview.js", "curves.js", "rollouts.js", "main.js")
ASSETS = (*SCRIPTS, "style.css")

# What the page may do: run the scripts next to it and draw. No network, no inline script, no frame, no form.
POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file: 'unsafe-inline'; img-src data:; "
    "connect-src {connect}; base-uri 'none'; form-action 'none'"
)


def write_page(
    folder: Path,
    *others: Path,
    out: Path | None = None,
    phrases: Path | None = None,
    overlay: Path | None = None,
) -> Path:
    """`report.html` in the run's folder, or in `out`; scripts that are missing are made from parquet."""
    for run in (folder, *others):
        refuse_links(run, "rollouts")
    runs = [examine_run(run, phrases=phrases, is_writing=True) for run in (folder, *others)]
    home = out or (folder if not others else folder.parent / "comparison")
    assets = home / "report"
    refuse_links(home, "report")
    assets.mkdir(parents=True, exist_ok=True)
    for name in ASSETS:
        replace_file(assets / name, asset(name))
    copy_plotly(assets / "plotly.min.js")
    for at, examined in enumerate(runs):
        replace_file(assets / f"history-{at}.js", script(f"history-{at}", json.dumps(history_of(examined))))
    places = [os.path.relpath(run.run.folder.resolve() / "rollouts", home.resolve()) for run in runs]
    data = page_data(runs, [quote(place) for place in places], read_overlay(overlay))
    replace_file(assets / "data.js", script("page", dumps(data)))
    path = home / "report.html"
    replace_file(path, html(is_live=False))
    return path


def html(*, is_live: bool) -> str:
    """The empty page: no data, no model output; the scripts fill it."""
    scripts = "\n".join(f'<script src="report/{name}" defer></script>' for name in SCRIPTS)
    data = "" if is_live else '<script src="report/data.js" defer></script>'
    return (
        asset("page.html")
        .replace("{{policy}}", POLICY.format(connect="'self'" if is_live else "'none'"))
        .replace("{{live}}", " data-live" if is_live else "")
        .replace("{{scripts}}", scripts.replace("</script>\n", f"</script>\n{data}\n", 1) if data else scripts)
    )


def asset(name: str) -> str:
    return files("dapo.report").joinpath("assets", name).read_text(encoding="utf-8")


def plotly_path() -> Path:
    return Path(str(files("plotly").joinpath("package_data", "plotly.min.js")))


def copy_plotly(target: Path) -> None:
    source = plotly_path()
    if target.is_symlink() or not target.is_file() or target.stat().st_size != source.stat().st_size:
        with written_aside(target) as aside:
            shutil.copyfile(source, aside)


def dumps(data: Any) -> str:
    """JSON that is also safe as a script: ASCII only, and no NaN."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False)
