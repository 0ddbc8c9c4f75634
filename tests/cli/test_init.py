"""`dapo init` as a new user meets it: a known set, a CSV of one's own, a broken file, a terminal that asks."""

import csv
import importlib
import json
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command_line import dapo
from dapo.cli.init.recipe import GOALS, Answers, settings_of
from dapo.config import load_recipe
from dapo.config.model_shapes import shape_of
from dapo.data.names import KNOWN, ROOT_VARIABLE
from dapo.planning.fit import fit
from dapo.quickstart.task import train_problems


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own_csv(path: Path, n: int = 300) -> str:
    """Problems that the bundled model can read, in columns with names of one's own."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["task", "solution"])
        rows.writerows(problems()[:n])
    return str(path)


@cache
def problems() -> list[tuple[str, str]]:
    return [(one.question, one.answer) for one in train_problems()]


COMMAND = importlib.import_module("dapo.cli.init.command")  # the package has a function of this name
COLUMNS = ("--field", "question=task", "--field", "answer=solution")
TOY = ("--model", "bundled", "--card", "cpu")


def test_gsm8k_and_a_card_of_24_gb(here: Path, monkeypatch: pytest.MonkeyPatch):
    (here / "gsm8k").mkdir()
    lines = [json.dumps({"question": f"How much is {i} + 1?", "answer": f"Add.\n#### {i + 1}"}) for i in range(60)]
    for split in ("train", "test"):
        (here / "gsm8k" / f"{split}.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv(ROOT_VARIABLE, str(here))
    done = dapo("init", "--model", "Qwen/Qwen2.5-1.5B-Instruct", "--data", "gsm8k", "--card", "24gb", "--goal", "score")
    assert done.returncode == 0, done.stderr
    assert "usable problems" in done.stdout
    for command in ("explain", "train", "report"):
        assert f"  dapo {command} " in done.stdout
    config = load_recipe("my-recipe.toml").config
    assert (config.data.train, config.data.eval, config.rewards.verifier) == ("gsm8k", ("gsm8k:test",), "math")
    assert config.data.chat_template
    assert (config.train.steps, config.train.lr) == (200, 6e-6)
    assert config.train.moments == "int8"  # what fits the card is in the recipe …
    assert config.rollout.kv_cache_gib
    text = Path("my-recipe.toml").read_text()
    lines = [line for line in text.splitlines() if " = " in line and not line.startswith("#")]
    assert all("  # " in line for line in lines)  # … and every line says why


def test_an_adapter_brings_its_learning_rate(here: Path):
    own_csv(here / "my.csv")
    asked = ("--model", "Qwen/Qwen2.5-7B-Instruct", "--data", "my.csv", *COLUMNS, "--card", "24gb")
    assert dapo("init", *asked).returncode == 0
    config = load_recipe("my-recipe.toml").config
    assert (config.model.lora.rank, config.train.lr) == (32, 1e-5)


@pytest.mark.slow
def test_a_probe_says_how_hard_the_problems_are(here: Path):
    own_csv(here / "my.csv")
    done = dapo("init", *TOY, "--data", "my.csv", *COLUMNS, "--probe", "8")
    assert done.returncode == 0, done.stderr
    assert "Probe of 8 problems: pass rate" in done.stdout
    assert "by a probe" in Path("my-recipe.toml").read_text()


def test_a_csv_of_ones_own_is_split(here: Path):
    own_csv(here / "my.csv")
    done = dapo("init", "toy.toml", *TOY, "--data", "my.csv", *COLUMNS)
    assert done.returncode == 0, done.stderr
    assert "held out for evaluation" in done.stdout
    config = load_recipe("toy.toml").config
    held = [json.loads(line)["question"] for line in Path(config.data.eval[0]).read_text().splitlines()]
    trained = [json.loads(line)["question"] for line in Path(config.data.train).read_text().splitlines()]
    assert held
    assert not set(held) & set(trained)
    assert config.data.fields == {}  # what was prepared has the usual columns


def test_a_set_made_from_one_template_is_split_with_the_option_that_its_refusal_names(here: Path):
    hens = "A farmer has {} red hens and {} white hens in the yard behind the old barn. How many hens are there in all?"
    rows = [f"{hens.format(i // 10, i % 10)},{i // 10 + i % 10}" for i in range(250)]  # long runs of equal words too
    (here / "my.csv").write_text("\n".join(["question,answer", *rows]))
    asked = ("init", *TOY, "--data", "my.csv")
    refused = dapo(*asked)
    assert refused.returncode == 2
    assert "every problem resembles one of the 25 held out" in refused.stderr
    assert "--keep-near-duplicates" in refused.stderr
    assert [path.name for path in here.iterdir()] == ["my.csv"]
    done = dapo(*asked, "--keep-near-duplicates")
    assert done.returncode == 0, done.stderr
    assert "225 problems to train on" in done.stdout


@pytest.mark.parametrize(
    ("text", "said", "remedy"),
    [
        ("task,solution\n1+1=?,2\n", "no known schema has the columns task, solution", "--field question=COLUMN"),
        ('question,answer\n1+1=?,"2\n', "row 1: not CSV", "Quote fields"),
        ("question,answer\n1+1=?,\n", "row 1: unparseable reference (it is empty)", "--field answer=COLUMN"),
        ("", "empty", ""),
    ],
)
def test_a_broken_file_is_refused_with_the_row_and_the_remedy_and_nothing_is_written(
    here: Path, text: str, said: str, remedy: str
):
    (here / "bad.csv").write_text(text)
    done = dapo("init", *TOY, "--data", "bad.csv")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert said in done.stderr
    assert remedy in done.stderr
    assert [path.name for path in here.iterdir()] == ["bad.csv"]


def test_what_does_not_fit_is_refused_before_anything_is_written(here: Path):
    own_csv(here / "my.csv")
    done = dapo("init", "--model", "Qwen/Qwen2.5-32B", "--data", "my.csv", *COLUMNS, "--card", "24gb")
    assert done.returncode == 2
    assert "--card 24gb: Qwen/Qwen2.5-32B does not fit" in done.stderr
    assert "(--card 32gb)" in done.stderr
    assert [path.name for path in here.iterdir()] == ["my.csv"]


@pytest.mark.parametrize(("missing", "given"), [("--model", ("--data", "gsm8k")), ("--data", ("--model", "bundled"))])
def test_without_a_terminal_what_is_missing_is_named(missing: str, given: tuple[str, ...]):
    done = dapo("init", *given)
    assert done.returncode == 2
    assert f"{missing}: missing, and there is no terminal to ask in." in done.stderr


def test_in_a_terminal_it_asks(here: Path, monkeypatch: pytest.MonkeyPatch):
    own_csv(here / "my.csv")
    monkeypatch.setattr(COMMAND, "is_terminal", lambda: True)
    monkeypatch.setattr(COMMAND, "gpu_memory_gib", list)
    done = dapo("init", *COLUMNS, stdin="bundled\nmy.csv\n\nscore\n")  # the card: what it suggests
    assert done.returncode == 0, done.stderr
    config = load_recipe("my-recipe.toml").config
    assert (config.model.path, config.model.device, config.train.steps) == ("bundled", "cpu", 200)


def test_letters_are_judged_as_choices_and_words_exactly(here: Path):
    words = ["blue sky", "red, or green?", "x → y"]
    for name, answers in (("letters", "ABCD"), ("words", words), ("some", ["A", "12", "7"])):
        lines = [{"question": f"Question {i} of {name}?", "answer": answers[i % len(answers)]} for i in range(30)]
        (here / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, verifier in (("letters", "choice"), ("words", "exact"), ("some", "math")):
        done = dapo("init", f"{name}.toml", *TOY, "--data", f"{name}.jsonl")
        assert done.returncode == 0, done.stderr
        assert "too few to hold some out" in done.stdout
        assert tomllib.loads(Path(f"{name}.toml").read_text())["rewards"]["verifier"] == verifier


@pytest.mark.parametrize(
    ("answers", "verifier"),
    [
        (["", "2", "3", "4"], "math"),  # a missing answer is no unreadable one
        (["", "", "A", "B"], "choice"),
        (["", "blue sky", "red, or green?", "x → y"], "exact"),
        (["cats and dogs 7"], "exact"),  # math can read none of them
    ],
)
def test_the_verifier_is_chosen_by_the_answers_that_are_there(here: Path, answers: list[str], verifier: str):
    rows = [f'Question {i}?,"{answers[i % len(answers)]}"' for i in range(100)]
    (here / "my.csv").write_text("\n".join(["question,answer", *rows]))
    done = dapo("init", *TOY, "--data", "my.csv")
    assert done.returncode == 0, done.stderr
    assert load_recipe("my-recipe.toml").config.rewards.verifier == verifier


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("a.json",), "a recipe is a TOML file"),
        (("--goal", "win"), "--goal win: no such goal."),
        (("--keep-near-duplicates", "--eval", "gsm8k"), "no effect with --eval gsm8k"),
        (("--card", "24tb"), "--card 24tb: neither a memory size nor a known GPU"),
    ],
)
def test_wrong_answers_are_refused(here: Path, asked: tuple[str, ...], said: str):
    own_csv(here / "my.csv")
    done = dapo("init", *asked, "--model", "bundled", "--data", "my.csv", *COLUMNS)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_an_existing_recipe_is_never_overwritten(here: Path):
    (here / "my-recipe.toml").write_text("mine")
    done = dapo("init", *TOY, "--data", own_csv(here / "my.csv"), *COLUMNS)
    assert done.returncode == 2
    assert (here / "my-recipe.toml").read_text() == "mine"


def test_a_deleted_recipe_is_written_again_over_the_same_problems(here: Path):
    asked = ("init", "x.toml", *TOY, "--data", own_csv(here / "my.csv"), *COLUMNS)
    assert dapo(*asked).returncode == 0
    files = {path: path.read_bytes() for path in here.iterdir()}
    times = {path: path.stat().st_mtime_ns for path in files if path.suffix != ".toml"}
    (here / "x.toml").unlink()
    (here / "x.train.held-out.jsonl").unlink()
    times.pop(here / "x.train.held-out.jsonl")
    done = dapo(*asked)
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in here.iterdir()} == files
    assert {path: path.stat().st_mtime_ns for path in times} == times


BESIDE = ("x.train.jsonl", "x.train.held-out.jsonl", "x.train.jsonl.manifest.json")


@pytest.mark.parametrize("there", [BESIDE, BESIDE[:1], BESIDE[1:2], BESIDE[2:]])
def test_other_problems_are_kept_and_every_file_in_the_way_is_named(here: Path, there: tuple[str, ...]):
    data = own_csv(here / "my.csv")
    for name in there:
        (here / name).write_text("mine")
    done = dapo("init", "x.toml", *TOY, "--data", data, *COLUMNS)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert ": exists already, and is not what would be written." in done.stderr
    assert all(name in done.stderr.partition("Remove ")[2] for name in there)
    assert {path.name: path.read_text() for path in here.iterdir() if path.name != "my.csv"} == dict.fromkeys(
        there, "mine"
    )


def test_every_goal_gives_a_recipe_that_needs_no_more_than_it_says(here: Path):
    own_csv(here / "my.csv")
    for goal in GOALS:
        done = dapo("init", f"{goal}.toml", "--model", "Qwen/Qwen2.5-0.5B", "--data", "my.csv", *COLUMNS,
                    "--card", "16gb", "--goal", goal)  # fmt: skip
        assert done.returncode == 0, done.stderr
        config = load_recipe(f"{goal}.toml").config
        shape = shape_of(config.model.path)
        assert shape is not None
        assert fit(config, shape, 16).is_possible
        assert not config.data.chat_template  # a base model, by its name


def answers(**more: Any) -> Answers:
    known = {
        "model": "m", "shape": None, "train": "my.csv", "eval": (), "fields": {}, "verifier": "math", "goal": "try",
        "n_problems": 1000, "prompt_tokens": 256, "context": None, "has_chat_template": False,
    }  # fmt: skip
    return Answers(**(known | more))


def values(**more: Any) -> dict[str, Any]:
    return {one.key: one.value for one in settings_of(answers(**more))}


@pytest.mark.parametrize(
    ("context", "expected"), [(None, 512), (4096, 512), (768, 512), (767, 511), (300, 44), (9, 16)]
)
def test_border_a_prompt_and_its_response_are_within_the_context(context: int | None, expected: int):
    assert values(context=context)["limits.max_response_tokens"] == expected


@pytest.mark.parametrize(("n", "prompts", "updates"), [(3, 3, 3), (15, 15, 4), (16, 16, 4), (17, 16, 4)])
def test_border_a_step_has_no_more_problems_than_there_are(n: int, prompts: int, updates: int):
    found = values(n_problems=n)
    assert (found["sampling.prompts_per_step"], found["train.updates_per_step"]) == (prompts, updates)


@pytest.mark.parametrize(
    ("chars", "tokens"), [(30, 256), (468, 256), (469, 512), (1236, 512), (1237, 1024), (9000, 4096)]
)
def test_border_prompts_have_room_for_three_characters_a_token_and_some_words(chars: int, tokens: int):
    report = SimpleNamespace(question_chars=SimpleNamespace(p99=chars))
    assert COMMAND.prompt_limit(report, "m") == tokens
    assert COMMAND.prompt_limit(report, "bundled") == 32


@pytest.mark.parametrize(("n", "held"), [(199, 0), (200, 20), (2000, 200), (9000, 200)])
def test_border_a_tenth_is_held_out_between_20_and_200(n: int, held: int, monkeypatch: pytest.MonkeyPatch):
    def prepare(_data: str, _train: Path, *, n_held: int, **_more: object) -> SimpleNamespace:
        return SimpleNamespace(problems=range(n - n_held), held_out=Path("held.jsonl"))

    monkeypatch.setattr(COMMAND, "prepare", prepare)
    found = COMMAND.with_evaluation(answers(n_problems=n, fields={"question": "task"}), Path("mine.toml"))
    assert n - found.n_problems == held
    assert found.eval == (("held.jsonl",) if held else ())
    assert (found.fields == {}) == bool(held)  # what was prepared has the usual columns


def test_a_known_set_is_evaluated_by_its_own_test_set_or_another_one():
    for name, known in KNOWN.items():
        (found,) = COMMAND.with_evaluation(answers(train=name), Path("mine.toml")).eval
        assert found == ("aime24" if known.eval == known.train else f"{name}:{known.eval}")


@pytest.mark.parametrize(("of_8", "of_16", "G"), [(0.29, 0.5, 16), (0.3, 0.5, 8), (0.29, 0.29, 8)])
def test_border_groups_of_16_where_those_of_8_would_seldom_be_mixed(
    of_8: float, of_16: float, G: int, monkeypatch: pytest.MonkeyPatch, here: Path
):
    figures = {"pass_rate": 0.1, "truncated": 0.0, "mixed": {"8": of_8, "16": of_16}}
    monkeypatch.setattr("dapo.evaluation.probe.difficulties", lambda *_, **__: [])
    monkeypatch.setattr("dapo.evaluation.probe.summary", lambda _: figures)
    result = SimpleNamespace(problems=[], answers=[])
    monkeypatch.setattr("dapo.evaluation.offline.run_offline_eval", lambda _: result)
    data = own_csv(here / "my.csv", 3)
    found = COMMAND.probed(answers(train=data, fields={"question": "task", "answer": "solution"}), 2)
    assert found.responses_per_prompt == G
