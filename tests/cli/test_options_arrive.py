"""What is typed for `dapo eval`, `dapo data probe` and `dapo play` arrives where it counts.

As `tests/trainer/test_keys_arrive.py` has it for a run's keys: first from the command line to the plan, then from the
plan to the part that reads it, with values that are nobody's default.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from command_line import dapo
from dapo.config.model_shapes import model_location
from dapo.evaluation import offline, play
from dapo.evaluation.offline import OfflineEval, run_offline_eval
from dapo.rollout.engine import SamplingParams

SHARED: dict[str, object] = {
    "temperature": 0.9, "max_response_tokens": 11, "max_prompt_tokens": 41, "template": "raw", "verifier": "exact",
    "environment": "calculator", "max_turns": 5, "seed": 23, "device": "cpu", "engine": "plain",
}  # fmt: skip
COMMANDS: dict[tuple[str, ...], dict[str, object]] = {
    ("eval", "--model", "bundled", "--data"): SHARED | {"k": 3, "top_p": 0.8, "concurrent": 7},
    ("data", "probe", "--model", "bundled"): SHARED | {"k": 3, "concurrent": 7},
    ("play", "bundled", "--data"): SHARED | {"top_p": 0.8},
}
DECIDED = {  # by the command itself, or by what the other options say
    ("eval", "--model", "bundled", "--data"): {"use": "eval"},
    ("data", "probe", "--model", "bundled"): {"use": "train", "top_p": 1.0},
    ("play", "bundled", "--data"): {"use": "train", "k": 1, "concurrent": 1},
}


class End(Exception):
    """Nothing after that is looked at."""


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} + 4 = ", "answer": str(n + 4)}) + "\n" for n in (1, 2)))
    return path


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_is_typed_is_in_the_plan(
    command: tuple[str, ...], chat: bool, problems: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[OfflineEval] = []

    def end(plan: OfflineEval, *_: object, **__: object) -> None:
        seen.append(plan)
        raise End

    monkeypatch.setattr(offline, "run_offline_eval", end)
    monkeypatch.setattr(play, "play", end)
    typed = [part for name, value in COMMANDS[command].items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with pytest.raises(End):
        dapo(*command, str(problems), *typed, "--chat" if chat else "--no-chat")
    expected = COMMANDS[command] | DECIDED[command] | {"model": "bundled", "data": str(problems), "chat": chat}
    assert {name: getattr(seen[0], name) for name in expected} == expected
    assert expected.keys() | {"environment_key"} == {field.name for field in fields(OfflineEval)}


class Arrival(NamedTuple):
    field: str
    call: str  # a name of `dapo.evaluation.offline`
    argument: str
    expected: object
    of: Callable[[Any], object] = lambda argument: argument


PLAN = OfflineEval(
    model="bundled", data="", use="eval", k=3, temperature=0.9, top_p=0.8, max_response_tokens=11,
    max_prompt_tokens=41, template="raw", chat=False, verifier="exact", seed=23, concurrent=7, device="cpu",
    engine="plain", environment="calculator", environment_key="data.environment", max_turns=5,
)  # fmt: skip
ARRIVALS = (
    Arrival("data", "load_problems", "source", "problems.jsonl", lambda path: Path(path).name),
    Arrival("use", "load_problems", "use", "eval"),
    Arrival("verifier", "load_problems", "verifier", "exact"),
    Arrival("verifier", "VerifierPool", "verifier", "exact"),
    Arrival("template", "PromptFormat", "template", "raw"),
    Arrival("chat", "PromptFormat", "chat", False),
    Arrival("chat", "TurnMarks", "chat", False),
    Arrival("model", "load_policy", "path", model_location("bundled")),
    Arrival("device", "choose_device", "wanted", "cpu"),
    Arrival("device", "load_policy", "device", "cpu"),
    Arrival("max_prompt_tokens", "encode_problems", "max_prompt_tokens", 41),
    Arrival("max_prompt_tokens", "opened", "max_prompt_tokens", 41),
    Arrival("max_prompt_tokens", "PlainEngine", "max_tokens", 41 + 11),
    Arrival("temperature", "PlainEngine", "sampling", SamplingParams(temperature=0.9, top_p=0.8)),
    Arrival("top_p", "PlainEngine", "sampling", SamplingParams(temperature=0.9, top_p=0.8)),
    Arrival("concurrent", "PlainEngine", "max_concurrent", 7),
    Arrival("engine", "PlainEngine", "max_concurrent", 7),
    Arrival("environment", "EnvironmentPool", "names", ["calculator"]),
    Arrival("environment_key", "EnvironmentPool", "keys", {"calculator": "data.environment"}),
    Arrival("max_turns", "EpisodeEngine", "max_turns", 5),
    Arrival("k", "evaluate", "k", 3),
    Arrival("max_response_tokens", "evaluate", "max_new_tokens", 11),
    Arrival("seed", "evaluate", "seed", 23),
    Arrival("seed", "opened", "key", 23, lambda key: key.seed),
)


def test_the_plan_is_carried_out(problems: Path, monkeypatch: pytest.MonkeyPatch):
    calls: dict[str, list[dict[str, Any]]] = {arrival.call: [] for arrival in ARRIVALS}

    def watch(name: str) -> None:
        called = getattr(offline, name)
        signature = inspect.signature(called)

        def watched(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            calls[name].append(bound.arguments)
            return called(*args, **kwargs)

        monkeypatch.setattr(offline, name, watched)
        if name == "PlainEngine":
            monkeypatch.setitem(offline.ENGINES, "plain", watched)

    for call in calls:
        watch(call)
    found = run_offline_eval(replace(PLAN, data=str(problems)))
    assert len(found.problems) == 2
    for arrival in ARRIVALS:
        seen = [arrival.of(bound[arrival.argument]) for bound in calls[arrival.call]]
        assert seen, f"{arrival.call} was not called"
        assert all(value == arrival.expected for value in seen), f"{arrival.field}: {seen}"
    assert {arrival.field for arrival in ARRIVALS} == {field.name for field in fields(OfflineEval)}
