"""A ladder's files: ladder.json with everything, ladder.md, two plots, and a page that opens offline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from dapo.ablation.plots import curves_plot, late_plot
from dapo.files import replace_file
from dapo.report.page import POLICY, asset, copy_plotly, dumps
from dapo.report.rollouts.chunks import script

PAGE = "page"  # the folder beside ladder.html


def write_all(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the files; each is replaced as a whole."""
    texts = {
        "ladder.json": json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "ladder.md": markdown(summary),
        "ladder.svg": late_plot(summary),
        "curves.svg": curves_plot(summary["arms"], k=summary["k"], target=summary["baseline"]),
        "ladder.html": html(),
    }
    for name, text in texts.items():
        replace_file(folder / name, text)
    page = folder / PAGE
    page.mkdir(parents=True, exist_ok=True)
    replace_file(page / "base.js", asset("base.js"))
    replace_file(page / "style.css", asset("style.css"))
    replace_file(page / "ladder.js", files("dapo.ablation").joinpath("assets", "ladder.js").read_text(encoding="utf-8"))
    replace_file(page / "data.js", script("page", dumps(summary)))
    copy_plotly(page / "plotly.min.js")
    return [folder / name for name in texts]


def html() -> str:
    """The empty page: no data and no user text; the scripts fill it."""
    scripts = "\n".join(
        f'<script src="{PAGE}/{name}" defer></script>' for name in ("base.js", "data.js", "plotly.min.js", "ladder.js")
    )
    return (
        files("dapo.ablation")
        .joinpath("assets", "ladder.html")
        .read_text(encoding="utf-8")
        .replace("{{policy}}", POLICY.format(connect="'none'"))
        .replace("{{page}}", PAGE)
        .replace("{{scripts}}", scripts)
    )


# ------------------------------------------------------------------ markdown


def markdown(summary: Mapping[str, Any]) -> str:
    """The table with its command; user text is escaped."""
    settings = summary["settings"]
    head = [
        "# Ablation ladder",
        "",
        f"    {cell(settings['command'])}",
        "",
        f"Recipe {cell(settings['recipe'])}, {settings['budget']} for every arm, seeds "
        f"{', '.join(map(str, settings['seeds']))}; avg@{summary['k']} on {summary['problems']} held-out problems. "
        f"{machine_line(summary['machine'])}`late` is the mean over the evaluations of the last quarter of the run, "
        "`end` the last one; 95 % bootstrap intervals over problems and seeds; differences of `late`, paired by both. "
        "Minutes are those of runs that may have shared the machine (`--jobs`).",
        "",
        "| arm | late | interval | end | best | difference | interval | p "
        "| steps, updates, tokens, minutes to baseline's best | entropy | length | truncated | clip | waste "
        "| mixed groups | published |",
        "|" + "---|" * 16,
    ]
    rows = [f"| {' | '.join(markdown_row(line))} |" for line in summary["arms"]]
    tail = ["", *(f"- {name}: {cell(text)}" for name, text in summary["sources"].items())]
    tail += [f"- {note}" for note in summary["notes"]]
    if summary["missing"]:
        tail.append(f"- not finished: {', '.join(summary['missing'])}")
    return "\n".join([*head, *rows, *tail]) + "\n"


def machine_line(machine: Mapping[str, Any]) -> str:
    if not machine:
        return ""
    return (
        f"{machine['date']}, {machine['machine']}, {machine['cores']} cores, Python {machine['python']}, "
        f"torch {machine['torch']}. "
    )


def markdown_row(line: Mapping[str, Any]) -> list[str]:
    late, change = line["late"], line["difference"]
    return [
        cell(line["label"]),
        f"{late['value']:.3f}",
        f"{late['low']:.3f} – {late['high']:.3f}",
        f"{line['end']['value']:.3f}",
        f"{line['best']['value']:.3f}",
        f"{change['value']:+.3f}" if change else "",
        f"{change['low']:+.3f} – {change['high']:+.3f}" if change else "",
        p_cell(line),
        reach_cell(line),
        f"{line['entropy']:.3f}",
        f"{line['length']:.1f}",
        f"{100 * line['truncated']:.1f} %",
        f"{100 * line['clip']:.2f} %",
        f"{100 * line['waste']:.0f} %",
        "" if line["mixed_groups"] is None else f"{100 * line['mixed_groups']:.0f} %",
        " / ".join(f"{value:g}" for value in line["published"].values()),
    ]


def reach_cell(line: Mapping[str, Any]) -> str:
    """Steps, updates, tokens and minutes until the mean curve reaches the baseline's best."""
    reached = line["reaches_baseline_best"]
    if reached is None:
        return "not reached"
    tokens, minutes = in_thousands(reached["tokens"]), f"{reached['minutes']:.1f}"
    return f"{reached['step']}, {reached['updates']:.0f}, {tokens}, {minutes}"


def p_cell(line: Mapping[str, Any]) -> str:
    change = line["difference"]
    if change is None or change["p"] is None:  # withheld: the notes say why
        return ""
    return "< 0.001" if change["p"] < 0.001 else f"{change['p']:.3f}"


def in_thousands(tokens: float) -> str:
    return f"{tokens / 1e6:.2f} M" if tokens >= 1e6 else f"{tokens / 1e3:.0f} k"


def cell(text: str) -> str:
    """Text that stays in its cell: no pipes, no line breaks, no markup."""
    flat = " ".join(str(text).split())
    return escape(flat, quote=False).replace("|", "\\|").replace("`", "'")
