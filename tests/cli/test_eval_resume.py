"""`dapo eval` killed in the middle goes on without repeating a finished response."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_line import dapo
from dapo.cli.main import main
from dapo.cli.options.examination import way_of
from dapo.config import load_recipe
from dapo.config.load import to_toml
from dapo.errors import ConfigError
from dapo.models.load import save_policy
from tiny_models import tiny_policy

DATA = (
    Path(os.environ.get("DAPO_DATA", Path(__file__).parents[3] / "shared" / "data")) / "aime2024" / "aime-2024.parquet"
)


def responses(path: Path) -> list[tuple[str, int]]:
    """(problem, index) of the whole lines, the first one (settings) left out."""
    found = []
    for line in path.read_text().split("\n")[1:-1]:
        record = json.loads(line)
        found.append((record["problem_id"], record["response_index"]))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason=f"no AIME 2024 file at {DATA}")
def test_aime_x_32_killed_and_resumed_repeats_nothing(tmp_path: Path):
    save_policy(tiny_policy("llama", max_position_embeddings=4096), tmp_path / "model")
    out = tmp_path / "answers.jsonl"
    command = [
        sys.executable, "-m", "dapo", "eval", "--model", str(tmp_path / "model"), "--data", str(DATA), "--k", "32",
        "--template", "raw", "--no-chat", "--max-response-tokens", "40", "--concurrent", "16", "--device", "cpu",
        "--out", str(out), "--json",
    ]  # fmt: skip
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 1800
    while time.monotonic() < deadline and (not out.exists() or out.read_text().count("\n") < 200):
        assert child.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    before = responses(out)
    assert 100 < len(before) < 960

    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    after = responses(out)
    assert after[: len(before)] == before  # what was there stays, in its place
    assert len(after) == len(set(after)) == 30 * 32
    line = json.loads(done.stdout)
    assert (line["problems"], line["k"]) == (30, 32)


@pytest.mark.slow
def test_a_run_is_asked_as_it_was_trained(tmp_path: Path):
    """The line that `dapo train` prints at its end works as it stands."""
    run = tmp_path / "run"
    keys = ["train.steps=1", "eval.every_steps=0", "sampling.prompts_per_step=8", "sampling.responses_per_prompt=4"]
    trained = dapo("train", "quickstart", *(part for key in keys for part in ("--set", key)), "--out", str(run))
    assert trained.returncode == 0, trained.stderr
    problems = "dapo.quickstart.task:eval_problems"
    way = way_of(str(run), None, None, None, None, None)
    assert (way["template"], way["chat"], way["verifier"]) == ("raw", False, "math")
    assert way == way_of("bundled", None, None, None, None, None)
    assert way_of(str(run), 7, None, "boxed", True, None) == way | {
        "max_response_tokens": 7, "template": "boxed", "chat": True,
    }  # fmt: skip
    assert way_of("some/model", None, None, None, None, None)["template"] == "dapo"
    scored = json.loads(dapo("eval", "--model", str(run), "--data", problems, "--k", "1", "--json").stdout)
    assert scored["unparseable"] < 0.5, "asked in another form it could not be read"


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ('{"max_position_embeddings": 256}', 128),
        ('{"max_position_embeddings": 32768}', 2048),
        ("{}", 2048),
        ("torn", 2048),
    ],
)
def test_limits_that_nobody_typed_fit_the_model(tmp_path: Path, config: str, limit: int):
    (tmp_path / "config.json").write_text(config)
    way = way_of(str(tmp_path), None, None, None, None, None)
    assert (way["max_prompt_tokens"], way["max_response_tokens"]) == (limit, limit)
    assert way_of(str(tmp_path), 9, None, None, None, None)["max_response_tokens"] == 9


@pytest.mark.parametrize("temperature", ["inf", "nan", "-1"])
def test_a_temperature_that_is_none_is_refused(temperature: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["eval", "--model", "bundled", "--data", "no.jsonl", f"--temperature={temperature}"])
    assert ended.value.code == 2
    assert "--temperature" in capsys.readouterr().err


# No answer is the reference, so that there is always a second try.
QUESTIONS = "".join(json.dumps({"question": f"{n}+2=?", "answer": "1000"}) + "\n" for n in (11, 12))


def test_responses_with_an_environment_are_episodes_and_are_not_mixed_with_others(tmp_path: Path):
    (tmp_path / "two.jsonl").write_text(QUESTIONS)
    out = tmp_path / "answers.jsonl"
    words = ["eval", "--model", "bundled", "--data", str(tmp_path / "two.jsonl"), "--k", "1", "--out", str(out)]
    words += ["--max-prompt-tokens", "64", "--max-turns", "2", "--environment"]
    done = dapo(*words, "second-try")
    assert done.returncode == 0, done.stderr
    settings, *lines = (json.loads(line) for line in out.read_text().splitlines())
    assert (settings["settings"]["environment"], settings["settings"]["max_turns"]) == ("second-try", 2)
    assert len(lines) == 2
    assert all("That is wrong. Try again." in line["text"] for line in lines)
    mixed = dapo(*words, "none")
    assert mixed.returncode == 2
    assert "something else" in mixed.stderr
    assert "ConfigError: --environment = 'no-such': no such environment" in dapo(*words, "no-such").stderr
    out.unlink()
    longer = dapo(*words, "guess")
    assert longer.returncode == 2
    assert "with what environment guess adds, the prompt" in longer.stderr
    out.unlink(missing_ok=True)
    assert "ConfigError: --environment = 'nowhere:Game': cannot be imported" in dapo(*words, "nowhere:Game").stderr


def test_an_environment_of_a_strangers_run_needs_trust(tmp_path: Path):
    keys = ["data.environment=theirs:Game", "limits.max_turns=3"]
    (tmp_path / "config.toml").write_text(to_toml(load_recipe("quickstart", keys).config))
    nothing = (str(tmp_path), None, None, None, None, None)
    with pytest.raises(ConfigError, match=r"data\.environment = theirs:Game") as refused:
        way_of(*nothing)
    assert "--environment none" in refused.value.remedy
    trusted = way_of(*nothing, trust=True)
    assert (trusted["environment"], trusted["max_turns"]) == ("theirs:Game", 3)
    assert trusted["environment_key"] == "data.environment"
    typed = {"environment": "guess", "environment_key": "--environment", "max_turns": 5}
    assert way_of(*nothing, environment="guess", max_turns=5) == trusted | typed
    assert way_of(*nothing, environment="none")["environment"] == ""


def test_a_source_of_the_runs_mixture_has_its_own_environment(tmp_path: Path):
    keys = ["data.train={a = {path='one.jsonl'}, b = {path='two.jsonl', environment='guess'}}"]
    keys += ["data.eval={c = {path='three.jsonl', environment='theirs:Game'}}"]
    (tmp_path / "config.toml").write_text(to_toml(load_recipe("quickstart", keys).config))
    nothing = (str(tmp_path), None, None, None, None, None)
    said = {
        data: (way["environment"], way["environment_key"])
        for data in ("one.jsonl", "two.jsonl", "three.jsonl", "other.jsonl")
        for way in [way_of(*nothing, data=data, trust=True)]
    }
    assert said == {
        "one.jsonl": ("", "data.environment"),
        "two.jsonl": ("guess", "data.train.b.environment"),
        "three.jsonl": ("theirs:Game", "data.eval.c.environment"),
        "other.jsonl": ("", "data.environment"),
    }
    typed = way_of(*nothing, data="two.jsonl", environment="wordle", trust=True)
    assert (typed["environment"], typed["environment_key"]) == ("wordle", "--environment")
    with pytest.raises(ConfigError, match=r"data\.eval\.c\.environment = theirs:Game"):
        way_of(*nothing, data="three.jsonl")
