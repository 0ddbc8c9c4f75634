"""The report as one text in a frame, for a notebook: no file beside it, no network, no way out of the frame.

The frame is sandboxed without an origin of its own, and its page runs only scripts that carry a random word. What a
model wrote is JSON inside such a script, without a `<`: neither the page nor the frame's attribute can be closed by it.
"""

from __future__ import annotations

import base64
import gzip
import json
import secrets
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from dapo.report.examined import examine_run
from dapo.report.page import SCRIPTS, asset, dumps, plotly_path
from dapo.report.page_data import history_of, page_data
from dapo.report.rollouts.chunks import read_index, read_script, script
from dapo.report.rollouts.recorded import chunk_folder

FRAME_HEIGHT = 720  # pixels
MOST_ROLLOUT_BYTES = 4 << 20  # of responses, the newest steps first; a notebook keeps what it shows

POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def frame(folder: Path) -> str:
    """The report of a run that `write_page` has written, as an element to be put into any page."""
    return (
        f'<iframe sandbox="allow-scripts" referrerpolicy="no-referrer" width="100%" height="{FRAME_HEIGHT}" '
        f'style="border:1px solid #8884;border-radius:6px" srcdoc="{escape(page_alone(folder))}"></iframe>'
    )


def page_alone(folder: Path) -> str:
    """The page with everything it needs inside."""
    nonce = secrets.token_hex(16)
    examined = examine_run(folder)
    rollouts = dict(newest_rollouts(examined.run.rollouts))
    data = page_data([examined], ["rollouts"], [])
    data["runs"][0]["rollouts"] = [one for one in data["runs"][0]["rollouts"] if one["step"] in rollouts]
    values = [
        script("page", dumps(data)),
        script("history-0", json.dumps(history_of(examined))),
        *(text for scripts in rollouts.values() for text in scripts),
    ]
    base, *others = SCRIPTS
    own = [asset(base), *(value.replace("<", "\\u003c") for value in values)]
    body = "\n".join(f'<script nonce="{nonce}">{text}</script>' for text in (*own, *map(asset, others)))
    packed = base64.b64encode(gzip.compress(plotly_path().read_bytes(), mtime=0)).decode("ascii")
    return (
        asset("page.html")
        .replace("{{policy}}", POLICY.format(nonce=nonce))
        .replace("{{live}}", "")
        .replace('<link rel="stylesheet" href="report/style.css">', f"<style>{asset('style.css')}</style>")
        .replace("{{scripts}}", f'<script nonce="{nonce}" type="text/plain" id="packed">{packed}</script>\n{body}')
    )


def newest_rollouts(recorded: list[Path]) -> Iterator[tuple[int, list[str]]]:
    """Steps with their scripts, parsed and written again so that they can only be data; the newest that have room."""
    room = MOST_ROLLOUT_BYTES
    for parquet in reversed(recorded):
        index = read_index(parquet)
        if index is None:
            continue
        names = [f"{piece:03d}" for piece in sorted(set(index["groups"]["piece"]))]
        pieces: list[Any] = [read_script(chunk_folder(parquet) / f"{name}.js") for name in names]
        if any(piece is None for piece in pieces):
            continue
        values = zip(["index", *names], [index, *pieces], strict=True)
        scripts = [script(f"{parquet.stem}/{name}", json.dumps(value)) for name, value in values]
        room -= sum(map(len, scripts))
        if room < 0:
            return
        yield int(parquet.stem.removeprefix("step-")), scripts
