"""`dapo bench rollout`: our engines on one load, with drafts and without."""

import json
import re
from pathlib import Path

from typer.testing import CliRunner

import dapo
from dapo.cli.bench import command

BUNDLED = str(Path(dapo.__file__).parent / "quickstart" / "model")


def run(*arguments: str) -> list[dict]:
    given = ["rollout", "--model", BUNDLED, "--engines", "local,plain", "--load", "few", "--new-tokens", "12", "--json"]
    result = CliRunner().invoke(command, [*given, *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)["results"]


def test_drafts_are_counted_and_the_work_stays_the_same():
    for without, with_drafts in zip(run(), run("--draft", "4"), strict=True):
        assert with_drafts["tokens"] == without["tokens"] == 8 * 12
        assert "draft" not in without["settings"]
        accepted, drafted = map(int, re.findall(r"drafts of 4: (\d+) of (\d+)", with_drafts["settings"])[0])
        assert 0 < accepted <= drafted < 4 * 8 * 12
