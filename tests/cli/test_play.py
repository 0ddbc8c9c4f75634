"""`dapo play`: an episode as it goes, the model's or one's own."""

import json
import re
from pathlib import Path
from typing import ClassVar

import pytest

from command_line import dapo
from dapo.cli.play import ending, show, source_of, typed_turn
from dapo.config import load_recipe, to_toml
from dapo.console import Pipe
from dapo.data.prompts import PromptFormat
from dapo.environments.conversation import Conversation
from dapo.environments.pool import EnvironmentPool
from dapo.errors import ConfigError
from dapo.evaluation.offline import OfflineEval, run_offline_eval
from dapo.evaluation.play import Played, Spoken, play, play_yourself
from dapo.types import Judgement, Problem, StopReason, Verdict

ID = "quickstart-cb4e8d93f04a"  # its noise leads to a turn that ends with Wait
ASKED = Problem(ID, "4-3-7=?", "-6", environment="calculator")
GAME = """
from dapo.environments.protocol import Turn
from dapo.types import Score


class Echo:
    def start(self, problem, seed):
        return f"Seed {seed}."

    def respond(self, said):
        if said == "die":
            raise ValueError("not today")
        return Turn(f"[bold]{said}[/bold] \\x1b[31m:smile:", called=True, failed=said == "no")
"""


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "play_game.py").write_text(GAME)
    (tmp_path / "one.jsonl").write_text(json.dumps({"id": "a", "question": "Say it.", "answer": "no"}) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return "play_game:Echo"


def plan(**changes: object) -> OfflineEval:
    settings = {
        "model": "bundled", "data": "", "use": "train", "k": 1, "temperature": 1.0, "top_p": 1.0,
        "max_response_tokens": 64, "max_prompt_tokens": 32, "template": "raw", "chat": False, "verifier": "math",
        "seed": 5, "concurrent": 1, "device": "cpu", "environment": "calculator", "max_turns": 8,
    }  # fmt: skip
    return OfflineEval(**(settings | changes))  # type: ignore[arg-type]


def test_the_model_plays_what_an_evaluation_draws_and_every_turn_is_told_once(tmp_path: Path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"id": ID, "question": "4-3-7=?", "answer": "-6"}) + "\n")
    answers = run_offline_eval(plan(data=str(tmp_path / "one.jsonl"))).answers
    heard: list[Spoken] = []
    played = play(plan(), ASKED, PromptFormat("raw", chat=False), heard.append)
    assert tuple(heard) == played.spoken
    assert heard[0] == Spoken("prompt", "4-3-7=?")
    assert [spoken.who for spoken in heard[1:4]] == ["model", "environment", "model"]
    assert heard[2].called
    assert "".join(spoken.text for spoken in heard[1:]) == answers[ID, 0].text
    assert played.n_tokens == answers[ID, 0].n_tokens
    assert played.judgement is not None
    assert (played.judgement.verdict, played.judged_by) == (answers[ID, 0].verdict, "verifier math")


class Noted(EnvironmentPool):
    """Remembers the seeds that prompts and episodes were made from."""

    begun: ClassVar[list[int]] = []
    played: ClassVar[list[int]] = []

    def opening(self, problem: Problem, seed: int) -> str:
        self.begun.append(seed)
        return super().opening(problem, seed)

    def ask(self, conversation: Conversation) -> int:
        self.played.append(conversation.seed)
        return super().ask(conversation)


def test_the_prompt_of_an_evaluation_tells_of_the_game_that_is_played(game: str, monkeypatch: pytest.MonkeyPatch):
    """Both are made from a seed, which is to be the same; and of turns there are as many as the plan says."""
    monkeypatch.setattr("dapo.evaluation.offline.EnvironmentPool", Noted)
    run_offline_eval(plan(data="one.jsonl", environment=game, max_turns=1))
    assert len(Noted.begun) == len(Noted.played) == 1
    assert Noted.begun == Noted.played


def test_without_an_environment_an_episode_is_one_turn():
    alone = Problem("p", "4-3-7=?", "-6")
    played = play(plan(environment=""), alone, PromptFormat("raw", chat=False), lambda _spoken: None)
    assert [spoken.who for spoken in played.spoken] == ["prompt", "model"]
    assert "Answer:" in played.spoken[1].text


def test_one_plays_a_game_oneself_to_its_score():
    low, high, heard = 1, 100, [Spoken("prompt", "")]

    def guess() -> str:
        nonlocal low, high
        middle = (low + high) // 2
        if heard[-1].text == "Higher.":
            low = int(heard[-2].text) + 1
        elif heard[-1].text == "Lower.":
            high = int(heard[-2].text) - 1
        middle = (low + high) // 2
        return str(middle)

    asked = Problem("p", "Guess.", "", environment="guess")
    played = play_yourself(plan(environment="guess"), asked, PromptFormat("raw", chat=False), heard.append, guess)
    assert played.judgement is not None
    assert (played.judgement.verdict, played.judgement.value) == (Verdict.CORRECT, 1.0)
    assert (played.judged_by, played.stop_reason) == ("environment", StopReason.EOS)
    assert "I think of a whole number" in played.spoken[0].text


def test_ones_own_environment_is_tried_without_a_model(game: str):
    words = ["play", "no/such-model", "--you", "--environment", game, "--data", "one.jsonl", "--template", "raw"]
    told = dapo(*words, "--max-turns", "2", stdin="yes\nno\n")
    assert told.returncode == 0, told.stderr
    assert "[bold]yes[/bold] ⟨U+001B⟩[31m:smile:" in told.stdout
    assert "environment · tool call · failed\n" in told.stdout
    assert "WRONG by verifier math; reward -1" in told.stdout
    assert "truncated" in told.stdout
    assert "turns 2; tool calls 2; failures 1" in told.stdout
    assert re.search(r"Say it\.\n\s*\n\s*Seed \d+\.", told.stdout)
    given_up = dapo(*words, stdin="yes\n")
    assert given_up.returncode == 0
    assert "Given up" in given_up.stdout
    dead = json.loads(dapo(*words, "--json", stdin="die\n").stdout)
    assert (dead["verdict"], dead["judged_by"], dead["turns"]) == ("CRASH", "environment", 1)
    assert "not today" in dead["message"]
    assert [spoken["who"] for spoken in dead["spoken"]] == ["prompt", "you"]


def test_what_was_said_is_no_markup(capsys: pytest.CaptureFixture[str]):
    show(Pipe(highlight=False, soft_wrap=True), Spoken("model", "[/b] :smile:\x1b[2J\nnext"))
    assert capsys.readouterr().out == "model\n  [/b] :smile:⟨U+001B⟩[2J\n  next\n"


def test_the_end_names_who_judged_and_what_was_read():
    judgement = Judgement(Verdict.WRONG, -1.0, extracted="7", message="why")
    told = ending(Played((Spoken("model", "7"),), StopReason.EOS, judgement, "verifier math", 3), ASKED)
    assert told.startswith("WRONG by verifier math; reward -1; answer 7; reference -6; why; turns 1")
    assert told.endswith("tokens 3")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["one", "two"], "one"),
        (["one\\", "two", "three"], "one\ntwo"),
        (["```python", "x = 1", "```", "more"], "```python\nx = 1\n```"),
        ([""], ""),
        ([], None),
        (["```python", "x"], "```python\nx"),
    ],
)
def test_a_line_is_a_turn_unless_it_goes_on(typed: list[str], said: str | None):
    lines = iter(typed)

    def read() -> str:
        for line in lines:
            return line
        raise EOFError

    assert typed_turn(Pipe(), read) == said


def test_a_strangers_run_plays_with_what_was_typed_only(tmp_path: Path, game: str):
    run = tmp_path / "run"
    run.mkdir()
    keys = ["data.train=one.jsonl", "data.environment=theirs:Game"]
    (run / "config.toml").write_text(to_toml(load_recipe("quickstart", keys).config))
    refused = dapo("play", str(run), "--you")
    assert refused.returncode == 2
    assert "data.environment = theirs:Game" in refused.stderr
    assert "--trust" in refused.stderr
    assert "cannot be imported" in dapo("play", str(run), "--you", "--trust").stderr
    assert dapo("play", str(run), "--you", "--environment", "guess", stdin="1\n").returncode == 0
    sources = "data.train={a = {path='one.jsonl'}, b = {path='theirs:problems', environment='guess', verifier='t:f'}}"
    (run / "config.toml").write_text(to_toml(load_recipe("quickstart", [sources]).config))
    stranger = dapo("play", str(run), "--you", "--environment", game).stderr
    assert "data.train.b.path = theirs:problems" in stranger
    assert "data.train.b.verifier = t:f" in stranger
    own = ["--environment", game, "--data", "one.jsonl", "--verifier", "exact"]
    assert dapo("play", str(run), "--you", *own).returncode == 0


@pytest.mark.usefixtures("game")
@pytest.mark.parametrize(
    ("words", "key"),
    [
        ((), "data.environment"),
        (("--data", "one.jsonl"), "data.environment"),
        (("--data", "one.jsonl", "--environment", "calculator"), "--environment"),
    ],
)
def test_an_environment_is_called_by_what_named_it(words: tuple[str, ...], key: str, monkeypatch: pytest.MonkeyPatch):
    Path("run").mkdir()
    keys = ["data.environment=calculator", "data.train=one.jsonl"]
    Path("run/config.toml").write_text(to_toml(load_recipe("quickstart", keys).config))

    def stop(plan: OfflineEval, *_: object) -> None:
        raise ConfigError(f"named by {plan.environment_key}")

    monkeypatch.setattr("dapo.evaluation.play.play_yourself", stop)
    assert f"named by {key}" in dapo("play", "run", "--you", *words).stderr


def test_a_problem_is_one_of_the_runs_sources(game: str):
    sources = "data.train={a = {path='x.jsonl'}, b = {path='one.jsonl', environment='guess'}}"
    config = load_recipe("quickstart", [sources]).config
    assert source_of(config, "run", None).name == "a"
    assert source_of(config, "run", "b/a").environment == "guess"
    missing = dapo("play", "--you", "--environment", game, "--problem", "nowhere", "--data", "one.jsonl")
    assert missing.returncode == 2
    assert "One that it has: a." in missing.stderr
    without = dapo("play", "no/such-model", "--you")
    assert without.returncode == 2
    assert "--data FILE" in without.stderr
