"""What a config names is looked at before torch is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dapo.cli.resume import check_early
from dapo.cli.train import run_to_end
from dapo.config import load_recipe
from dapo.config.load import to_toml
from dapo.config.schema import Config
from dapo.data import inputs
from dapo.data.inputs import check_inputs, check_model, check_set, first_problem, sources_used, try_verifier
from dapo.data.sources import DataSource, find_source
from dapo.errors import ConfigError, DataError
from dapo.rewards import check

REWARD = """
def by_bonus(response, answer, meta):
    return meta["bonus"] * (answer in response)
def by_source(data_source, solution_str, ground_truth):
    return {"score": {"set": 1.0}[data_source], "tidy": 0.5}
def with_prompts(prompts, completions):
    return [{"6 x 7?": 1.0}[prompts[0]]]
def fails(response, answer, meta):
    raise ValueError(f"no opinion on {answer}")
def not_a_number(response, answer, meta):
    return float("nan")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_reward.py").write_text(REWARD)
    rows = [{"question": "6 x 7?", "answer": "42", "bonus": 0.5}, {"question": "6 x 8?", "answer": "48", "bonus": 0.5}]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "_PASSED", set())
    return tmp_path


def part(name: str, kind: str = "function") -> str:
    return f"rewards.parts={{format = {{{kind} = '{name}', weight = 0.5}}}}"


def look(*changes: str) -> None:
    check_inputs(load_recipe("quickstart", changes).config)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (["data.train=nope.jsonl"], DataError, "nope.jsonl: no such file"),
        (['data.eval=["set.jsonl", "gone.jsonl"]'], DataError, "gone.jsonl: no such file"),
        (["data.train=nomod:problems"], DataError, "nomod:problems: cannot be imported: No module named 'nomod'"),
        (['data.eval=["no.mod:problems"]'], DataError, "no.mod:problems: cannot be imported"),
        (["rewards.verifier=no_such_module:f"], ConfigError, "No module named 'no_such_module'"),
        (["rewards.verifier=own_reward:fails", "data.train=set.jsonl"], ConfigError, "ValueError: no opinion on 42"),
        (["rewards.verifier=own_reward:by_bonus"], ConfigError, "KeyError: 'bonus'"),
        (
            [part("own_reward:not_a_number")],
            ConfigError,
            "rewards.parts.format.function = 'own_reward:not_a_number': tried on .* CRASH: the reward is nan",
        ),
        ([part("own_reward:fails")], ConfigError, "rewards.parts.format.function = 'own_reward:fails'.*no opinion on"),
        ([part("own_reward:gone")], ConfigError, "rewards.parts.format.function = 'own_reward:gone'.*AttributeError"),
        ([part("no_such_module:f")], ConfigError, "rewards.parts.format.function = 'no_such_module:f': .*No module"),
        ([part("exact")], ConfigError, "rewards.parts.format.function = 'exact': is no name of a function"),
        ([part("exactly", "verifier")], ConfigError, "rewards.parts.format.verifier = 'exactly': no such verifier"),
        (
            ["rewards.verifier=own_reward:by_source", "data.train=set.jsonl", "rewards.parts={short = {weight = 1}}"],
            ConfigError,
            "rewards.parts.short: names neither .* the Score of 'own_reward:by_source' has no such part .*: tidy",
        ),
        (["data.train={a={path='nope.jsonl'}}"], DataError, "data.train.a: nope.jsonl: no such file"),
        (["data.train={gsm9k={}}"], DataError, "data.train.gsm9k: gsm9k: no such file.*\\n?.*Did you mean gsm8k"),
        (["data.train={a={path='set.jsonl', verifier='mth'}}"], ConfigError, "data.train.a.verifier = 'mth': no such"),
        (["data.train={a={path='set.jsonl', template='rwa'}}"], ConfigError, "data.train.a.template = 'rwa': no such"),
        (["data.eval={a={path='set.jsonl', verifier='mth'}}"], ConfigError, "data.eval.a.verifier = 'mth': no such"),
        (
            ["data.train={a={path='set.jsonl'}, b={path='set.jsonl', verifier='own_reward:fails'}}"],
            ConfigError,
            "data.train.b.verifier = 'own_reward:fails': .*ValueError: no opinion on 42",
        ),
    ],
)
def test_what_is_missing_or_fails_is_said(changes: list[str], error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        look(*changes)


@pytest.mark.parametrize("verifier", ["by_bonus", "by_source", "with_prompts"])
def test_a_verifier_of_the_users_that_works_is_tried_once_and_taken(verifier: str, monkeypatch: pytest.MonkeyPatch):
    tried = []

    def noted(found: DataSource, name: str, config: Config, parts: object) -> None:
        try_verifier(found, name, config, parts)  # type: ignore[arg-type]
        tried.append(name)

    monkeypatch.setattr(inputs, "try_verifier", noted)
    look(f"rewards.verifier=own_reward:{verifier}", "data.train=set.jsonl")
    assert tried == [f"own_reward:{verifier}"]


def test_what_is_not_evaluated_need_not_be_there():
    lost = 'data.eval=["gone.jsonl"]'
    with pytest.raises(DataError, match="gone"):
        look(lost, "data.train=set.jsonl")
    used = load_recipe("quickstart", [lost, "eval.every_steps=0", "data.train=set.jsonl"]).config
    check_inputs(used)
    assert [source.path for source, _ in sources_used(used)] == ["set.jsonl"]


def test_a_resumed_run_is_looked_at_with_its_changes(folder: Path):
    """A set or verifier that is gone does not stand in the way of the change that does without it."""
    lost = ['data.eval=["gone.jsonl"]', "eval.every_steps=5", "rewards.verifier=own_reward:gone"]
    (folder / "config.toml").write_text(to_toml(load_recipe("quickstart", lost).config))
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        check_early(folder, ["rewards.verifier=math"])
    with pytest.raises(ConfigError, match="own_reward:gone"):
        check_early(folder, ["eval.every_steps=0"], trust=True)
    check_early(folder, ["rewards.verifier=math", "eval.every_steps=0"])
    check_early(folder, ["rewards.verifier=math", 'data.eval=["set.jsonl"]'])


def test_a_model_that_is_no_folder_and_no_name_of_the_hub_is_refused(folder: Path):
    with pytest.raises(ConfigError, match=r"model\.path = \./no/such/model: no such folder"):
        run_to_end(load_recipe("quickstart", ["model.path=./no/such/model"]), folder / "out")
    for path in ("bundled", "owner/name", str(folder)):
        check_model(load_recipe("quickstart", [f"model.path={path}"]).config)


def test_without_a_config_what_was_typed_is_looked_at():
    check_set("set.jsonl", None, use="eval")
    with pytest.raises(DataError, match="no such file"):
        check_set("nope.jsonl", "math", use="eval")
    with pytest.raises(ConfigError, match="no such verifier"):
        check_set("set.jsonl", "mth", use="eval")


def test_the_first_problem_is_the_first_that_can_be_used(folder: Path):
    rows = [{"question": "a?", "answer": ""}, {"question": "b?", "answer": "(("}, {"question": "c?", "answer": "3"}]
    (folder / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problem = first_problem(find_source("some.jsonl"), None, "math")
    assert problem is not None
    assert (problem.question, problem.answer) == ("c?", "3")
    (folder / "none.jsonl").write_text(json.dumps(rows[1]) + "\n")
    assert first_problem(find_source("none.jsonl"), None, "math") is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "quickstart", "--set", "data.train=nope.jsonl"],
        pytest.param(["eval", "--model", "bundled", "--data", "nope.jsonl"], marks=pytest.mark.slow),
        pytest.param(["data", "probe", "nope.jsonl", "--model", "bundled"], marks=pytest.mark.slow),
        pytest.param(["resume", "run"], marks=pytest.mark.slow),
    ],
)
def test_torch_is_not_loaded_for_that(arguments: list[str], folder: Path):
    """A torch that cannot be imported stands in the way of whoever tries."""
    (folder / "torch.py").write_text("raise SystemExit('torch was loaded')")
    (folder / "run").mkdir()
    config = load_recipe("quickstart", ["data.train=nope.jsonl"])
    (folder / "run" / "config.toml").write_text(to_toml(config.config))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "dapo", *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("DataError: nope.jsonl: no such file.")
