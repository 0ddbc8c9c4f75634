"""The pages say what is true of the code: links lead somewhere, keys and verbs exist, every finding has its remedy."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from blocks import FENCE, PAGES, ROOT

from dapo.cli.main import COMMANDS
from dapo.config import renamed
from dapo.config.keys import known_keys
from dapo.config.load import preset_names, recipe_names
from dapo.rewards import verify
from dapo.tracking.metrics import METRICS

DOCS = ROOT / "docs"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
SECTIONS = {key.partition(".")[0] for key in known_keys() if "." in key}
# Settings of the peers stand beside ours in these tables, and some of their sections have our sections' names.
PEERS_KEYS = {"coming-from.md", "faq.md"}


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


@cache
def functions() -> set[str]:
    """Every function of ours: `shaping.overlong_mask` is one, not a key."""
    sources = (path.read_text() for path in (ROOT / "src").rglob("*.py"))
    return {name for text in sources for name in re.findall(r"^def (\w+)\(", text, re.MULTILINE)}


def slug(heading: str) -> str:
    """The anchor of a heading, as Python-Markdown makes it."""
    plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


def anchors(page: Path) -> set[str]:
    return {slug(found[1]) for found in re.finditer(r"^#+ (.+)$", prose(page), re.MULTILINE)}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_to_files_and_anchors(page: Path):
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_verbs_and_presets_in_the_text_exist(page: Path):
    for span in SPAN.findall(prose(page)):
        if span.startswith("dapo ") and span.split()[1].islower():
            assert span.split()[1] in COMMANDS, f"{page.name}: `{span}`: no such command"
        key = re.match(r"(?:--set )?([a-z]+\.[a-z_.]+[a-z])(?= ?=|$)", span)
        if key is None or key[1].partition(".")[0] not in SECTIONS or page.name in PEERS_KEYS or "/" in span:
            continue
        is_known = key[1] in known_keys() or any(known.startswith(f"{key[1]}.") for known in known_keys())
        is_known |= key[1] in renamed.KEYS | renamed.REPLACED and page.name in (
            "log.md",
            "results.md",
        )  # what a run of then was given
        is_file = re.search(r"\.(py|jsonl?|toml|md|html|txt|parquet)$", key[1])
        is_code = key[1].rpartition(".")[2] in functions()
        assert is_known or is_file or is_code or key[1] in METRICS, f"{page.name}: `{span}`: no such key"


def test_the_table_of_keys_side_by_side_has_ours():
    rows = re.findall(r"^\| `([a-z_.]+)` \|", (DOCS / "coming-from.md").read_text(), re.MULTILINE)
    assert len(rows) >= 25
    assert set(rows) <= known_keys().keys()


def test_every_recipe_and_preset_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    assert not [name for name in (*recipe_names(), *preset_names()) if f"`{name}`" not in text]


def test_the_map_of_the_code_is_true():
    text = (DOCS / "architecture.md").read_text()
    package = ROOT / "src" / "dapo"
    files = re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", text)
    assert [name for name in files if not (package / name).exists() and not (ROOT / name).exists()] == []
    areas = {path.name for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {name for name in areas - {"__init__.py", "__main__.py"} if not re.search(rf"`{name}/?`", text)} == set()


# ------------------------------------------------------------------ the doctor's findings and the tuning guide


def findings_in_the_source() -> set[str]:
    """First arguments of Finding(…) in report/*_findings.py, the names given to variables, and the phases' names."""
    sources = [path.read_text() for path in (ROOT / "src/dapo/report/doctor").glob("*.py")]
    tree = ast.Module([node for source in sources for node in ast.parse(source).body], [])
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding"
    ]
    assert len(calls) >= 18
    names = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    return names | {word for word in words if word in ("too-easy", "too-hard", "all-equal", "few-mixed-groups")}


def test_every_finding_has_a_remedy_in_the_tuning_guide():
    table = re.findall(r"^\| (`[^|]+`) \| (?:severe|warning|note) \|", (DOCS / "doctor.md").read_text(), re.MULTILINE)
    described = {name for cell in table for name in SPAN.findall(cell)}
    guided = set(re.findall(r"^### `([a-z-]+)`$", (DOCS / "tuning.md").read_text(), re.MULTILINE))
    assert findings_in_the_source() <= described
    assert guided == described


# ------------------------------------------------------------------ pages that are made


def test_the_page_of_keys_is_up_to_date():
    made = subprocess.run(
        [sys.executable, "tools/keys_page.py"], cwd=ROOT, capture_output=True, text=True, timeout=1800, check=True
    )
    assert (DOCS / "keys.md").read_text() == made.stdout, "python tools/keys_page.py > docs/keys.md"


def test_every_page_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """mkdocs.yml may have tags of its own."""

    Loader.add_multi_constructor("", lambda *_: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]

    def pages(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        return set().union(*map(pages, entry.values() if isinstance(entry, dict) else entry))  # type: ignore[attr-defined]

    assert pages(nav) == {page.name for page in DOCS.glob("*.md")}


def test_the_site_s_checker_finds_what_is_wrong(tmp_path: Path):
    spec = importlib.util.spec_from_file_location("check_site", ROOT / "tools/check_site.py")
    check_site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_site)
    (tmp_path / "a.html").write_text('<a href="b.html#here">x</a><a href="https://example.org">y</a><h1 id="top">')
    (tmp_path / "b.html").write_text('<h1 id="here"></h1><a href="a.html#top">z</a>')
    assert check_site.complaints(tmp_path) == []
    (tmp_path / "b.html").write_text('<a href="c.html"></a><script src="https://cdn.example.org/x.js"></script>')
    assert check_site.complaints(tmp_path) == [
        "a.html: b.html#here has no such anchor",
        "b.html: fetches https://cdn.example.org/x.js",
        "b.html: c.html leads nowhere",
    ]


def test_the_verdicts_the_reward_page_promises():
    text = (DOCS / "your-reward.md").read_text()
    tasks = [json.loads(line) for line in re.findall(r'^\{"response".*\}$', text, re.MULTILINE)]
    promised = re.search(r"One verdict per line: ([A-Z, ]+)\.", text)[1].split(", ")
    assert [verify(task["response"], task["answer"]).value for task in tasks] == promised


def test_extras_that_the_pages_name_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() >= {"vllm", "ray", "lora", "trackers", "docs", "dev"}
    named = {name for page in PAGES for name in re.findall(r"dapo\[(\w+)\]", page.read_text())}
    assert named <= extras.keys()
    trackers = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")
    assert set(extras["trackers"]) == {package for name in trackers for package in extras[name]}
