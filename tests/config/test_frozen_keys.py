"""Keys are a promise: new ones may come, but none goes or changes its name without an answer for those who use it."""

from pathlib import Path

import pytest

from dapo.config import renamed
from dapo.config.keys import known_keys
from dapo.config.load import load_recipe, parse_override
from dapo.errors import ConfigError
from dapo.tracking.metrics import METRICS

FROZEN = Path(__file__).with_name("frozen_keys.txt").read_text().split()


def test_every_key_of_a_release_is_there():
    gone = [key for key in FROZEN if key not in known_keys()]
    assert gone == [], "a key of a release may not go: keep it, or rename it in config/renamed.py and say so"


def test_new_keys_are_frozen_too():
    assert sorted(known_keys()) == FROZEN, "add the new keys to tests/config/frozen_keys.txt, in order"


@pytest.mark.parametrize("old", [*renamed.KEYS, *renamed.REPLACED])
def test_an_old_name_is_answered_with_the_new_one(old: str):
    with pytest.raises(ConfigError, match="has another name now") as refused:
        load_recipe("quickstart", [f"{old}=1"])
    assert (renamed.KEYS.get(old) or "pretrain_responses") in refused.value.remedy


def test_names_lead_to_names_that_are_there():
    assert set(renamed.KEYS.values()) <= known_keys().keys()
    assert not renamed.KEYS.keys() & known_keys().keys()
    assert set(renamed.METRICS.values()) <= METRICS.keys()
    assert not renamed.METRICS.keys() & METRICS.keys()


def test_the_changelog_has_the_whole_table():
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    for old, new in (renamed.KEYS | renamed.METRICS).items():
        assert f"| `{old}` | `{new}` |" in changelog


def test_a_run_of_an_earlier_version_reads_under_todays_names():
    flat = {"rollouts.every_steps": 5, "model.path": "embedded", "rollout.on_fault": "go_on", "train.grad_clip": 0.5}
    assert renamed.in_todays_keys(flat) == {
        "records.every_steps": 5, "model.path": "bundled", "rollout.on_fault": "continue", "train.max_grad_norm": 0.5,
    }  # fmt: skip
    nested = {"rollouts": {"every_steps": 5}, "algorithm": {"importance_cap": 2.0, "mean": "token"}, "train": 3}
    now = renamed.in_todays_sections(nested)
    assert now["records"] == {"every_steps": 5}
    assert now["algorithm"]["correction"] == {"cap": 2.0}
    assert now["algorithm"]["loss_aggregation"] == "token"
    assert nested == {"rollouts": {"every_steps": 5}, "algorithm": {"importance_cap": 2.0, "mean": "token"}, "train": 3}
    assert renamed.in_todays_metrics({"length/right": 3.0, "step": 1}) == {"length/correct": 3.0, "step": 1}
    of_sources = {"source/a/rested": 2, "source/NAMES/rested": 3, "source/a/waste": 0.5}
    assert renamed.in_todays_metrics(of_sources) == {
        "source/a/retired": 2, "source/NAMES/retired": 3, "source/a/waste": 0.5,
    }  # fmt: skip


def test_values_of_earlier_versions_are_values_no_more():
    for key, old in renamed.VALUES:
        assert parse_override(f"{key}={old}")[1] == old
        with pytest.raises(ConfigError, match="has another name now"):
            load_recipe("quickstart", [f"{key}={old}"])
