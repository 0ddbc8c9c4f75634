"""The trials of every recipe within its card's memory: the wiring, rehearsed on the CPU; and what the README says."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dapo.config.load import recipe_names

ROOT = Path(__file__).parents[2]
SAID = re.compile(r"(?:ran|did not run) (?:one rank's share )?in [\d.]+ GB")


@pytest.fixture(scope="module")
def capped() -> ModuleType:
    sys.path.insert(0, str(ROOT / "tools"))  # one_rank.py
    spec = importlib.util.spec_from_file_location("capped_recipes", ROOT / "tools/capped_recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["capped_recipes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rehearsed(capped: ModuleType, name: str, folder: Path) -> dict[str, Any]:
    trial = next(trial for trial in capped.TRIALS if trial.name == name)
    found: dict[str, Any] = capped.tried(trial, capped.Settings("cpu", 2, shrink=True), folder)
    return found


@pytest.mark.parametrize("name", ["gsm8k-coder-0.5b-distill-h200", "dapo-math-7b-8x80gb", "dapo-qwen2.5-32b"])
def test_a_trial_runs_and_says_what_it_held(capped: ModuleType, name: str, tmp_path: Path):
    row = rehearsed(capped, name, tmp_path)
    assert row["steps"] == 2
    assert row["weights"] == "random"
    assert set(row["estimate_gib"]) == {"fixed", "kv_cache"}


@pytest.mark.slow
def test_trials_run_in_processes_of_their_own(capped: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "capped.json"
    kinds = ("preset=vapo", "fits", "is_share")
    names = [next(one.name for one in capped.TRIALS if kind in one.sets or getattr(one, kind, False)) for kind in kinds]
    only = [part for name in names for part in ("--only", name)]
    arguments = ["tool", "--device", "cpu", "--shrink", "--steps", "1", "--out", str(out), *only]
    monkeypatch.setattr(sys, "argv", arguments)
    capped.main()
    rows = json.loads(out.read_text())["trials"]
    assert [name for name, row in rows.items() if not row["ran"]] == []
    assert set(names) == set(rows)
    monkeypatch.setattr(capped, "in_its_own_process", lambda *_: pytest.fail("it is known already"))
    capped.main()


@pytest.mark.parametrize(
    ("said", "is_recorded"),
    [("torch.OutOfMemoryError: CUDA out of memory.", True), ("needs the package peft", False), ("not finished", False)],
)
def test_only_a_lack_of_memory_counts_as_not_fitting(
    capped: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, is_recorded: bool
):
    class Child:
        pid = 0

        def communicate(self, timeout: float) -> tuple[str, None]:  # noqa: ARG002
            return said, None

    monkeypatch.setattr(capped.subprocess, "Popen", lambda *_, **__: Child())
    out = tmp_path / "capped.json"
    arguments = ["tool", "--device", "cpu", "--only", "gsm8k-1.5b-24gb", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    capped.main()
    assert out.exists() == is_recorded
    if is_recorded:
        (row,) = json.loads(out.read_text())["trials"].values()
        assert capped.said_of(row) == "did not run in 24 GB"


def test_every_recipe_for_a_gpu_has_a_trial(capped: ModuleType):
    on_a_cpu = {"quickstart", "ladder", "arithmetic-gym"}
    assert {trial.recipe for trial in capped.TRIALS} == set(recipe_names()) - on_a_cpu


def wrong_rows(capped: ModuleType, readme: str, trials: dict[str, Any]) -> list[str]:
    """Rows of the README's table that do not say what came of their trial, or speak of one that there is not."""
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `([\w.-]+)` \|.*$", readme, re.MULTILINE)}
    known = {name: capped.said_of(row) for name, row in trials.items() if name in rows}
    missing = [name for name, said in known.items() if said not in rows[name]]
    return missing + [name for name, row in rows.items() if name not in known and SAID.search(row)]


def test_the_readme_says_what_ran(capped: ModuleType):
    trials = capped.read(capped.RESULTS)["trials"]
    assert wrong_rows(capped, (ROOT / "README.md").read_text(encoding="utf-8"), trials) == []


def test_a_readme_that_says_otherwise_is_found(capped: ModuleType):
    trial = {"kind": "a run", "card_gib": 8, "steps": 3, "estimate_gib": {"fixed": 4.0, "kv_cache": 1.5}}
    trials = {"a": {**trial, "ran": True, "peak_gib": 6.94}, "b": {**trial, "ran": False, "peak_gib": 8.0}}
    readme = (
        "| `a` | ran in 8 GB: 3 steps with stand-ins, peak 6.9 GiB, estimated 5.5 |\n"
        "| `b` | did not run in 8 GB |\n| `c` | not run |\n"
    )
    assert wrong_rows(capped, readme, trials) == []
    assert wrong_rows(capped, readme.replace("6.9", "6.8"), trials) == ["a"]
    assert wrong_rows(capped, readme.replace("did not run", "ran"), trials) == ["b"]
    assert wrong_rows(capped, readme, {"a": trials["a"]}) == ["b"]
