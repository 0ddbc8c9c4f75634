"""A stranger's run folder names a program and modules; no command runs or imports them without --trust."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

import dapo
from command_line import dapo as run_dapo
from dapo.cli.main import COMMANDS as ALL_COMMANDS
from dapo.cli.resume import check_early
from dapo.config.load import load_recipe, to_toml
from dapo.distributed.world import World
from dapo.errors import ConfigError
from dapo.trainer.trust import (
    ID,
    agree_on_code,
    code_named,
    is_trusted,
    keys_of,
    record_file,
    refuse_strangers_run,
    state_folder,
    trust_run,
)

MODULE = "import pathlib\npathlib.Path({canary!r}).touch()\ndef rows():\n    yield {{}}\nreward = rows\n"
FILES = ("metrics.jsonl", "eval.jsonl", "events.jsonl")


def test_a_part_of_the_reward_names_code_as_a_function_and_as_a_verifier():
    given = {"a": {"function": "theirs:f"}, "b": {"verifier": "command:rm -r x"}, "c": {"verifier": "exact"}}
    assert code_named({"rewards.parts": given}) == {"rewards.parts": "a: theirs:f, b: command:rm -r x"}


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A file that appears when planted code runs. Its module lies in the working folder."""
    path = tmp_path / "planted"
    here = tmp_path / "here"
    here.mkdir()
    (here / "planted_module.py").write_text(MODULE.format(canary=str(path)))
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    sys.modules.pop("planted_module", None)


def program(canary: Path) -> str:
    return f"command:touch {shlex.quote(str(canary))}"


def planted(kind: str, canary: Path) -> list[str]:
    return {
        "command": [f"rewards.verifier={json.dumps(program(canary))}"],
        "problems that name a command": [
            "rewards.verifier=command",
            f"data.train={json.dumps(problems_with_command(canary))}",
        ],
        "module": ["rewards.verifier=planted_module:reward"],
        "part": ["rewards.parts={format = {function = 'planted_module:reward', weight = 1.0}}"],
        "part that is a command": [
            f"rewards.parts={{format = {{verifier = {json.dumps(program(canary))}, weight = 1.0}}}}"
        ],
        "train": ["data.train=planted_module:rows"],
        "eval": ['data.eval=["planted_module:rows"]', "eval.every_steps=1"],
        "a source's command": [f"data.train={{a={{path='gsm8k', verifier={json.dumps(program(canary))}}}}}"],
        "a source's module": ["data.train={a={path='gsm8k', verifier='planted_module:reward'}}"],
        "a source's problems": ["data.train={a={path='planted_module:rows'}, b={path='gsm8k'}}"],
        "a source that names a command": [
            f"data.train={{a={{path={json.dumps(problems_with_command(canary))}, verifier='command'}}}}"
        ],
        "an evaluation set's module": [
            "data.eval={a={path='gsm8k', verifier='planted_module:reward'}}",
            "eval.every_steps=1",
        ],
    }[kind]


def problems_with_command(canary: Path) -> str:
    path = canary.with_name("problems.jsonl")
    path.write_text(json.dumps({"id": "a", "question": "q", "answer": "1", "command": ["touch", str(canary)]}) + "\n")
    return str(path)


def strangers_run(folder: Path, overrides: list[str]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(load_recipe("quickstart", overrides).config))
    for name in FILES:
        (folder / name).write_text("")
    return folder


# Every verb that takes the folder of a run, or its config; those that take none are named below.
COMMANDS = [
    ["resume", "RUN"],
    ["resume", "RUN", "--set", "train.steps=3"],
    ["train", "RUN/config.toml", "--out", "new"],
    ["train", "RUN/./config.toml", "--out", "new"],
    ["ladder", "RUN/config.toml", "--arms", "dapo", "--seeds", "0", "--out", "ladder"],
    ["eval", "--model", "RUN", "--data", "dapo.quickstart.task:eval_problems"],
    ["data", "probe", "dapo.quickstart.task:eval_problems", "--model", "RUN"],
    ["export", "RUN", "--out", "exported"],
    ["report", "RUN"],
    ["report", "RUN", "--terminal"],
    ["doctor", "RUN"],
    ["ledger", "RUN"],
    ["play", "RUN"],
    ["explain", "RUN"],
    ["explain", "RUN", "quickstart"],
    ["verify", "--audit", "RUN"],
    ["watch", "RUN/nothing"],
]
TAKE_NO_RUN = {"quickstart", "import-config", "init", "bench", "selfcheck"}


def test_every_verb_is_tried_or_takes_no_run():
    assert {words[0] for words in COMMANDS} | TAKE_NO_RUN == set(ALL_COMMANDS)


@pytest.mark.parametrize(
    "kind",
    [
        "command",
        "module",
        "train",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                "problems that name a command",
                "part",
                "part that is a command",
                "eval",
                "a source's command",
            )
        ),
    ],
)
def test_no_command_runs_what_a_strangers_folder_names(kind, canary, tmp_path):
    run = strangers_run(tmp_path / "strangers", planted(kind, canary))
    for words in COMMANDS:
        answer = run_dapo(*(word.replace("RUN", str(run)) for word in words))
        assert not canary.exists(), words
        if words[0] in ("resume", "train", "ladder"):
            assert answer.returncode == 2, words
            assert "names code" in answer.stderr, words
            assert "--trust" in answer.stderr, words


@pytest.mark.parametrize("words", [c for c in COMMANDS if c[0] in ("eval", "data")])
def test_an_evaluation_asks_for_a_verifier_or_trust(words, canary, tmp_path):
    run = strangers_run(tmp_path / "strangers", planted("command", canary))
    typed = [word.replace("RUN", str(run)) for word in words]
    answer = run_dapo(*typed)
    assert answer.returncode == 2
    assert program(canary) in answer.stderr
    assert "--verifier" in answer.stderr
    assert "no intact checkpoint" in run_dapo(*typed, "--verifier", "math").stderr  # goes on to what is missing next
    assert "no intact checkpoint" in run_dapo(*typed, "--trust").stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["command", "train"])
def test_trust_runs_it(kind, canary, tmp_path):
    run = strangers_run(tmp_path / "strangers", planted(kind, canary))
    answer = run_dapo("resume", str(run), "--trust")
    assert answer.returncode == 2  # the planted program does not answer, the planted set has no usable row
    assert canary.exists()


def test_what_was_typed_is_the_users_own(canary, tmp_path):
    run = strangers_run(tmp_path / "strangers", planted("command", canary))
    answer = run_dapo("train", str(run / "config.toml"), "--set", "rewards.verifier=no-such-verifier", "--out", "new")
    assert "no such verifier" in answer.stderr
    assert not canary.exists()


@pytest.mark.parametrize(
    ("kind", "key", "typed"),
    [
        ("a source's command", "data.train.a.verifier", "data.train.a.verifier=exact"),
        ("a source's module", "data.train.a.verifier", "data.train=gsm8k"),
        ("a source's problems", "data.train.a.path", "data.train={c={path='gsm8k'}}"),
        ("a source that names a command", "data.train.a.verifier", "data.train.a.verifier=exact"),
        ("an evaluation set's module", "data.eval.a.verifier", "data.eval=[]"),
    ],
)
def test_every_source_of_a_table_is_looked_at(kind, key, typed, canary, tmp_path):
    run = strangers_run(tmp_path / "strangers", planted(kind, canary))
    for changes in ([], ["train.steps=3"], ["data.train.a.weight=2"] * key.startswith("data.train")):
        with pytest.raises(ConfigError, match=f"names code .*{key} = "):
            refuse_strangers_run(run, changes, trust=False)
    refuse_strangers_run(run, [typed], trust=False)  # what is replaced is not run
    trust_run(run, load_recipe("quickstart", planted(kind, canary)).config)
    assert is_trusted(run, keys_of(run / "config.toml"))
    refuse_strangers_run(run, [], trust=False)
    if kind == "a source that names a command":
        canary.with_name("problems.jsonl").write_text("{}\n")
        assert not is_trusted(run, keys_of(run / "config.toml"))


def test_the_python_api_refuses_a_strangers_config_as_recipe(canary, tmp_path):
    run = strangers_run(tmp_path / "strangers", planted("module", canary))
    with pytest.raises(ConfigError, match="names code"):
        dapo.train(run / "config.toml", out=tmp_path / "new")
    assert not canary.exists()


@pytest.fixture
def own_run(canary, tmp_path):
    """A run folder as `begin_run` leaves it: config and record."""
    overrides = planted("module", canary)
    run = strangers_run(tmp_path / "own", overrides)
    trust_run(run, load_recipe("quickstart", overrides).config)
    return run


def test_a_run_of_ones_own_is_trusted_by_a_record_outside_the_folder(own_run):
    assert is_trusted(own_run, keys_of(own_run / "config.toml"))
    home = state_folder()
    assert home is not None
    assert home.is_relative_to(os.environ["XDG_STATE_HOME"])
    assert [path.name for path in own_run.iterdir() if path.name.startswith(".")] == [ID]


def test_trust_ends_with_a_changed_config_a_copy_another_id_and_a_lost_record(own_run, tmp_path, canary):
    keys = keys_of(own_run / "config.toml")
    assert not is_trusted(own_run, keys | {"rewards.verifier": program(canary)})
    assert not is_trusted(own_run, keys | {"data.eval": ["planted_module:rows"]})
    moved = own_run.rename(tmp_path / "moved")
    assert not is_trusted(moved, keys)
    moved.rename(own_run)
    assert is_trusted(own_run, keys)
    identity = (own_run / ID).read_text()
    (own_run / ID).write_text("0" * 32)
    assert not is_trusted(own_run, keys)
    (own_run / ID).write_text(identity)
    home = state_folder()
    assert home is not None
    record_file(home, own_run).unlink()
    assert not is_trusted(own_run, keys)


def test_problems_that_name_programs_are_trusted_by_what_they_say(canary, tmp_path):
    overrides = planted("problems that name a command", canary)
    run = strangers_run(tmp_path / "own", overrides)
    trust_run(run, load_recipe("quickstart", overrides).config)
    assert is_trusted(run, keys_of(run / "config.toml"))
    canary.with_name("problems.jsonl").write_text("{}\n")
    assert not is_trusted(run, keys_of(run / "config.toml"))


@pytest.mark.parametrize("typed", ["~/problems.jsonl", "problems.jsonl", "gsm8k"])
def test_problems_are_known_by_what_is_read_however_they_are_named(typed, canary, tmp_path, monkeypatch):
    problems_with_command(canary)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DAPO_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    read = tmp_path / ("gsm8k/train.jsonl" if typed == "gsm8k" else "problems.jsonl")
    read.write_text((tmp_path / "problems.jsonl").read_text())
    overrides = ["rewards.verifier=command", f"data.train={typed}"]
    run = strangers_run(tmp_path / "own", overrides)
    trust_run(run, load_recipe("quickstart", overrides).config)
    keys = keys_of(run / "config.toml")
    assert is_trusted(run, keys)
    read.rename(tmp_path / "aside")  # from another folder, say: there is nothing that could be run
    assert is_trusted(run, keys)
    read.write_text("{}\n")
    assert not is_trusted(run, keys)


class Second(World):
    """A rank that the first one tells what it has decided on."""

    rank, size = 1, 2

    def __init__(self, first: object) -> None:
        self.first = first

    def from_first(self, value: object) -> object:  # noqa: ARG002
        return self.first


def test_ranks_without_a_record_run_what_the_first_one_does_and_nothing_before(canary, tmp_path, monkeypatch):
    run = strangers_run(tmp_path / "strangers", [*planted("module", canary), "cluster.backend=torchrun"])
    config = load_recipe(str(run / "config.toml")).config
    with pytest.raises(ConfigError, match="names code"):
        check_early(run, [])
    monkeypatch.setenv("RANK", "1")
    check_early(run, [])
    assert not canary.exists()
    agree_on_code(Second({"rewards.verifier": "planted_module:reward"}), config)
    with pytest.raises(ConfigError, match="rank 1: its config names other code"):
        agree_on_code(Second({}), config)
    alone = strangers_run(tmp_path / "alone", planted("module", canary))  # no world in which a first one could decide
    with pytest.raises(ConfigError, match="names code"):
        check_early(alone, [])


def test_a_python_file_in_the_folder_is_trusted_by_what_it_says(canary, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    own = folder / "reward.py"
    own.write_text("def reward(response, answer, meta):\n    return 1.0\n")
    keys = [f"rewards.verifier={json.dumps(f'{own}:reward')}", f"data.environment={json.dumps(f'{own}:Game')}"]
    config = load_recipe("quickstart", keys).config
    (folder / "config.toml").write_text(to_toml(config))
    with pytest.raises(ConfigError, match=r"rewards.verifier = .*reward.py:reward; data.environment|data.environment"):
        refuse_strangers_run(folder, [], trust=False)
    trust_run(folder, config)
    assert is_trusted(folder, keys_of(folder / "config.toml"))
    own.write_text(MODULE.format(canary=str(canary)))
    assert not is_trusted(folder, keys_of(folder / "config.toml"))


def test_a_record_that_the_folder_brings_along_counts_for_nothing(canary, tmp_path, monkeypatch):
    run = strangers_run(tmp_path / "strangers", planted("command", canary))
    monkeypatch.setenv("XDG_STATE_HOME", "strangers")  # not absolute: no state folder at all by the XDG rules
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert state_folder() == tmp_path / "home" / ".local" / "state" / "dapo" / "runs"
    (run / ID).write_text("0" * 32)
    assert not is_trusted(run, keys_of(run / "config.toml"))


def test_a_run_that_names_no_code_leaves_no_record(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = strangers_run(tmp_path / "plain", [])
    trust_run(run, load_recipe("quickstart", []).config)
    assert not (tmp_path / "state").exists()
    assert not (run / ID).exists()
