"""`dapo bench rollout`: our engines on one load, with drafts and without."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import dapo
from dapo.bench import rollout_workloads
from dapo.bench.rollout_workloads import make_load
from dapo.cli.bench import command
from dapo.errors import ConfigError

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for CUDA")
@pytest.mark.parametrize("engine", ["local-exact", "local-fp8"])
def test_engines_for_cuda_are_refused_on_a_cpu(engine: str):
    result = CliRunner().invoke(command, ["rollout", "--model", BUNDLED, "--engines", f"local,{engine}"])
    assert isinstance(result.exception, ConfigError)
    assert f"--engines {engine}: is for CUDA." in str(result.exception)


def test_the_mixed_load_has_a_prompt_for_every_response_and_lengths_from_100_to_1024():
    load = make_load("mixed", slots=1024, new_tokens=512)
    requests = load.requests(vocabulary=50_000)
    assert [len(request.prompt) for request in requests] == list(load.prompt_lengths)
    assert [request.max_new_tokens for request in requests] == list(load.lengths)
    assert (len(requests), load.slots) == (256, 256)
    for lengths in (load.prompt_lengths, load.lengths):
        assert min(lengths) in range(100, 110)
        assert max(lengths) in range(1015, 1025)
    assert load.longest == max(len(request.prompt) + request.max_new_tokens for request in requests)


def test_the_mixed_load_is_generated_to_its_last_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_workloads, "MIXED", 6)
    monkeypatch.setattr(rollout_workloads, "MIXED_TOKENS", (3, 9))
    for row in run("--load", "mixed"):
        assert (row["load"], row["slots"]) == ("mixed", 6)
        assert row["tokens"] == sum(make_load("mixed", slots=1024, new_tokens=1).lengths)
