"""Runs on several sources: shares, a verifier each, exact resume, and what is said of each source."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from odd_judge import last_number_is_even
from stop_after import StopAfter
from toy import contains, recipe

from dapo.data.encoded import EncodedSet
from dapo.data.prepare.clean import row_of
from dapo.files import read_lines
from dapo.processes import python_command
from dapo.quickstart.task import train_problems
from dapo.rewards import judge
from dapo.sampling.accounting import Accounting
from dapo.sampling.dynamic import SampledGroups
from dapo.sampling.predictive import Posteriors
from dapo.trainer.assemble import make_pools, make_source
from dapo.trainer.loop import train
from dapo.trainer.resume import resume_run
from dapo.trainer.start import start_run
from dapo.trainer.step_metrics import posterior_metrics, source_metrics
from dapo.types import Completion, Group, Judgement, Problem, StopReason, Verdict

HERE = Path(__file__).parent
WEIGHTS = {"math": 3, "exact": 2, "even": 1}
TOY = (
    "data.train={many={path='toy:problems', weight=2}, none={path='toy:problems', verifier='dapo-published'}, "
    "few={path='FEW', verifier='exact', template='raw'}}"
)


def toy_keys(folder: Path, *more: str) -> tuple[str, ...]:
    few = folder / "few.jsonl"
    few.write_text("".join(json.dumps({"question": f"w{i} w9", "answer": f"w{i}"}) + "\n" for i in range(3)))
    return (TOY.replace("FEW", str(few)), *more)


def finish(run: Any) -> Any:
    try:
        train(run)
    finally:
        run.close()
    return run


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = read_lines(folder / "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith("timing.")} for line in lines]


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((folder / "rollouts").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_each_source_is_judged_by_its_own_verifier_and_a_stopped_run_resumes_exactly(tmp_path: Path):
    keys = toy_keys(
        tmp_path, "preset=grpo", "sampling.prompts_per_step=16", "train.steps=2", "sampling.retire_above=0.85"
    )
    straight = finish(start_run(recipe(tmp_path, *keys), tmp_path / "straight"))
    stopped = finish(start_run(recipe(tmp_path, *keys), tmp_path / "stopped", [StopAfter(2)]))
    assert stopped.step == 1
    resumed = finish(resume_run(tmp_path / "stopped"))
    assert metrics(resumed.folder) == metrics(straight.folder)
    rows = rollouts(straight.folder)
    assert {row["problem_id"].partition("/")[0] for row in rows} == {"many", "none", "few"}
    for row in rows:
        assert row["source"] == row["problem_id"].partition("/")[0]
        match row["source"]:
            case "many":
                is_right = contains(row["response_text"], row["answer"], {}).correct
            case "none":
                is_right = False
            case _:
                is_right = row["response_text"].strip() == row["answer"]
        if row["stop_reason"] == "EOS":
            assert (row["verdict"] == "CORRECT") == is_right
    for line in metrics(straight.folder):
        tried = {name: line[f"source/{name}/prompts_tried"] for name in ("many", "none", "few")}
        assert tried["few"] == 3  # the whole of it: its share of a step would be four
        assert sum(tried.values()) == 16
        assert line["source/none/accuracy"] == line["source/none/groups_kept"] == 0
        assert line["source/none/waste"] == 1
        assert line["source/many/share_kept"] == line["source/many/share_submitted"]  # without dynamic sampling
        assert (
            line["source/many/retired"] + line["source/none/retired"] + line["source/few/retired"]
            == (line["sampling/retired"])
        )


def test_each_source_has_its_own_order_and_retires_its_own_problems(tmp_path: Path):
    table = "data.train={a={path='toy:problems'}, b={path='toy:problems', template='boxed'}}"
    config = recipe(tmp_path, table, "preset=grpo", "sampling.retire_above=0.85").config
    sets = tuple(
        EncodedSet(name, "", tuple(Problem(f"{name}/{i}", "", "", name) for i in range(40)), ((1,),) * 40)
        for name in "ab"
    )
    problems = EncodedSet("a+b", "", tuple(one for each in sets for one in each.problems), (), sources=sets)
    solved = {f"{name}/{i}" for name in "ab" for i in range(0, 40, 4)}
    _, source = make_source(config, problems, Posteriors(counts=dict.fromkeys(solved, (20.0, 0.0))))
    source.start_step()
    came = [given[0].id for _ in range(60) if (given := source.next()) is not None]
    assert not solved & {*came}
    orders = [[name.partition("/")[2] for name in came if name.startswith(source)] for source in "ab"]
    assert sorted(orders[0]) == sorted(orders[1])  # the same thirty problems
    assert orders[0] != orders[1]


def test_the_seed_of_a_run_decides_the_order_of_every_source(tmp_path: Path):
    table = "data.train={a={path='toy:problems'}, b={path='toy:problems', template='boxed'}}"
    sets = tuple(
        EncodedSet(name, "", tuple(Problem(f"{name}/{i}", "", "", name) for i in range(40)), ((1,),) * 40)
        for name in "ab"
    )
    problems = EncodedSet("a+b", "", tuple(one for each in sets for one in each.problems), (), sources=sets)

    def drawn(seed: int) -> dict[str, list[str]]:
        config = recipe(tmp_path, table, "preset=grpo", f"train.seed={seed}").config
        _, source = make_source(config, problems, Posteriors())
        source.start_step()
        came = [given[0].id for _ in range(40) if (given := source.next()) is not None]
        return {name: [problem for problem in came if problem.startswith(name)] for name in "ab"}

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert first == again
    assert first["a"] != other["a"]
    assert first["b"] != other["b"]


def test_verdicts_of_every_sources_judge_are_kept_in_the_run_each_rank_its_own(tmp_path: Path):
    sources = "data.train={a={path='toy:problems'}, b={path='toy:problems', verifier='exact'}}"
    pools = make_pools(recipe(tmp_path, sources).config, tmp_path / "verdicts", rank=3)
    assert [pool._cache for pool in pools.each] == [(tmp_path / "verdicts", 3)] * 2


def test_metrics_of_a_source_are_those_of_its_own_problems():
    """Also where the name of another begins as its own does."""
    counts = {"a/1": (20.0, 0.0), "a/2": (0.0, 20.0), "ab/1": (20.0, 0.0), "ab/2": (20.0, 0.0)}
    for name, rate, retired in (("a", 0.5, 1), ("ab", 21 / 22, 2)):
        made = posterior_metrics(Posteriors(counts=counts), name, 0.9)
        assert made == {"source/NAME/pass_rate": pytest.approx(rate), "source/NAME/retired": retired}


def test_a_source_by_hand():
    """Of four prompts tried three are complete: one mixed, one all correct, one all wrong. Another source has one."""

    def group_of(source: str, length: int, n_correct: int) -> Group:
        tokens = np.zeros(length, np.int32)
        response = Completion(tokens, tokens.astype(np.float32), tokens, StopReason.EOS, "")
        verdicts = [Verdict.CORRECT] * n_correct + [Verdict.WRONG] * (2 - n_correct)
        problem = Problem(f"{source}/{length}", "", "", source)
        return Group(problem, 0, (1,), (response,) * 2, tuple(Judgement(verdict, 0.0) for verdict in verdicts))

    mixed, easy, hard, other = group_of("a", 3, 1), group_of("a", 5, 2), group_of("a", 7, 0), group_of("b", 2, 1)
    resolved = [mixed, easy, hard, other]
    submitted = [*(group.problem for group in resolved), mixed.problem]
    sampled = SampledGroups([mixed, other, other], Accounting(), resolved=resolved, submitted=submitted)
    assert source_metrics(sampled, "a") == pytest.approx(
        {
            "source/NAME/prompts_tried": 4, "source/NAME/share_submitted": 4 / 5, "source/NAME/share_kept": 1 / 3,
            "source/NAME/accuracy": 3 / 6, "source/NAME/groups_kept": 1 / 3, "source/NAME/length": (3 + 5 + 7) / 3,
            "source/NAME/waste": (5 + 7) / (3 + 5 + 7),
        }
    )  # fmt: skip


@pytest.mark.slow
def test_carried_groups_and_selection_resume_exactly_and_evaluation_sets_have_their_own_verifier(tmp_path: Path):
    """Partial rollouts in flight, predictive selection and retirement, each within its source; two sets of one file."""
    keys = toy_keys(tmp_path, "preset=dapo-fast", "sampling.max_staleness_updates=4", "sampling.retire_above=0.85")
    sets = "data.eval={own={path='toy:problems'}, none={path='toy:problems', verifier='toy:never'}}"
    keys = (*keys, sets, "eval.every_steps=3", "eval.k=2", "train.steps=4")
    straight = finish(start_run(recipe(tmp_path, *keys), tmp_path / "straight"))
    finish(start_run(recipe(tmp_path, *keys), tmp_path / "stopped", [StopAfter(3)]))
    resumed = finish(resume_run(tmp_path / "stopped"))
    assert metrics(resumed.folder) == metrics(straight.folder)
    assert "source/many/pass_rate" in metrics(straight.folder)[-1]
    scores = {(line["set"], line["step"]): line["avg@k"] for line in read_lines(straight.folder / "eval.jsonl")}
    assert scores.keys() == {(name, step) for name in ("own", "none") for step in (0, 3, 4)}
    assert all((score > 0) == (name == "own") for (name, _), score in scores.items())


def three_sources(folder: Path) -> list[str]:
    """The bundled model on its own task in three parts, each with another verifier; 3 : 2 : 1."""
    problems = train_problems()
    for at, name in enumerate(("math", "exact", "even")):
        rows = (json.dumps(row_of(problem)) + "\n" for problem in problems[at * 150 : (at + 1) * 150])
        (folder / f"{name}.jsonl").write_text("".join(rows))
    table = (
        f"data.train={{math={{path='{folder}/math.jsonl', weight=3}}, "
        f"exact={{path='{folder}/exact.jsonl', weight=2, verifier='exact'}}, "
        f"even={{path='{folder}/even.jsonl', verifier='odd_judge:last_number_is_even'}}}}"
    )
    sizes = ["sampling.prompts_per_step=40", "sampling.responses_per_prompt=4", "train.steps=4", "train.seed=3"]
    often = ["eval.every_steps=0", "checkpoint.every_steps=1", "records.every_steps=1", "rewards.workers=1"]
    return ["quickstart", *(part for key in (table, *sizes, *often) for part in ("--set", key))]


def bytes_of(folder: Path) -> dict[str, object]:
    """What a run comes to: its metrics without clock times, the weights and everything that was recorded."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    files = [newest / "model" / "model.safetensors", newest / "state.json", *(folder / "rollouts").glob("*.parquet")]
    return {"metrics": metrics(folder)} | {path.name: path.read_bytes() for path in files}


@pytest.mark.slow
def test_three_sources_killed_and_resumed_end_with_the_same_bytes(tmp_path: Path):
    arguments = three_sources(tmp_path)
    command = python_command("-m", "dapo", "train", *arguments)
    subprocess.run([*command, "--out", str(tmp_path / "straight")], check=True, capture_output=True, timeout=1800)

    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, "--out", str(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while len(list(read_lines(killed / "metrics.jsonl"))) < 2 and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    subprocess.run(python_command("-m", "dapo", "resume", str(killed)), check=True, capture_output=True, timeout=1800)
    assert bytes_of(killed) == bytes_of(tmp_path / "straight")

    lines = metrics(killed)
    tried = Counter({name: sum(line[f"source/{name}/prompts_tried"] for line in lines) for name in WEIGHTS})
    assert tried.total() >= 300
    for name, weight in WEIGHTS.items():
        assert abs(tried[name] / tried.total() - weight / 6) < 0.02
    rows = [row for row in rollouts(killed) if row["stop_reason"] == "EOS"]
    assert {row["source"] for row in rows} == set(WEIGHTS)
    for row in rows:
        if row["source"] == "even":
            expected = "CORRECT" if last_number_is_even(row["response_text"], "", {}) else "WRONG"
        else:
            expected = judge(row["response_text"], row["answer"], verifier=row["source"]).verdict.value
        assert row["verdict"] == expected
