"""Code in README and docs does what it says: every block is marked, every command line parses, what can run is run."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
import typer.core
from blocks import (
    MARKED_LANGUAGES,
    MARKINGS,
    PAGES,
    ROOT,
    UNMARKED_LANGUAGES,
    Block,
    all_blocks,
    blocks_of,
    command_lines,
)

from dapo.cli.main import COMMANDS as ALL_COMMANDS
from dapo.cli.main import build_app
from dapo.config.keys import known_keys
from dapo.config.load import flatten, load_recipe, parse_override, preset_names, recipe_names
from dapo.config.sources import in_schema

PLACEHOLDER = re.compile(r"[A-Z][A-Z_/.]*|.*\.toml")
COMMANDS = [(block, words) for block in all_blocks() for words in command_lines(block)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is_and_whether_it_runs(page: Path):
    for block in blocks_of(page):
        if block.language in UNMARKED_LANGUAGES:
            assert not block.marking, f"{block}: {block.language} takes no marking"
        else:
            assert block.language in MARKED_LANGUAGES, f"{block}: which language? {block.language!r}"
            assert block.marking in MARKINGS, f"{block}: mark it with one of {', '.join(MARKINGS)}"


def test_there_are_commands_to_check():
    assert len(COMMANDS) > 50
    assert {words[0] for _, words in COMMANDS} >= {"train", "resume", "eval", "explain", "report", "data", "verify"}


@pytest.mark.parametrize(("block", "words"), COMMANDS, ids=[f"{block}-{words[0]}" for block, words in COMMANDS])
def test_a_command_line_parses_and_its_recipe_and_keys_exist(block: Block, words: list[str]):
    assert words[0] in ALL_COMMANDS, f"{block}: no command {words[0]}"
    given = parse(words)
    overrides = given.get("set_") or []
    for text in overrides:
        key, value = parse_override(text)
        assert in_schema(key) in known_keys(), f"{block}: no key {key}"
        assert key != "preset" or value in preset_names(), f"{block}: no preset {value}"
    for name in (given.get("recipe"), given.get("other")):
        is_known = name is None or PLACEHOLDER.fullmatch(name) or name in (*recipe_names(), *preset_names())
        assert is_known, f"{block}: no recipe {name}"
    if given.get("recipe") in recipe_names():
        load_recipe(given["recipe"], overrides)  # the values too


def parse(words: list[str]) -> dict:
    """What the verb's function would be called with; nothing is run. A wrong option raises."""
    command = typer.main.get_command(build_app(words[0]))
    context = command.make_context("dapo", list(words))
    while isinstance(command, typer.core.TyperGroup):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    assert context.info_name in words, "a verb was reached"
    return context.params


@pytest.mark.parametrize("block", [block for block in all_blocks() if block.language == "toml"], ids=str)
def test_toml_has_keys_of_the_schema(block: Block):
    assert set(map(in_schema, flatten(tomllib.loads(block.text)))) <= known_keys().keys()


def test_a_wrong_command_would_be_found():
    with pytest.raises(Exception, match="No such option: --sett"):
        parse(["train", "quickstart", "--sett", "train.steps=5"])
    with pytest.raises(Exception, match="No such command 'chekc'"):
        parse(["data", "chekc", "my.jsonl"])
    block = Block(ROOT / "README.md", 1, "bash", "sketch", "dapo train quickstart --set train.stepz=5  # typo\n")
    (words,) = command_lines(block)
    with pytest.raises(AssertionError, match=r"no key train\.stepz"):
        test_a_command_line_parses_and_its_recipe_and_keys_exist(block, words)


# ------------------------------------------------------------------ running them


def run_page(page: Path, folder: Path, *markings: str) -> None:
    """Its blocks with one of these markings, in order, in one folder: a later block finds what an earlier one wrote."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    tools = folder / ".bin"
    tools.mkdir()
    (tools / "dapo").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dapo "$@"\n')
    (tools / "dapo").chmod(0o755)
    environment = os.environ | {
        "PATH": os.pathsep.join([str(tools), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)]),
        "OMP_NUM_THREADS": "1",
    }
    for block in blocks_of(page):
        if block.marking not in markings:
            continue
        is_python = block.language == "python"
        file = folder / f"block_{block.line}.{'py' if is_python else 'sh'}"
        file.write_text(block.text)
        command = [sys.executable, file.name] if is_python else ["bash", "-euo", "pipefail", file.name]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800, check=False
        )
        assert done.returncode == 0, f"{block}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def pages_with(marking: str) -> list[Path]:
    return [page for page in PAGES if any(block.marking == marking for block in blocks_of(page))]


@pytest.mark.slow  # whole commands; that every block parses is seen every day
@pytest.mark.parametrize("page", pages_with("run"), ids=lambda page: page.name)
def test_the_blocks_marked_run_run(page: Path, tmp_path: Path):
    run_page(page, tmp_path, "run")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", pages_with("slow"), ids=lambda page: page.name)
def test_the_blocks_marked_slow_run(page: Path, tmp_path: Path):
    run_page(page, tmp_path, "run", "slow")
