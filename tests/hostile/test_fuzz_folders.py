"""A run folder and a config that were changed at random: a few examples of each, the same ones every time."""

import pytest

from dapo.config.load import load_recipe
from dapo.errors import ConfigError
from hostile.fuzz import fuzz
from hostile.fuzz_folders import a_config_is_read_or_refused, a_run_is_read_or_refused, drawn


@pytest.mark.parametrize(("check", "n_examples"), [(a_run_is_read_or_refused, 20), (a_config_is_read_or_refused, 100)])
def test_it_holds(check, n_examples):
    drawn(check, n_examples=n_examples, seed=1)()


FOUND = [
    ("doctor", ("key", "config.toml", "a", "5000 digits")),
    ("report --terminal", ("file", "metrics.jsonl", "folder")),
    ("report --out OUT", ("toml", "phrases.toml", 0.0, "deep")),
    ("watch", ("toml", "config.toml", 0.5, "date")),
    ("watch", ("json", "metrics.jsonl", 0.0, 1, "10**400")),
    ("verify --verifier exact --audit", ("column", "rollouts/step-000003.parquet", "verdict", "hostile")),
    ("verify --verifier exact --json --audit", ("column", "rollouts/step-000003.parquet", "answer", "hostile")),
    ("report --terminal --problem p1", ("column", "rollouts/step-000003.parquet", "problem_id", "lists of large")),
    ("verify --verifier exact --audit", ("bytes", "rollouts/step-000002.parquet", 0.1444694548845291, 3, b"9" * 5_000)),
]


@pytest.mark.parametrize(("reader", "change"), FOUND)
def test_runs_that_were_found(reader, change):
    a_run_is_read_or_refused(reader, [change])


@pytest.mark.parametrize("text", ["9" * 5_000, "[" * 5_000, f'"{"a" * 5_000}"', "{" + "a." * 3_000 + "a = 1}"])
@pytest.mark.parametrize("key", ["preset", "train.steps"])
def test_configs_that_were_found(key, text):
    with pytest.raises(ConfigError, match=key):
        load_recipe("quickstart", [f"{key}={text}"])


def test_a_preset_is_no_path():
    with pytest.raises(ConfigError, match="no such preset"):
        load_recipe("quickstart", ["preset=../presets/dapo"])


def test_a_finding_ends_the_fuzzer_with_its_seed(capsys):
    seen = []

    def draws(seed):
        seen.append(seed)
        assert seed < 9, "found"

    with pytest.raises(AssertionError, match="found"):
        fuzz({"a_name": draws}, minutes=1e9, seed=7)
    assert seen == [7, 8, 9]
    assert "--seed 9 --only a_name" in capsys.readouterr().err
    assert fuzz({"a_name": draws}, minutes=0, seed=0) == 1
