"""Environments of `verifiers` and OpenEnv, the real packages, run by their adapters (make test-environments)."""

import importlib.util
import os
import socket
import threading
import time

import pytest

from dapo.environments.adapters import openenv, verifiers_env
from dapo.environments.adapters.openenv import OpenEnv, is_loopback
from dapo.environments.adapters.verifiers_env import VerifiersEnv
from dapo.environments.protocol import Environment, Turn
from dapo.errors import ConfigError
from dapo.types import Problem, Score

DEMANDED = os.environ.get("DAPO_NEEDS_ENVIRONMENTS") == "1"


def needs(package: str) -> pytest.MarkDecorator:
    is_there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not is_there and not DEMANDED, reason=f"{package} is not installed")


PROBLEM = Problem("p", "Find the number from 1 to 9.", "6", meta={"highest": 9})


@pytest.mark.parametrize(
    ("host", "is_here"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
    + [(host, False) for host in ("10.0.0.1", "example.com", "localhost.example.com", "", "127.0.0.1.nip.io")],
)
def test_loopback(host: str, is_here: bool):
    assert is_loopback(host) is is_here


def test_a_server_elsewhere_is_refused():
    with pytest.raises(ConfigError, match="not on this machine"):
        openenv.connected("http://192.0.2.1:8000")


# verifiers


def hot_or_cold() -> object:
    """A multi-turn environment as its users write them."""
    import verifiers as vf
    from datasets import Dataset

    class HotOrCold(vf.MultiTurnEnv):
        async def setup_state(self, state):
            state["guesses"] = []
            return state

        async def env_response(self, messages, state):
            guess = int(messages[-1]["content"].split()[-1])
            state["guesses"].append(guess)
            if guess == int(state["answer"]):
                state["final_env_response"] = [{"role": "user", "content": "Found."}]
                return state["final_env_response"]
            return [{"role": "user", "content": "Higher." if guess < int(state["answer"]) else "Lower."}]

    def found(completion, answer):
        said = [message["content"] for message in completion if message["role"] == "assistant"]
        return float(said[-1].split()[-1] == answer)

    def n_guesses(state, info):
        return len(state["guesses"]) / info["highest"]

    rubric = vf.Rubric(funcs=[found, n_guesses], weights=[1.0, -0.5])
    rows = Dataset.from_list([{"question": "Find it.", "answer": "6"}])
    return HotOrCold(dataset=rows, rubric=rubric, system_prompt="You are a player.", max_turns=3)


class HotOrColdHere(VerifiersEnv):
    @classmethod
    def load(cls) -> object:
        return hot_or_cold()


@pytest.mark.environments
@needs("verifiers")
def test_an_environment_of_verifiers():
    environment = HotOrColdHere()
    assert isinstance(environment, Environment)
    assert environment.start(PROBLEM, 0) == "You are a player."
    assert environment.respond("I say 3") == Turn("Higher.")
    assert environment.respond("I say 8") == Turn("Lower.")
    end = environment.respond("I say 6")  # the third turn: their max_turns ends it before their response
    assert end.score is not None
    assert end.score.parts == {"found": 1.0, "n_guesses": 2 / 9, "num_turns": 3.0}
    assert end.score.value == pytest.approx(1.0 - 0.5 * 2 / 9)
    assert end.score.correct is None


@pytest.mark.environments
@needs("verifiers")
def test_their_final_response_ends_it():
    environment = HotOrColdHere()
    environment.start(PROBLEM, 0)
    end = environment.respond("I say 6")
    assert end.text == "Found."
    assert end.score is not None
    assert end.score.parts["found"] == 1.0


def with_tools() -> object:
    import verifiers as vf
    from datasets import Dataset

    def add(a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b

    def right(completion, answer):
        return float(answer in completion[-1]["content"])

    rows = Dataset.from_list([{"question": "?", "answer": "6"}])
    return vf.ToolEnv(tools=[add], dataset=rows, rubric=vf.Rubric(funcs=[right]), max_turns=5)


class WithTools(VerifiersEnv):
    @classmethod
    def load(cls) -> object:
        return with_tools()


@pytest.mark.environments
@needs("verifiers")
def test_tools_of_verifiers():
    environment = WithTools()
    prompt = environment.start(PROBLEM, 0)
    assert '"name":"add"' in prompt
    assert "The sum of two numbers." in prompt
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 4}}</tool_call>'
    assert environment.respond(call) == Turn("6", role="tool", called=True)
    wrong = environment.respond('<tool_call>{"name": "add", "arguments": {"c": 2}}</tool_call>')
    assert "unexpected keyword argument" in wrong.text
    end = environment.respond("So it is 6. <tool_call>{ is no call")
    assert end.score is not None
    assert end.score.value == 1.0
    assert end.score.parts["add_calls"] == 2.0


class OfGroups(VerifiersEnv):
    @classmethod
    def load(cls) -> object:
        env = hot_or_cold()
        env.rubric.rubrics[0].add_reward_func(lambda completions: [0.0] * len(completions))
        return env


class Missing(VerifiersEnv):
    environment = "no-such-environment"


@pytest.mark.environments
@needs("verifiers")
def test_what_cannot_be_run():
    with pytest.raises(ConfigError, match="compares the rollouts of a group"):
        OfGroups().start(PROBLEM, 0)
    with pytest.raises(ValueError, match="no-such-environment"):
        Missing().start(PROBLEM, 0)


def test_what_is_no_environment_of_verifiers():
    class Bare(VerifiersEnv):
        @classmethod
        def load(cls) -> object:
            return object()

    class NotThere(VerifiersEnv):
        @classmethod
        def load(cls) -> object:
            raise ImportError("No module named 'verifiers'")

    with pytest.raises(ConfigError, match="object is no MultiTurnEnv: it has no setup_state"):
        verifiers_env.loaded(Bare)
    with pytest.raises(ConfigError, match="cannot be imported") as raised:
        verifiers_env.loaded(NotThere)
    assert "pip install 'dapo[verifiers]'" in raised.value.remedy


# OpenEnv


@pytest.fixture(scope="module")
def server():
    """A game on loopback, by the package's own server."""
    import random

    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment as ServedEnvironment
    from openenv.core.env_server.types import Action, Observation, State

    class Number(Action):
        number: int

    class Hint(Observation):
        hint: str

    class Game(ServedEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, **_):
            self.number = random.Random(seed).randint(1, 9)
            return Hint(hint="A number from 1 to 9.")

        def step(self, action, **_):
            if action.number == self.number:
                return Hint(hint="Found.", done=True, reward=1.0)
            return Hint(hint="Higher." if action.number < self.number else "Lower.", reward=-0.25)

        @property
        def state(self):
            return State()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Game, Number, Hint, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)  # pytest's own time limit ends this
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def game_at(server: str) -> OpenEnv:
    class Game(OpenEnv):
        url = server

        def action(self, said: str) -> dict | None:
            last = said.split()[-1] if said.split() else ""
            return {"number": last} if last else None

        def score(self, total: float) -> Score:
            return Score(total, correct=total > 0)

    return Game()


@pytest.mark.environments
@needs("openenv")
def test_an_environment_of_openenv(server: str):
    import random

    number = random.Random(7).randint(1, 9)
    environment, other = game_at(server), game_at(server)
    assert environment.start(PROBLEM, 7) == "A number from 1 to 9."
    other.start(PROBLEM, 8)  # a session of its own
    assert environment.respond("") == Turn(openenv.NO_ACTION, failed=True)
    refused = environment.respond("I say seven")
    assert refused.failed
    assert "VALIDATION_ERROR" in refused.text
    assert environment.respond("I say 0") == Turn("Higher.", called=True)
    assert environment.respond("I say 10") == Turn("Lower.", called=True)
    assert environment.respond(f"I say {number}") == Turn("Found.", Score(0.5, correct=True), called=True)


@pytest.mark.environments
@needs("openenv")
def test_no_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        game_at(f"http://127.0.0.1:{port}").start(PROBLEM, 0)


def test_an_observation_as_text():
    environment = OpenEnv()
    assert environment.shown({"hint": "Higher.", "done": False, "reward": None, "metadata": {}}) == "Higher."
    assert environment.shown({"board": [1, 2], "hint": "é"}) == '{"board": [1, 2], "hint": "é"}'
    with pytest.raises(NotImplementedError, match="action"):
        environment.respond("x")
