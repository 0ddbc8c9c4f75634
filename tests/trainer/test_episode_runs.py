"""Runs whose problems have an environment: what they record, that they resume exactly, and what is refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from kill_runs import fingerprint
from test_run import StopAfter
from toy import HERE, recipe

from dapo.environments.conversation import Conversation
from dapo.errors import ConfigError, DataError
from dapo.evaluation.offline import OfflineEval, answering
from dapo.files import read_lines
from dapo.models.load import save_policy
from dapo.rollout.engine import NoiseKey
from dapo.rollout.episodes import EpisodeEngine
from dapo.rollout.local.engine import LocalEngine
from dapo.rollout.turn_marks import TurnMarks
from dapo.sampling.accounting import Accounting
from dapo.sampling.dynamic import SampledGroups
from dapo.trainer.episodes import refuse_environments
from dapo.trainer.evaluate import evaluate_run
from dapo.trainer.loop import train
from dapo.trainer.resume import resume_run
from dapo.trainer.run import Run
from dapo.trainer.start import start_run
from dapo.trainer.trust import code_named
from dapo.types import Problem
from tiny_models import tiny_policy, tiny_tokenizer

TALK = ("data.environment=talking:Talker", "limits.max_response_tokens=32", "limits.max_turns=4")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


def trained(run: Run) -> None:
    try:
        train(run)
    finally:
        run.close()


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("preset", [pytest.param("dapo", marks=pytest.mark.slow), "dapo-fast"])
def test_a_run_of_episodes_trains_records_and_resumes_exactly(tmp_path: Path, preset: str):
    keys = (f"preset={preset}", *TALK)
    trained(start_run(recipe(tmp_path, *keys), tmp_path / "straight"))
    lines = metrics_of(tmp_path / "straight")
    assert len(lines) == 3
    assert all(2 < line["episode/turns"] <= 4 for line in lines)
    assert all(0 < line["episode/tool_calls"] < 3 for line in lines)
    assert all("timing.environments_s" in line and "timing.tail_s" not in line for line in lines)
    assert max(line["engine/gap_max"] for line in lines if line["sampling/staleness_max"] == 0) < 1e-9
    table = pq.read_table(tmp_path / "straight" / "rollouts" / "step-000001.parquet").to_pylist()
    for row in table:
        own = np.array(row["own"])
        assert 0 < own.sum() < len(own) == len(row["tokens"]) == len(row["advantage"])
        assert np.isnan(np.array(row["advantage"])[~own]).all()
        assert np.isfinite(np.array(row["advantage"])[own]).all()
        assert 13 <= row["prompt_tokens"][-1] < 33  # what `start` has added
    stopped = start_run(recipe(tmp_path, *keys), tmp_path / "stopped", [StopAfter(3)])
    trained(stopped)
    assert stopped.step == 1
    trained(resume_run(tmp_path / "stopped"))
    assert fingerprint(tmp_path / "stopped") == fingerprint(tmp_path / "straight")


def test_the_verifier_judges_the_last_turn_where_the_environment_gives_no_score(tmp_path: Path):
    run = start_run(recipe(tmp_path, *TALK, "data.environment=talking:Quiet", "train.steps=1"), tmp_path / "run")
    asked: list[str] = []
    submit = run.collector.verifier.submit
    run.collector.verifier.submit = lambda task: asked.append(task.response) or submit(task)  # type: ignore[method-assign]
    trained(run)
    (line,) = metrics_of(tmp_path / "run")
    assert 1 < line["episode/turns"] <= 2
    assert asked
    table = pq.read_table(tmp_path / "run" / "rollouts" / "step-000001.parquet").to_pylist()
    assert any(row["verdict"] == "CORRECT" for row in table)
    assert {row["response_text"] for row in table} - set(asked)  # not everything that was said


def test_parts_of_the_reward_are_those_of_the_environments_score(tmp_path: Path):
    keys = (*TALK, "preset=grpo", "train.steps=1", "rewards.parts={chatty = {weight = 0.25}}")
    trained(start_run(recipe(tmp_path, *keys, "data.environment=talking:Parted"), tmp_path / "run"))
    table = pq.read_table(tmp_path / "run" / "rollouts" / "step-000001.parquet").to_pylist()
    scored = [row for row in table if row["verdict"] in ("CORRECT", "WRONG") and row["reward_part_chatty"] is not None]
    assert len(scored) > 1
    assert {row["reward_part_chatty"] for row in scored} <= {3.0, 4.0}
    assert all(row["reward"] == pytest.approx(row["reward_raw"] + 0.25 * row["reward_part_chatty"]) for row in scored)
    trained(start_run(recipe(tmp_path, *keys, "data.environment=talking:Talker"), tmp_path / "without"))
    table = pq.read_table(tmp_path / "without" / "rollouts" / "step-000001.parquet").to_pylist()
    assert {row["verdict"] for row in table} & {"CRASH", "CORRECT", "WRONG"} == {"CRASH"}
    noted = [json.loads(line) for line in (tmp_path / "without" / "verdicts.jsonl").read_text().splitlines()]
    assert {line["judgement"]["message"] for line in noted} == {"rewards.parts.chatty: the Score has no part 'chatty'"}


def test_an_environment_that_dies_is_counted_and_the_run_goes_on(tmp_path: Path):
    run = start_run(
        recipe(tmp_path, *TALK, "data.environment=talking:Broken", "preset=grpo", "train.steps=2"), tmp_path / "run"
    )
    trained(run)
    lines = metrics_of(tmp_path / "run")
    assert len(lines) == 2
    assert lines[0]["verdict/crash"] > 0
    noted = [json.loads(line)["key"] for line in (tmp_path / "run" / "verdicts.jsonl").read_text().splitlines()]
    assert noted
    assert all("/turn " in key for key in noted)


@pytest.mark.slow
def test_evaluation_sets_have_their_environment_too(tmp_path: Path):
    keys = ("data.eval=['toy:problems']", "eval.every_steps=1", "eval.k=1", "train.steps=1", *TALK)
    run = start_run(recipe(tmp_path, *keys), tmp_path / "run")
    trained(run)
    line = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[0])
    assert 0 < line["avg@k"] < 1


def test_an_evaluations_prompts_begin_as_the_environments_of_its_episodes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both are made from a seed; of two seeds, the prompt would tell of another game than the one that is played.

    And its episodes have as many turns as those of training.
    """
    (tmp_path / "held.jsonl").write_text(
        "".join(json.dumps({"question": f"w1{i} w11", "answer": str(i)}) + "\n" for i in range(3))
    )
    keys = (f"data.eval=['{tmp_path / 'held.jsonl'}']", "eval.every_steps=1", "eval.k=1", "preset=grpo", *TALK)
    keys = (*keys, "limits.max_turns=2")
    run = start_run(recipe(tmp_path, *keys), tmp_path / "run")
    assert isinstance(run.engine, EpisodeEngine)
    pool, begun, played, turns = run.engine.environments, dict[str, int](), dict[str, int](), list[int]()
    opening, ask = pool.opening, pool.ask

    def noted_opening(problem: Problem, seed: int) -> str:
        begun[problem.id] = seed
        return opening(problem, seed)

    def noted_ask(conversation: Conversation) -> int:
        played[conversation.problem.id] = conversation.seed
        turns.append(len(conversation.said))
        return ask(conversation)

    monkeypatch.setattr(pool, "opening", noted_opening)
    monkeypatch.setattr(pool, "ask", noted_ask)
    try:
        evaluate_run(run)
    finally:
        run.close()
    assert begun == played
    assert len({*begun.values()}) == 3
    assert max(turns) == 2


def test_a_step_counts_its_own_drafts_and_waits_and_not_those_of_what_came_before(tmp_path: Path):
    """An evaluation waits for the same environments; value pretraining drafts, and a resumed run does not repeat it."""
    run = start_run(recipe(tmp_path, *TALK, "preset=grpo", "rollout.draft_tokens=3"), tmp_path / "run")
    assert isinstance(run.engine, EpisodeEngine)
    assert isinstance(run.engine.inner, LocalEngine)
    try:
        run.engine.environments.waited_s = 5.0
        run.collector.spent.verdicts = 5.0
        run.engine.inner.drafter.count([[10, 11, 12]], 2)
        assert run.drafts() == {"engine/drafted": 3, "engine/accepted": 2}
        run.engine.inner.drafter.count([[10, 11, 12]], 2)
        run.begin_step()
        timing = run.timing(SampledGroups([], Accounting()))
        assert (timing["timing.environments_s"], timing["timing.verdicts_s"]) == (0, 0)
        assert run.drafts() == {"engine/drafted": 0, "engine/accepted": 0}
        run.engine.environments.on_notice("tired")
        (told,) = read_lines(run.folder / "events.jsonl")
        assert (told["kind"], told["message"]) == ("environment", "tired")
    finally:
        run.close()


def test_an_environment_of_one_source_leaves_the_others_alone(tmp_path: Path):
    sources = "data.train={a = {path='toy:problems', environment='talking:Plain'}, b = {path='toy:problems'}}"
    run = start_run(recipe(tmp_path, sources, "limits.max_turns=4", "train.steps=1", "preset=grpo"), tmp_path / "run")
    trained(run)
    table = pq.read_table(tmp_path / "run" / "rollouts" / "step-000001.parquet").to_pylist()
    prompts = {row["source"]: len(row["prompt_tokens"]) for row in table}
    assert prompts == {"a": 4, "b": 3}
    assert all(all(row["own"]) for row in table if row["source"] == "b")


def test_what_an_environment_adds_is_encoded_in_the_format_of_its_source(tmp_path: Path):
    """One word more than the prompt without it, whatever the source's template says around the question."""
    source = "{path='toy:problems', environment='talking:Plain', template='TEMPLATE'}"
    sources = ", ".join(f"{name}={source.replace('TEMPLATE', name)}" for name in ("raw", "boxed"))
    keys = (f"data.train={{{sources}}}", "limits.max_prompt_tokens=99", "limits.max_turns=4", "preset=grpo")
    run = start_run(recipe(tmp_path, *keys), tmp_path / "run")
    parts = run.problems.sources
    try:
        opened = [
            run.collector.opening(NoiseKey(0, "train", part.problems[0].id, 0, 0), part.prompts[0]) for part in parts
        ]
    finally:
        run.close()
    assert [prompt[:-1] for prompt in opened] == [part.prompts[0] for part in parts]
    assert len(parts[1].prompts[0]) > len(parts[0].prompts[0])


def test_the_environment_of_the_docs_is_short_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (HERE.parents[1] / "docs" / "environments.md").read_text(encoding="utf-8")
    code = page.split("```python run\n")[1].split("```")[0]
    assert len(code.split("\n\n\n")[1].splitlines()) < 30
    (tmp_path / "docs_game.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = ("data.environment=docs_game:Guess", "preset=grpo", "train.steps=1", "limits.max_prompt_tokens=32")
    trained(start_run(recipe(tmp_path, *keys, "limits.max_response_tokens=40"), tmp_path / "run"))
    (line,) = metrics_of(tmp_path / "run")
    assert line["episode/turns"] >= 1


@pytest.mark.slow
def test_runs_of_episodes_killed_at_random_moments_end_with_the_same_bytes(tmp_path: Path):
    program = [sys.executable, str(HERE / "kill_runs.py"), str(tmp_path), "8", *TALK]
    done = subprocess.run(
        program, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == 8, done.stderr[-2000:]
    assert all(run["is_same"] for run in runs), runs
    assert sum(run["code"] == -signal.SIGKILL for run in runs) >= 5


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (("data.environment=no-such",), "data.environment = 'no-such': no such environment"),
        (
            ("data.environment=talking:Talker", "rewards.parts={short = {function = 'toy:short', weight = 1.0}}"),
            "rewards.parts.short = toy:short measures a response of one turn",
        ),
    ],
)
def test_what_cannot_have_an_environment_says_so(tmp_path: Path, keys: tuple[str, ...], why: str):
    with pytest.raises(ConfigError) as refused:
        refuse_environments(recipe(tmp_path, *keys).config)
    assert why in refused.value.message
    assert refused.value.remedy


def test_a_number_of_turns_needs_an_environment(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"limits\.max_turns: has no effect here; it needs data\.environment"):
        recipe(tmp_path, "limits.max_turns=3")


def test_an_environment_of_a_strangers_run_is_code_that_would_be_run():
    named = code_named(
        {"data.environment": "theirs:Game", "data.eval.x.environment": "guess", "data.train.y.environment": "a:B"}
    )
    assert named == {"data.environment": "theirs:Game", "data.train.y.environment": "a:B"}


# ------------------------------------------------------------------ turn marks

MARKS = (
    "{% for m in messages %}<bos>{{ m.role }} {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant {% endif %}"
)
REWRITES = MARKS.replace("{{ m.content }}", "{% if loop.last %}{{ m.content }}{% else %}earlier{% endif %}")
COUNTS = MARKS.replace("{{ m.role }}", "{{ m.role }} {{ messages | length }}")
OTHER_END = MARKS.replace("<eos>", "w3")
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}" + MARKS
)


def tokenizer(template: str) -> Any:
    made = tiny_tokenizer()
    made.chat_template = template
    made.add_tokens(["user", "assistant", "tool", "One", "question.", "answer.", "more", "line."])
    return made


def test_a_later_turn_is_encoded_by_the_templates_own_marks():
    words = tokenizer(MARKS)
    marks = TurnMarks(words, chat=True, eos_ids=(2,))
    said = ["<eos>", "<bos>", "tool", "w7", "w8", "<eos>", "<bos>", "assistant"]
    assert words.convert_ids_to_tokens(marks.encode("w7 w8", "tool", after=5)) == said  # a string ended the turn
    assert words.convert_ids_to_tokens(marks.encode("w7 w8", "tool", after=2)) == said[1:]  # the model drew <eos>
    assert TurnMarks(words, chat=False, eos_ids=(2,)).encode("w7 w8", "tool", after=2) == (7, 8)


def test_a_run_and_an_evaluation_encode_later_turns_by_the_template_as_they_do_prompts(tmp_path: Path):
    policy = tiny_policy("llama", seed=1)
    policy.tokenizer.chat_template = MARKS
    save_policy(policy, tmp_path / "model")
    run = start_run(recipe(tmp_path, "data.chat_template=true", *TALK), tmp_path / "run")
    run.close()
    plan = OfflineEval(
        model=str(tmp_path / "model"), data="toy:problems", use="eval", k=1, temperature=1.0, top_p=1.0,
        max_response_tokens=32, max_prompt_tokens=16, template="raw", chat=True, verifier="toy:contains", seed=0,
        concurrent=4, device="cpu", environment="talking:Talker",
    )  # fmt: skip
    with answering(plan, plan.model, run.problems.by_id) as (engine, _, _):
        for made in (run.engine, engine):
            assert isinstance(made, EpisodeEngine)
            assert made.marks.encode("w7", "user", after=2) == (1, 0, 7, 2, 1, 0)  # roles are no words of this model


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (REWRITES, "cannot be continued turn by turn: it re-renders earlier turns"),
        (COUNTS, "cannot be continued turn by turn"),
        (OTHER_END, "ends a turn by 'w3', which is no end token"),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused_by_name(template: str, why: str):
    with pytest.raises(ConfigError) as refused:
        TurnMarks(tokenizer(template), chat=True, eos_ids=(2,))
    assert "chat template" in refused.value.message
    assert why in refused.value.message


def test_a_role_that_the_template_does_not_know_is_the_episodes_trouble():
    marks = TurnMarks(tokenizer(STRICT), chat=True, eos_ids=(2,))
    assert marks.encode("w7", "user", after=2)
    with pytest.raises(DataError, match="no tools"):
        marks.encode("w7", "tool", after=2)
