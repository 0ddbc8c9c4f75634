"""A run whose verifier is a judge: the server dies, the run stops with a checkpoint, and resumed it is the same run."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_server import LoopbackServer
from toy import contains, recipe

from command_line import dapo
from dapo.errors import VerifierStopped
from dapo.trainer.loop import train
from dapo.trainer.resume import resume_run
from dapo.trainer.start import start_run

RUBRIC = """
url = "{url}"
model = "tiny"

[criteria.right]
question = "Is it right?"

[budget]
concurrency = 2
wait_s = 0.2
"""
NOT_COMPARED = ("timing.", "memory.")


def texts_in(body: dict[str, Any]) -> dict[str, str]:
    return json.loads("\n".join(body["messages"][1]["content"].split("\n")[1:-2]))


def right(body: dict[str, Any]) -> tuple[int, str]:
    texts = texts_in(body)
    return 200, json.dumps({"right": 10 if contains(texts["response"], texts["reference_answer"], {}).correct else 0})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dapo.rewards.judging.asking.FIRST_WAIT_S", 0.02)
    monkeypatch.setattr("dapo.rewards.pool._LOOK_SECONDS", 0.05)
    made = LoopbackServer(right)
    yield made
    made.kill()


def judged(folder: Path, url: str) -> str:
    path = folder / "rubric.toml"
    path.write_text(RUBRIC.format(url=url))
    return f"rewards.verifier=judge:{path}"


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(NOT_COMPARED)} for line in lines]


@pytest.mark.slow
def test_a_run_whose_judge_dies_is_resumed_and_asks_nothing_twice(server: LoopbackServer, tmp_path: Path):
    key = judged(tmp_path, server.url)
    run = start_run(recipe(tmp_path, key), tmp_path / "whole")
    train(run)
    run.close()
    n_whole = len(server.bodies)
    assert n_whole > 20

    def dying(body: dict[str, Any]) -> tuple[int, str]:
        return right(body) if len(server.bodies) < 3 * n_whole // 2 else (503, "")

    server.script = dying
    run = start_run(recipe(tmp_path, key), tmp_path / "cut")
    with pytest.raises(VerifierStopped, match=r"has not answered.*HTTP 503") as stopped:
        train(run)
    run.close()
    assert stopped.value.exit_code == 1
    assert list((tmp_path / "cut" / "checkpoints").iterdir())
    events = (tmp_path / "cut" / "events.jsonl").read_text()
    assert "has not answered" in events
    assert "verdicts asked for" in events

    server.script = right
    resumed = resume_run(tmp_path / "cut")
    train(resumed)
    resumed.close()
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    answered = [json.loads(line) for line in (tmp_path / "cut" / "judge" / "verdicts.jsonl").read_text().splitlines()]
    keys = [line["key"] for line in answered]
    assert len(keys) == len(set(keys)) == n_whole


def test_an_audit_measures_the_judge_against_a_rule_and_names_the_rows(server: LoopbackServer, tmp_path: Path):
    """The rule is the toy's own; the judge says the contrary of every other response."""
    run = start_run(recipe(tmp_path, "train.steps=1"), tmp_path / "run")
    train(run)
    run.close()

    def contrary(body: dict[str, Any]) -> tuple[int, str]:
        says = json.loads(right(body)[1])["right"]
        return 200, json.dumps({"right": 10 - says if len(texts_in(body)["response"]) % 2 else says})

    server.script = contrary
    key = judged(tmp_path, server.url).partition("=")[2]
    answer = dapo("verify", "--audit", str(tmp_path / "run"), "--verifier", key, "--json")
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    kinds = told["disagreements"]
    assert told["rows"] == told["agree"] + sum(kind["n"] for kind in kinds)
    assert all(len(kind["rows"]) == kind["n"] for kind in kinds)
    assert {(kind["run"], kind["second"]) for kind in kinds} <= {("CORRECT", "WRONG"), ("WRONG", "CORRECT")}
    assert kinds
    assert "verdicts asked for" in answer.stderr
    asked = len(server.bodies)
    shown = dapo("verify", "--audit", str(tmp_path / "run"), "--verifier", key)
    assert len(server.bodies) == asked  # the run's folder has the verdicts
    assert f"{told['agree']} (" in shown.stdout
    assert kinds[0]["rows"][0] in shown.stdout
    assert "right " in shown.stdout  # what the judge said, by criterion
