"""Whole runs on a tiny model: what they leave behind, that nothing depends on the split, and that resume is exact."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from stop_after import StopAfter
from torch.testing import assert_close
from toy import recipe

from dapo.algorithms.diagnostics import ExplainedSums
from dapo.checkpoints.load import Checkpoint
from dapo.checkpoints.manifest import manifest_of
from dapo.checkpoints.save import in_order, name_of
from dapo.config.load import flatten, load_recipe, parse_override
from dapo.data.order import ProblemOrder
from dapo.distributed.world import ALONE
from dapo.errors import CheckpointError, ConfigError, EngineError, VerifierStopped
from dapo.files import cut_back, read_lines
from dapo.learner.critic import HeldOutFit
from dapo.learner.learner import load_reference, make_learner
from dapo.learner.loss_scale import LossScale
from dapo.learner.step import Step
from dapo.models.critic import Critic
from dapo.models.load import save_policy
from dapo.models.policy import Policy
from dapo.release.export import export_run
from dapo.report.doctor.diagnose import examine
from dapo.report.ledger import LEDGER, VALUE_LEDGER, balance_of_run, read_ledger
from dapo.report.load import load_run
from dapo.rollout.noise import NoiseKey
from dapo.sampling.accounting import Accounting
from dapo.sampling.dynamic import SampledGroups
from dapo.trainer.checkpoint import best_step, save_run
from dapo.trainer.claim import release
from dapo.trainer.evaluate import evaluate_run
from dapo.trainer.loop import train
from dapo.trainer.observer import Observer
from dapo.trainer.resume import read_run_config, refuse_changes, resume_run
from dapo.trainer.run import Run
from dapo.trainer.start import start_run
from dapo.types import Completion, Group, Judgement, StopReason, Verdict
from tiny_models import tiny_policy

HERE = Path(__file__).parent


def run_toy(folder: Path, name: str, *overrides: str, dtype: str = "float64", observers: list[Observer] | None = None):
    run = start_run(recipe(folder, *overrides, dtype=dtype), folder / name, observers or [])
    try:
        train(run)
    finally:
        run.close()
    return run


def weights(run_folder: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run_folder / "checkpoints").glob("step-*"))[-1]
    return load_file(newest / "model" / "model.safetensors")


def metrics(run_folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, or another of its kind, without clock times."""
    lines = [json.loads(line) for line in (run_folder / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("timing.")} for line in lines]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy run to its end, beside the model that it began with. Whoever changes something takes a copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
        return run_toy(tmp_path_factory.mktemp("finished"), "run", "checkpoint.keep=3").folder


@pytest.fixture
def copy_of_finished(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def test_a_run_leaves_behind_what_the_design_says(finished: Path):
    folder = finished
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert next(iter(lines[0])) == "step"
    assert all(line["updates"] == 2 for line in lines)
    assert lines[-1]["updates_total"] == 6
    for line in read_lines(folder / "metrics.jsonl"):
        assert line["timing.tokens_per_s"] == pytest.approx(line["tokens/generated"] / line["timing.step_s"])
        assert 0 < line["timing.tail_s"] + line["timing.verdicts_s"] < line["timing.rollout_s"] < line["timing.step_s"]
    assert [line["lr"] for line in lines] == pytest.approx([0.5e-2, 1e-2, 1e-2])  # k/W with W = 2
    assert all(
        line["sampling/staleness_max"] == 0 for line in lines
    )  # by the weights that sampled, not by the new ones
    assert all(0 <= line["engine/gap_max"] < 1e-9 for line in lines)  # float64: engine and trainer agree
    rows = pq.read_table(folder / "rollouts" / "step-000002.parquet").to_pylist()
    assert len(rows) == 4 * 4
    for row in rows:
        n = len(row["tokens"])
        assert all(len(row[name]) == n for name in ("logp", "logp_old", "entropy", "advantage", "version", "clip"))
        assert row["verdict"] in ("CORRECT", "WRONG")
        assert row["reward"] == pytest.approx(row["reward_raw"] + row["reward_overlong"])
        assert set(row["clip"]) <= {-1, 0, 1}
        if row["stop_reason"] == "LENGTH":
            assert row["verdict"] != "CORRECT"
    by_problem: dict[str, list[str]] = {}
    for row in rows:
        by_problem.setdefault(row["problem_id"], []).append(row["verdict"])
    assert all(len(set(verdicts)) == 2 for verdicts in by_problem.values())  # mixed groups only
    assert (folder / "config.toml").is_file()


@pytest.mark.slow
def test_the_weights_move_and_a_learning_rate_of_zero_moves_nothing(finished: Path, tmp_path: Path):
    moved = weights(finished)
    still = weights(run_toy(tmp_path, "still", "train.lr=0.0").folder)
    base = load_file(finished.parent / "model" / "model.safetensors")
    assert any(not torch.equal(moved[name], base[name]) for name in base)
    assert all(torch.equal(still[name], base[name]) for name in base)


@pytest.mark.slow
@pytest.mark.parametrize("mean", ["token", "sequence", "prompt", "constant"])
def test_micro_batches_change_nothing(tmp_path: Path, mean: str):
    runs = [
        run_toy(
            tmp_path, f"run-{budget}", f"train.tokens_per_microbatch={budget}", f"algorithm.loss_aggregation={mean}"
        )
        for budget in (1, 40, 10_000)
    ]
    whole = weights(runs[-1].folder)
    tokens = pq.read_table(runs[-1].folder / "rollouts" / "step-000003.parquet")["tokens"].to_pylist()
    for run in runs[:-1]:
        assert pq.read_table(run.folder / "rollouts" / "step-000003.parquet")["tokens"].to_pylist() == tokens
        for name, weight in weights(run.folder).items():
            assert_close(weight, whole[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "preset",
    [
        "dapo",
        "dapo-fast",
        pytest.param("vapo", marks=pytest.mark.slow),
        pytest.param("grpo", marks=pytest.mark.slow),
        pytest.param("grpo-naive", marks=pytest.mark.slow),
        pytest.param("dr-grpo", marks=pytest.mark.slow),
        pytest.param("ppo", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("cispo", "gspo", "scalerl", "rloo", "reinforce++")),
    ],
)
def test_every_preset_trains_and_resumes_exactly(tmp_path: Path, preset: str):
    critic = ["algorithm.critic.pretrain_responses=33", "algorithm.critic.pretrain_epochs=1"]
    extra = critic if preset in ("ppo", "vapo") else []
    extra += ["sampling.responses_per_prompt=5"] if preset == "scalerl" else []  # its bound for retiring asks for five
    straight = run_toy(tmp_path, "straight", f"preset={preset}", "train.steps=4", *extra)
    run_toy(tmp_path, "halved", f"preset={preset}", "train.steps=2", *extra)
    resumed = resume_run(tmp_path / "halved", [parse_override("train.steps=4")])
    train(resumed)
    resumed.close()
    assert metrics(resumed.folder) == metrics(straight.folder)
    for name, weight in weights(straight.folder).items():
        assert torch.equal(weight, weights(resumed.folder)[name])
    assert any(line["updates"] > 0 for line in metrics(straight.folder))
    for name in (LEDGER, VALUE_LEDGER):
        written = [(run.folder / name).read_text() for run in (straight, resumed) if (run.folder / name).exists()]
        assert len(set(written)) <= 1
    check_ledger(straight.folder)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["dapo", "dapo-fast"])
def test_a_run_with_drafts_samples_the_same_groups_and_resumes_exactly(tmp_path: Path, preset: str):
    drafting = [f"preset={preset}", "rollout.draft_tokens=3", "rollout.draft_below_rows=64"]
    plain = run_toy(tmp_path, "plain", f"preset={preset}")
    straight = run_toy(tmp_path, "straight", *drafting)
    first = start_run(recipe(tmp_path, *drafting), tmp_path / "stopped", [StopAfter(1)])
    train(first)
    first.close()
    second = resume_run(first.folder, [])
    train(second)
    second.close()
    for name, tensor in weights(straight.folder).items():
        assert torch.equal(tensor, weights(first.folder)[name]), name
    assert metrics(straight.folder) == metrics(first.folder)
    drafted, accepted = (
        sum(line[name] for line in metrics(straight.folder)) for name in ("engine/drafted", "engine/accepted")
    )
    assert 0 < accepted < drafted
    assert "engine/drafted" not in metrics(plain.folder)[0]
    if preset == "dapo":  # groups in the order of submission; dapo-fast takes those that are complete first
        for name, tensor in weights(plain.folder).items():
            assert torch.equal(tensor, weights(straight.folder)[name]), name


def check_ledger(folder: Path) -> None:
    """It balances, and agrees with what the metrics count."""
    run = load_run(folder)
    assert balance_of_run(folder, skips_visits=run.skips_visits, metrics=run.metrics).faults == []
    for (step, entries, order), line in zip(read_ledger(folder / LEDGER), run.metrics, strict=True):
        assert step == line["step"]
        assert order is not None
        fates = Counter(entry.fate for entry in entries)
        assert fates["trained"] == line["sampling/groups_trained"]
        if run.key("sampling", "dynamic"):
            assert fates["all_correct"] == line["sampling/groups_all_correct"]
            assert fates["all_wrong"] == line["sampling/groups_all_wrong"]
        trained = sum(entry.tokens or 0 for entry in entries if entry.fate == "trained")
        assert trained == line["tokens/trained"] + line["tokens/wasted_truncated"]


def test_prompts_that_a_resume_passes_over_are_found_by_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As peers lose them: the cursor comes back a little further on, and nothing else differs."""
    stopped = run_toy(tmp_path, "stopped", observers=[StopAfter(3)])
    restore = ProblemOrder.restore
    monkeypatch.setattr(ProblemOrder, "restore", lambda state, **rest: restore(further(state), **rest))

    def further(state: Mapping[str, Any]) -> dict[str, Any]:
        return {**state, "position": state["position"] + len(state["step"]) + 2, "step": []}

    resumed = resume_run(stopped.folder)
    train(resumed)
    resumed.close()
    faults = balance_of_run(resumed.folder, skips_visits=False).faults
    assert any(re.search(r"step 2: begins after .* prompts of the order.*: 2 never sampled", one) for one in faults)


def test_a_signal_in_the_middle_of_sampling_takes_the_step_back_and_resume_is_exact(finished: Path, tmp_path: Path):
    stopped = run_toy(tmp_path, "stopped", observers=[StopAfter(3)])
    assert stopped.step == 1
    resumed = resume_run(tmp_path / "stopped")
    train(resumed)
    resumed.close()
    assert metrics(resumed.folder) == metrics(finished)
    assert all(torch.equal(w, weights(resumed.folder)[n]) for n, w in weights(finished).items())


@pytest.mark.slow
def test_twenty_runs_killed_at_random_moments_end_with_the_same_bytes(tmp_path: Path):
    program = [sys.executable, str(HERE / "kill_runs.py"), str(tmp_path), "20"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=1800, check=True)
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == 20
    assert sum(run["code"] == -9 for run in runs) >= 15  # a few may reach their end before their moment comes
    assert {run["phase"] for run in runs if run["code"] == -9} == {"sampling", "update", "checkpoint"}
    assert all(run["is_same"] for run in runs), runs


def test_what_is_done_is_not_rolled_back(tmp_path: Path):
    """Neither a step whose evaluation is cut off, nor one of value pretraining."""
    run = start_run(recipe(tmp_path), tmp_path / "run")
    for end in (
        lambda: run.end_step(1, SampledGroups([], Accounting())),
        lambda: run.end_value_step(1, HeldOutFit(0, ExplainedSums())),
    ):
        run.begin_step()
        run.source.start_step()
        run.source.next()
        n_submitted = run.ordered.n_submitted
        end()
        run.roll_back_step()
        assert run.ordered.n_submitted == n_submitted
    run.close()


def test_a_verdict_of_the_clock_is_noted_under_the_weights_of_its_step(tmp_path: Path):
    """The same visit, resampled under other weights, is another response."""
    run = start_run(recipe(tmp_path), tmp_path / "run")
    keys = []
    for updates in (0, 2):
        run.learner.updates = updates
        run.begin_step()
        keys.append(run.collector.journal.key_of_turn(NoiseKey(0, "train", "p", 0, 1), 3))
    run.close()
    assert keys == ["0/p/0/1/turn 3", "2/p/0/1/turn 3"]


def test_a_resume_recalls_verdicts_of_the_clock_under_the_weights_of_its_checkpoint(copy_of_finished: Path):
    """Of what is in flight, before its next step begins."""
    resumed = resume_run(copy_of_finished)
    resumed.close()
    assert resumed.collector.journal.key_of_turn(NoiseKey(0, "train", "p", 0, 1), 3) == "6/p/0/1/turn 3"


def test_what_verifiers_notice_becomes_an_event_and_they_hear_of_a_stop(tmp_path: Path):
    part = "rewards.parts={short={function='toy:short', weight=0.5}}"
    run = start_run(recipe(tmp_path, part), tmp_path / "run")
    assert run.parts is not None
    pools = [*run.pool.each, *run.parts.pools.values()]
    for at, pool in enumerate(pools):
        pool.on_notice(f"notice {at}")
        assert not pool.is_interrupted()
    run.is_stopping = True
    assert all(pool.is_interrupted() for pool in pools)
    run.close()
    told = [event["message"] for event in read_lines(run.folder / "events.jsonl") if event["kind"] == "judge"]
    assert told == ["notice 0", "notice 1"]


def group_of(run: Run, at: int) -> Group:
    """The run's problem at that place with one wrong response, longer from one to the next."""
    tokens, logp = np.full(1 + at, 2, np.int32), np.zeros(1 + at, np.float32)
    completion, judgement = Completion(tokens, logp, tokens, StopReason.EOS, ""), Judgement(Verdict.WRONG, -1.0)
    return Group(run.problems.problems[at], 0, run.problems.prompts[at], (completion,), (judgement,))


def test_groups_that_are_held_and_carried_come_back_each_to_its_place(tmp_path: Path):
    run = start_run(recipe(tmp_path), tmp_path / "run")
    held, carried = [group_of(run, 0), group_of(run, 1)], [group_of(run, 2)]
    run.sampling.held, run.sampling.carried = held, carried
    run.sampling.acceptance.accepted, run.sampling.acceptance.tried = 3.0, 7.0
    state, tensors = run.sampling_state()
    run.sampling.held, run.sampling.carried = [], []
    run.restore_sampling(json.loads(json.dumps(state)), tensors)
    run.close()
    came = [[len(group.completions[0].tokens) for group in kept] for kept in (run.sampling.held, run.sampling.carried)]
    assert came == [[1, 2], [3]]
    assert run.sampling.acceptance.rate == 3 / 7


def test_posteriors_count_groups_that_a_step_does_not_train_on(tmp_path: Path):
    run = start_run(recipe(tmp_path, "preset=dapo-fast"), tmp_path / "run")
    trained, dropped = group_of(run, 0), group_of(run, 1)
    run.end_step(1, SampledGroups([trained], Accounting(), resolved=[trained, dropped]))
    run.close()
    assert run.posteriors.counts == {group.problem.id: (0, 1) for group in (trained, dropped)}


class StopInEvaluation(Observer):
    """Asks the run to stop in the middle of the evaluation after step 2."""

    def on_start(self, run: Any) -> None:
        self.run = run

    def on_evaluation_progress(self, done: int, total: int) -> None:  # noqa: ARG002
        self.run.is_stopping = self.run.is_stopping or self.run.step == 2


@pytest.mark.slow
def test_a_signal_in_the_middle_of_an_evaluation_loses_neither_the_step_nor_the_evaluation(tmp_path: Path):
    keys = ("data.eval=['toy:problems']", "eval.every_steps=1", "eval.k=2")
    straight = run_toy(tmp_path, "straight", *keys)
    stopped = run_toy(tmp_path, "stopped", *keys, observers=[StopInEvaluation()])
    assert stopped.step == 2
    resumed = resume_run(tmp_path / "stopped")
    train(resumed)
    resumed.close()
    assert metrics(resumed.folder) == metrics(straight.folder)
    evaluations = [
        [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
        for folder in (straight.folder, resumed.folder)
    ]
    scores = [[(line["step"], line["avg@k"]) for line in lines] for lines in evaluations]
    assert scores[0] == scores[1]
    assert [step for step, _ in scores[0]] == [0, 1, 2, 3]


def scored(by_step: dict[int, dict[str, dict[str, float]]], monkeypatch: pytest.MonkeyPatch) -> type[Observer]:
    """Scores of evaluation sets by hand; the observer tells which step they are of."""
    rest = {"avg@k_interval": [0.0, 1.0]}

    class Steps(Observer):
        def on_start(self, run: Any) -> None:
            monkeypatch.setattr(
                "dapo.trainer.evaluate.summarise",
                lambda name, *_, k: {"set": name, "k": k} | rest | by_step[run.step][name],
            )

    return Steps


def kept(run: Run) -> list[str]:
    return [path.name for path in in_order(run.folder / "checkpoints")]


BEST = (
    "data.eval={one={path='toy:problems'}, two={path='toy:problems'}}", "eval.every_steps=1", "eval.k=1",
    "checkpoint.every_steps=0", "checkpoint.keep=1", "checkpoint.keep_best=true",
)  # fmt: skip


def test_the_checkpoint_of_the_best_evaluation_is_kept_until_there_is_a_better_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By the first set, whatever the second says; after a resume too."""
    averages = {0: (0.1, 0.9), 1: (0.5, 0.2), 2: (0.5, 0.8), 3: (0.4, 0.7), 4: (0.45, 0.1), 5: (0.6, 0.0)}
    by_step = {step: {"one": {"avg@k": one}, "two": {"avg@k": two}} for step, (one, two) in averages.items()}
    steps = scored(by_step, monkeypatch)
    run = run_toy(tmp_path, "run", *BEST, observers=[steps()])
    assert kept(run) == ["step-000001", "step-000003"]  # 2 is as good as 1, but later
    for end, expected in ((4, ["step-000001", "step-000004"]), (5, ["step-000005"])):
        resumed = resume_run(run.folder, [parse_override(f"train.steps={end}")], [steps()])
        train(resumed)
        resumed.close()
        assert kept(resumed) == expected


@pytest.mark.parametrize(("is_on", "expected"), [("true", [0, 1, 3]), ("false", [0, 3])])
def test_with_that_key_alone_the_best_evaluation_saves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on: str, expected: list[int]
):
    by_step = {step: {"one": {"avg@k": one}, "two": {"avg@k": 0.0}} for step, one in enumerate((0.1, 0.5, 0.5, 0.4))}
    keys = (*BEST, f"checkpoint.keep_best={is_on}", "checkpoint.keep=9")
    run = run_toy(tmp_path, "run", *keys, observers=[scored(by_step, monkeypatch)()])
    assert kept(run) == [name_of(step) for step in expected]


def evaluated(folder: Path, *lines: dict[str, Any], checkpoints: tuple[int, ...]) -> Any:
    """As much of a run after step 4 as decides which checkpoint is the best."""
    rest = {"set": "one", "k": 2, "avg@k": 0.0, "avg@k_interval": [0.0, 1.0]}
    (folder / "eval.jsonl").write_text("".join(json.dumps(rest | line) + "\n" for line in lines))
    for step in checkpoints:
        (folder / "checkpoints" / name_of(step)).mkdir(parents=True)
    return SimpleNamespace(folder=folder, step=4, saved=None, eval_sets=[SimpleNamespace(name="one")])


def test_the_best_evaluation_is_one_whose_checkpoint_can_be_kept(tmp_path: Path):
    """Else a score whose weights are gone would keep out all that are there. That of the step itself can be saved."""
    lines = [{"step": step, "avg@k": score} for step, score in ((1, 0.9), (2, 0.5), (3, 0.6), (4, 0.4))]
    assert best_step(evaluated(tmp_path, *lines, checkpoints=(2,))) == 2
    assert best_step(evaluated(tmp_path, *lines[:1], checkpoints=())) is None
    run = evaluated(tmp_path, *lines, checkpoints=())
    run.saved = name_of(3)  # still being written
    assert best_step(run) == 3
    assert best_step(evaluated(tmp_path, {"step": 2, "avg@k": 0.3}, lines[3], checkpoints=())) == 4


def test_graded_responses_are_compared_by_their_mean_value_and_with_their_like(tmp_path: Path):
    """Where every response of a step failed, there is no mean value, and its avg@k of 0 is more than −0.4."""
    values = [
        {"step": 1, "mean_value": -0.4},
        {"step": 2},
        {"step": 3, "mean_value": -0.1},
        {"step": 4, "mean_value": -0.2},
    ]
    assert best_step(evaluated(tmp_path, *values, checkpoints=(1, 2, 3))) == 3


def test_evaluations_with_another_k_are_not_compared(tmp_path: Path):
    lines = [{"step": 1, "k": 1, "avg@k": 0.9}, {"step": 2, "avg@k": 0.5}, {"step": 4, "avg@k": 0.4}]
    assert best_step(evaluated(tmp_path, *lines, checkpoints=(1, 2))) == 2


def test_evaluations_sampled_otherwise_are_not_compared(tmp_path: Path):
    lines = [{"step": step, "avg@k": score} for step, score in ((1, 0.9), (2, 0.5), (4, 0.4))]
    run = evaluated(tmp_path, *lines, checkpoints=(1, 2))
    made = [
        {"step": step, "set": "one", "ids": ["a"], "k": 2, "sampling": [t, 1.0, 0]} for step, t in ((1, 0.0), (4, 1.0))
    ]
    (tmp_path / "eval_problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    assert best_step(run) == 2


def test_of_several_evaluation_sets_those_without_a_line_are_evaluated_after_a_resume(tmp_path: Path):
    sets = "data.eval={one={path='toy:problems'}, two={path='toy:problems', verifier='toy:never'}}"
    keys = (sets, "eval.every_steps=1", "eval.k=1", "eval.top_p=0.9", "eval.top_k=7", "limits.max_response_tokens=5")
    run = start_run(recipe(tmp_path, *keys), tmp_path / "run")
    run.write_line("eval.jsonl", {"step": 0, "set": "one"})
    run.write_line("eval.jsonl", {"step": 1, "set": "two"})
    lines = evaluate_run(run)
    again = evaluate_run(run)
    run.close()
    assert [(line["step"], line["set"], line["avg@k"]) for line in lines] == [(0, "two", 0)]  # by its own verifier
    assert again == []
    (problems,) = read_lines(run.folder / "eval_problems.jsonl")
    assert problems["sampling"] == [1.0, 0.9, 7]


def test_an_evaluation_that_was_cut_off_is_done_after_a_resume_on_the_draws_of_those_before(tmp_path: Path):
    """At a learning rate of 0 the weights of both evaluations are the same, so the responses are too."""
    keys = ("data.eval=['toy:problems']", "eval.every_steps=1", "eval.k=2", "train.steps=1", "train.lr=0.0")
    run = run_toy(tmp_path, "run", *keys, "preset=grpo-naive", "limits.max_response_tokens=5")
    for name in ("eval.jsonl", "eval_problems.jsonl"):
        cut_back(run.folder / name, 0)
    resumed = resume_run(run.folder)
    train(resumed)
    resumed.close()
    assert [line["step"] for line in read_lines(run.folder / "eval.jsonl")] == [0, 1]
    first, second = read_lines(run.folder / "eval_problems.jsonl")
    assert first["k"] == second["k"] == 2
    assert first["correct"] == second["correct"]
    assert {*first["correct"]} >= {0, 1}


def test_a_step_whose_verdicts_do_not_come_is_taken_back(tmp_path: Path):
    class Gone(StopAfter):
        def on_groups(self, known: int, wanted: int) -> None:
            super().on_groups(known, wanted)
            if self.calls == 0:
                raise VerifierStopped("gone", remedy="")

    run = start_run(recipe(tmp_path), tmp_path / "run", [Gone(3)])
    with pytest.raises(VerifierStopped):
        train(run)
    run.close()
    (line,) = read_lines(run.folder / LEDGER)
    assert (run.step, run.ordered.n_submitted) == (1, line["order"][1])


def test_a_fault_in_an_evaluation_is_an_event(tmp_path: Path):
    keys = ("data.eval=['toy:problems']", "eval.every_steps=1", "eval.k=1", "limits.max_response_tokens=5")
    run = start_run(recipe(tmp_path, *keys), tmp_path / "run")
    with torch.no_grad():
        run.policy.backbone.embed_tokens.weight[12] = float("nan")
    (line,) = evaluate_run(run)
    run.close()
    told = [event["message"] for event in read_lines(run.folder / "events.jsonl") if event["kind"] == "fault"]
    assert len(told) == line["faults"] > 0


@pytest.mark.parametrize("kept", [2, None])
def test_a_resume_drops_every_line_of_the_steps_that_it_will_do_again(copy_of_finished: Path, kept: int | None):
    checkpoints = in_order(copy_of_finished / "checkpoints")
    for folder in checkpoints[-1:] if kept else checkpoints:
        shutil.rmtree(folder)
    names = ("metrics.jsonl", "eval.jsonl", "eval_problems.jsonl", LEDGER)
    for name in names[1:3]:
        (copy_of_finished / name).write_text("".join(f'{{"step": {step}, "set": "held"}}\n' for step in range(4)))
    resume_run(copy_of_finished).close()
    steps = {name: {line["step"] for line in read_lines(copy_of_finished / name)} for name in names}
    assert steps == {name: set(range("eval" not in name, kept + 1)) if kept else set() for name in names}
    recorded = sorted(path.name for path in (copy_of_finished / "rollouts").glob("*.parquet"))
    assert recorded == [f"step-00000{step}.parquet" for step in range(1, (kept or 0) + 1)]


def test_a_torn_or_tampered_checkpoint_is_skipped_by_name(copy_of_finished: Path):
    newest = sorted((copy_of_finished / "checkpoints").glob("step-*"))[-1]
    tensors = newest / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-7])
    resumed = resume_run(copy_of_finished)
    resumed.close()
    assert resumed.step == 2
    events = (copy_of_finished / "events.jsonl").read_text()
    assert "state.safetensors" in events
    assert "step-000003" in events


def test_without_an_intact_checkpoint_a_run_starts_over(copy_of_finished: Path):
    for manifest in copy_of_finished.glob("checkpoints/*/MANIFEST.json"):
        manifest.unlink()
    resumed = resume_run(copy_of_finished)
    resumed.close()
    assert resumed.step == 0
    assert metrics(copy_of_finished) == []


@pytest.mark.slow
def test_without_regular_checkpoints_start_and_end_are_still_written(tmp_path: Path):
    def written(every_steps: int) -> list[str]:
        changes = (f"checkpoint.every_steps={every_steps}", "checkpoint.keep=9")
        folder = run_toy(tmp_path, f"every-{every_steps}", *changes).folder
        return [path.name for path in in_order(folder / "checkpoints")]

    assert written(0) == ["step-000000", "step-000003"]
    assert written(2) == ["step-000000", "step-000002", "step-000003"]


@pytest.mark.slow
def test_a_run_that_keeps_its_model_alone_writes_no_state_and_says_so_on_resume(finished: Path, tmp_path: Path):
    alone = run_toy(tmp_path, "alone", "checkpoint.resumable=false", "checkpoint.every_steps=0", "checkpoint.keep=9")
    (only,) = in_order(alone.folder / "checkpoints")
    assert only.name == "step-000003"
    weights = [
        (folder / "checkpoints/step-000003/model/model.safetensors").read_bytes() for folder in (finished, alone.folder)
    ]
    assert weights[0] == weights[1]
    assert (only / "state.safetensors").stat().st_size < 100
    with pytest.raises(CheckpointError, match="model alone") as refused:
        resume_run(alone.folder)
    assert str(only / "model") in refused.value.remedy
    export_run(alone.folder, tmp_path / "exported", is_bundle=True)
    assert f"{alone.learner.updates} updates" in (tmp_path / "exported" / "README.md").read_text()


def test_a_run_whose_checkpoints_are_gone_keeps_its_record_aside(copy_of_finished: Path):
    record = (copy_of_finished / "metrics.jsonl").read_bytes()
    shutil.rmtree(copy_of_finished / "checkpoints")
    resumed = resume_run(copy_of_finished)
    resumed.close()
    assert resumed.step == 0
    assert (copy_of_finished / "metrics.lost.jsonl").read_bytes() == record
    said = [line["message"] for line in read_lines(copy_of_finished / "events.jsonl")]
    assert any("3 steps it had recorded are in metrics.lost.jsonl" in message for message in said)


def test_what_memory_taught_a_run_outlives_it_until_the_key_is_changed(tmp_path: Path):
    run = run_toy(tmp_path, "run")
    run.learner.tokens_per_microbatch, run.learner.recomputes_all, run.saved = 100, True, ""
    save_run(run)
    resumed = resume_run(run.folder)
    resumed.close()
    assert (resumed.learner.tokens_per_microbatch, resumed.learner.recomputes_all) == (100, True)
    remedy = parse_override("train.gradient_checkpointing=true")  # of a run that ends for want of memory
    changed = resume_run(run.folder, [parse_override("train.tokens_per_microbatch=5000"), remedy])
    changed.close()
    assert (changed.learner.tokens_per_microbatch, changed.learner.recomputes_all) == (None, False)


@pytest.mark.parametrize("preset", ["dapo", "vapo"])
def test_every_line_is_json_and_says_nothing_of_updates_that_were_skipped(tmp_path: Path, preset: str):
    class Broken(Observer):
        def on_start(self, run: Run) -> None:
            for parameter in run.learner.optimizer.parameters.values():
                parameter.register_hook(lambda gradient: gradient * float("nan"))
            if run.learner.critic is not None:
                with torch.no_grad():
                    run.learner.critic.model.value_head.bias.fill_(float("nan"))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    keys = [f"preset={preset}", "train.max_bad_updates=99", "train.steps=2"]
    if preset == "vapo":
        keys.append("algorithm.critic.pretrain_responses=1")
    run = run_toy(tmp_path, "run", *keys, observers=[Broken()])
    for name in ("metrics.jsonl", "value.jsonl") if preset == "vapo" else ("metrics.jsonl",):
        for text in (run.folder / name).read_text().splitlines():
            line = json.loads(text, parse_constant=refuse)
            assert not {"policy/loss", "policy/grad_norm", "critic/loss", "critic/grad_norm"} & line.keys()
    assert all(line["policy/skipped_updates"] > 0 for line in metrics(run.folder))
    found = {finding.name for finding in examine(load_run(run.folder))}
    assert "non-finite-gradients" in found
    assert "dead-gradients" not in found


def test_updates_skipped_in_a_row_are_counted_on_after_a_resume(tmp_path: Path):
    run = run_toy(tmp_path, "run", "preset=ppo", "train.steps=1")
    assert run.learner.critic is not None
    run.learner.bad_updates, run.learner.critic.bad_updates, run.saved = 1, 2, ""
    save_run(run)
    resumed = resume_run(run.folder)
    resumed.close()
    assert resumed.learner.critic is not None
    assert (resumed.learner.bad_updates, resumed.learner.critic.bad_updates) == (1, 2)


@pytest.mark.parametrize("preset", ["dapo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_a_resumed_run_keeps_its_loss_scale_and_repeats_the_straight_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
):
    """As in float16: an overflow in the first update, and a scale that rises after the third good one."""
    monkeypatch.setattr("dapo.learner.learner.scale_for", lambda _dtype: LossScale())
    monkeypatch.setattr("dapo.learner.loss_scale.RISES_AFTER", 3)

    class Overflow(Observer):
        def on_start(self, run: Run) -> None:
            scale = run.learner.optimizer.loss_scale
            assert scale is not None
            parameter = next(iter(run.learner.optimizer.parameters.values()))
            parameter.register_hook(lambda gradient: gradient * (float("inf") if scale.value == 2**16 else 1))

    straight = run_toy(tmp_path, "straight", f"preset={preset}", "train.steps=2", observers=[Overflow()])
    run_toy(tmp_path, "halved", f"preset={preset}", "train.steps=1", observers=[Overflow()])
    resumed = resume_run(tmp_path / "halved", [parse_override("train.steps=2")], [Overflow()])
    train(resumed)
    resumed.close()
    lines = metrics(straight.folder)
    assert metrics(resumed.folder) == lines
    assert [line["update/loss_scale"] for line in lines] == [2**15, 2**16]
    assert [line["update/scale_skips"] for line in lines] == [1, 0]
    for name, weight in weights(straight.folder).items():
        assert torch.equal(weight, weights(resumed.folder)[name])


def test_a_changed_config_is_refused_unless_the_keys_are_safe(copy_of_finished: Path):
    with pytest.raises(ConfigError, match=r"train\.lr = 0\.5 \(was 0\.01\)"):
        resume_run(copy_of_finished, [parse_override("train.lr=0.5")])
    with pytest.raises(ConfigError, match="stepz: no such key"):
        resume_run(copy_of_finished, [parse_override("train.stepz=5")])
    resumed = resume_run(copy_of_finished, [parse_override("train.steps=5"), parse_override("checkpoint.keep=1")])
    resumed.close()
    assert resumed.config.train.steps == 5


# What is written, when the run ends and how fast it is. Every other key of the schema is part of what a run learns.
CHANGEABLE = {
    "train.steps", "train.max_generated_tokens", "train.max_minutes", "train.tokens_per_microbatch",
    "train.gradient_checkpointing", "train.max_bad_updates", "train.max_wait_s", "model.kernels",
    "model.gpu_memory_gib", "rewards.workers", "data.eval",
}  # fmt: skip
CHANGEABLE_SECTIONS = ("checkpoint.", "eval.", "records.", "tracking.", "cluster.")


def test_every_key_that_decides_what_is_learned_is_refused_on_resume(tmp_path: Path):
    config = recipe(tmp_path).config
    now = flatten(config.model_dump(mode="json"))
    others = {**dict.fromkeys(now, "another"), "train.steps": 1}
    with pytest.raises(ConfigError) as refused:
        refuse_changes(config, Checkpoint(tmp_path, 0, {}, {"config": others}))
    named = {key for key in now if re.search(rf"(^|, ){re.escape(key)} = ", refused.value.message)}
    assert now.keys() - named == {key for key in now if key in CHANGEABLE or key.startswith(CHANGEABLE_SECTIONS)}


def test_the_seed_of_a_run_decides_how_its_adapter_starts(tmp_path: Path):
    def first_weights(seed: int, name: str) -> torch.Tensor:
        run = start_run(recipe(tmp_path, "model.lora.rank=2", f"train.seed={seed}"), tmp_path / name)
        run.close()
        return torch.cat([weight.detach().flatten() for weight in run.learner.optimizer.parameters.values()])

    assert torch.equal(first_weights(0, "one"), first_weights(0, "again"))
    assert not torch.equal(first_weights(0, "the same"), first_weights(1, "other"))


def test_a_run_does_not_end_before_what_it_has_trained(copy_of_finished: Path):
    with pytest.raises(ConfigError, match=r"train\.steps = 2: the run has trained 3 steps already"):
        resume_run(copy_of_finished, [parse_override("train.steps=2")])
    assert read_run_config(copy_of_finished, ()).train.steps == 3
    shutil.rmtree(in_order(copy_of_finished / "checkpoints")[-1])
    resumed = resume_run(copy_of_finished, [parse_override("train.steps=2")])
    resumed.close()
    assert (resumed.step, resumed.is_complete) == (2, True)
    with pytest.raises(ConfigError, match=r"nope: no such key\.") as caught:
        resume_run(copy_of_finished, [parse_override("nope=1")])
    assert "config.toml" not in caught.value.message


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_run_whose_learning_rate_falls_towards_its_end_keeps_that_end(tmp_path: Path, decay: str):
    run = run_toy(tmp_path, "run", f"train.lr_decay={decay}")
    for steps in (5, 2):
        with pytest.raises(
            ConfigError, match=rf"train\.steps = {steps} \(was 3\): train\.lr_decay = {decay}"
        ) as caught:
            resume_run(run.folder, [parse_override(f"train.steps={steps}")])
        assert "learning rate" in caught.value.message
        assert "train.max_minutes" in caught.value.remedy
        assert "model.path=" in caught.value.remedy
    same = resume_run(run.folder, [parse_override("train.steps=3"), parse_override("checkpoint.keep=1")])
    same.close()


def test_other_problems_are_refused(copy_of_finished: Path, monkeypatch: pytest.MonkeyPatch):
    import toy

    fewer = list(toy.problems())[:30]
    monkeypatch.setattr(toy, "problems", lambda: iter(fewer))
    with pytest.raises(CheckpointError, match="other problems"):
        resume_run(copy_of_finished)


def test_an_existing_folder_and_a_folder_that_is_no_run_are_refused(tmp_path: Path):
    run_toy(tmp_path, "run", "train.steps=0")
    with pytest.raises(ConfigError, match="exists already"):
        run_toy(tmp_path, "run")
    with pytest.raises(ConfigError, match="is not a run"):
        resume_run(tmp_path / "model")
    with pytest.raises(ConfigError, match="exists already, and is no run") as caught:
        run_toy(tmp_path, "model")
    assert "resume" not in caught.value.remedy


def test_a_set_that_is_never_mixed_ends_by_its_policy(tmp_path: Path):
    run = run_toy(tmp_path, "run", "rewards.verifier=exact", "sampling.max_prompts_tried_per_step=8")
    assert [line["updates"] for line in metrics(run.folder)] == [0, 0, 0]
    assert "easier problems" in (run.folder / "events.jsonl").read_text()
    base = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(w, base[n]) for n, w in weights(run.folder).items())


@pytest.mark.parametrize(("verifier", "said"), [("counts", "calls none correct"), ("contains", None)])
def test_rejection_sampling_without_a_correct_response_says_so(tmp_path: Path, verifier: str, said: str | None):
    keys = ("preset=rft", f"rewards.verifier=toy:{verifier}", "train.steps=1", "sampling.prompts_per_step=32")
    run = run_toy(tmp_path, "run", *keys)
    found = [event["message"] for event in read_lines(run.folder / "events.jsonl") if event["kind"] == "reward"]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    norm = metrics(run.folder)[0]["policy/grad_norm"]
    assert norm == 0 if said else norm > 0


def test_a_student_comes_closer_to_its_teacher_whatever_the_verdicts_say(tmp_path: Path):
    save_policy(tiny_policy(seed=2), tmp_path / "teacher")
    keys = (
        "preset=distillation",
        f"algorithm.kl.path={tmp_path / 'teacher'}",
        "train.steps=8",
        "sampling.prompts_per_step=16",
    )
    run = run_toy(tmp_path, "run", *keys, "rewards.verifier=toy:never", "records.every_steps=0")
    kl = [line["policy/kl_ref"] for line in metrics(run.folder)]
    assert 0 < kl[-1] < 0.8 * kl[0]
    assert [event for event in read_lines(run.folder / "events.jsonl") if event["kind"] == "reward"] == []


def test_a_teacher_must_be_another_model_with_the_same_tokenizer(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.path = none: the teacher would be the model") as refused:
        run_toy(tmp_path, "own", "preset=distillation")
    assert "algorithm.kl.path=FOLDER" in refused.value.remedy
    other = ("preset=distillation", "algorithm.kl.path=bundled")
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.path = bundled: its tokenizer is not that of model\.path"):
        run_toy(tmp_path, "other", *other)


def test_a_teacher_has_commits_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """model.revision is one of model.path's."""
    asked: list[tuple[str, str | None]] = []

    def load(path: str, *, revision: str | None, **_: object) -> Policy:
        asked.append((path, revision))
        return tiny_policy()

    monkeypatch.setattr("dapo.learner.learner.load_policy", load)
    config = load_recipe("quickstart", ["preset=grpo", "model.path=me/base", "model.revision=abc"]).config
    for path in (None, "me/teacher"):
        kl = config.algorithm.kl.model_copy(update={"path": path})
        algorithm = config.algorithm.model_copy(update={"kl": kl})
        load_reference(config.model_copy(update={"algorithm": algorithm}), tiny_policy(), torch.float32, "cpu")
    assert asked == [("me/base", "abc"), ("me/teacher", None)]


def test_the_reference_is_where_the_run_began_also_after_a_resume(monkeypatch: pytest.MonkeyPatch):
    """A resumed run has its policy from a checkpoint: held to that, it would drift further with every resume."""
    asked: list[str] = []

    def load(path: str, **_: object) -> Policy:
        asked.append(path)
        return tiny_policy()

    monkeypatch.setattr("dapo.learner.learner.load_policy", load)
    config = load_recipe("quickstart", ["preset=grpo", "model.path=me/base"]).config
    for policy in ("me/base", "run/checkpoints/step-000002/model"):
        make_learner(config, tiny_policy(), policy, None, torch.float32, "cpu", ALONE)
    assert asked == ["me/base", "me/base"]


def test_a_critic_of_its_own_has_commits_of_its_own(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, str | None]] = []

    def load(path: str, *, revision: str | None, **_: object) -> Critic:
        asked.append((path, revision))
        return Critic(tiny_policy().backbone)

    monkeypatch.setattr("dapo.learner.learner.load_critic", load)
    config = load_recipe("quickstart", ["preset=ppo", "model.path=me/base", "model.revision=abc"]).config
    for own, saved in ((None, None), ("me/critic", None), ("me/critic", "run/critic")):
        critic = config.algorithm.critic.model_copy(update={"path": own})
        algorithm = config.algorithm.model_copy(update={"critic": critic})
        changed = config.model_copy(update={"algorithm": algorithm})
        make_learner(changed, tiny_policy(), "me/base", saved, torch.float32, "cpu", ALONE)
    assert asked == [("me/base", "abc"), ("me/critic", None), ("run/critic", None)]


def test_a_teacher_may_have_a_larger_head_and_not_a_smaller_one(tmp_path: Path):
    """Qwen2.5 has one tokenizer, and heads of 151,936 tokens up to 3 B and of 152,064 from 7 B on."""
    for name, size in ("smaller", 38), ("larger", 48):
        save_policy(tiny_policy(vocab_size=size), tmp_path / name)
    keys = ("preset=distillation", "train.steps=1")
    run_toy(tmp_path, "run", *keys, f"algorithm.kl.path={tmp_path / 'larger'}")
    with pytest.raises(ConfigError, match=r"its output head has 38 tokens, that of model\.path = .* has 40"):
        run_toy(tmp_path, "refused", *keys, f"algorithm.kl.path={tmp_path / 'smaller'}")


@pytest.mark.slow
def test_value_pretraining_is_a_stage_of_its_own_whose_critic_can_be_reused(tmp_path: Path):
    run = run_toy(
        tmp_path,
        "run",
        "preset=vapo",
        "sampling.prompts_per_step=2",
        "sampling.responses_per_prompt=2",
        "algorithm.critic.lr=3e-3",
        "train.steps=0",
    )
    lines = [json.loads(line) for line in (run.folder / "value.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))  # forty problems, one response to each
    assert "after 10 steps, 40 responses" in (run.folder / "events.jsonl").read_text()
    base = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(w, base[n]) for n, w in weights(run.folder).items())  # the policy stands still
    first, last = (np.mean([line["critic/loss"] for line in part]) for part in (lines[:5], lines[-5:]))
    assert last < first
    critic = run.folder / "checkpoints" / "step-000000" / "model" / "critic"
    again = run_toy(tmp_path, "again", "preset=vapo", f"algorithm.critic.path={critic}", "train.steps=1")
    assert not (again.folder / "value.jsonl").exists()
    assert len(metrics(again.folder)) == 1


def test_a_run_of_an_earlier_version_keeps_its_config(tmp_path: Path):
    run = run_toy(tmp_path, "run", "train.steps=1")
    file = run.folder / "config.toml"
    old = re.sub(r"pretrain_responses = .*\npretrain_epochs = .*", "pretrain_steps = {}", file.read_text())
    file.write_text(old.format(0))
    assert read_run_config(run.folder, ()).algorithm.critic.pretrain_responses == 0
    file.write_text(
        old.format(2).replace('advantage = "group"', 'advantage = "gae"').replace("dynamic = true", "dynamic = false")
    )
    assert read_run_config(run.folder, ()).algorithm.critic.pretrain_responses == 2 * 16


PRETRAINING = (
    "preset=vapo", "algorithm.critic.pretrain_responses=40", "algorithm.critic.lr=3e-3", "checkpoint.keep=9",
    "algorithm.critic.pretrain_epochs=1", "sampling.prompts_per_step=2",
)  # fmt: skip


class StopInPretraining(Observer):
    """Asks for a stop, or breaks down, in value pretraining: at the n-th tick of sampling, or after the n-th step."""

    def __init__(self, *, tick: int = 0, step: int = 0, breaks: bool = False) -> None:
        self.tick, self.step, self.breaks = tick, step, breaks

    def on_start(self, run: Any) -> None:
        self.run = run

    def on_groups(self, known: int, wanted: int) -> None:  # noqa: ARG002
        self.tick -= 1
        if self.tick == 0:
            self.stop()

    def on_value_step(self, line: Any, total: int) -> None:  # noqa: ARG002
        if line["step"] == self.step:
            self.stop()

    def stop(self) -> None:
        if self.breaks:
            raise KeyboardInterrupt
        self.run.is_stopping = True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "every_steps", "left"),
    [
        pytest.param(
            StopInPretraining(step=3), 0, "value-000003", marks=pytest.mark.slow
        ),  # asked while the third step's updates ran
        (StopInPretraining(tick=25), 0, "value-000001"),  # asked in the middle of sampling: that step is taken back
        # killed: the last regular checkpoint counts
        pytest.param(StopInPretraining(step=4, breaks=True), 2, "value-000002", marks=pytest.mark.slow),
    ],
)
def test_value_pretraining_goes_on_where_it_was_stopped(tmp_path: Path, stop, every_steps: int, left: str):
    changes = (*PRETRAINING, f"checkpoint.every_steps={every_steps}", "train.steps=1")
    straight = run_toy(tmp_path, "straight", *changes).folder
    folder = tmp_path / "stopped"
    try:
        run_toy(tmp_path, "stopped", *changes, observers=[stop])
    except KeyboardInterrupt:
        assert stop.breaks
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [left]
    resumed = resume_run(folder)
    assert f"resumed after step of value pretraining {int(left[-6:])}" in (folder / "events.jsonl").read_text()
    train(resumed)
    resumed.close()

    assert metrics(folder, "value.jsonl") == metrics(straight, "value.jsonl")
    assert metrics(folder) == metrics(straight)
    for step in (0, 1):
        for name in ("model.safetensors", "critic/model.safetensors", "critic/value_head.safetensors"):
            file = Path("checkpoints") / f"step-{step:06d}" / "model" / name
            assert (folder / file).read_bytes() == (straight / file).read_bytes()


def test_a_checkpoint_within_value_pretraining_has_the_critics_moments_its_fits_and_what_was_spent(tmp_path: Path):
    shorter = ("algorithm.critic.pretrain_responses=24", "checkpoint.every_steps=2", "train.steps=0")
    run = run_toy(tmp_path, "run", *PRETRAINING, *shorter)
    kept, *later = in_order(run.folder / "checkpoints")
    for folder in later:
        shutil.rmtree(folder)
    lines = metrics(run.folder, "value.jsonl")
    resumed = resume_run(run.folder)
    resumed.close()
    assert (kept.name, resumed.value_steps, len(lines)) == ("value-000002", 2, 3)
    assert resumed.held_out_fits == run.held_out_fits[:2]
    assert run.budget.generated_tokens == sum(line["tokens/generated"] for line in lines)
    assert resumed.budget.generated_tokens == sum(line["tokens/generated"] for line in lines[:2])
    for name in ("value.jsonl", VALUE_LEDGER):
        assert [line["step"] for line in read_lines(run.folder / name)] == [1, 2]
    assert resumed.learner.critic is not None
    head = load_file(kept / "model" / "critic" / "value_head.safetensors")["weight"]
    assert head.abs().max() > 0
    assert torch.equal(resumed.learner.critic.model.value_head.weight.detach(), head)
    saved = load_file(kept / "state.safetensors")
    found = resumed.learner.critic.optimizer.tensors()
    assert found
    assert all(torch.equal(tensor, saved[f"critic_optimizer.{name}"]) for name, tensor in found.items())


def test_a_stop_in_value_pretraining_leaves_a_checkpoint_also_without_regular_ones(tmp_path: Path):
    keys = (*PRETRAINING, "checkpoint.every_steps=0", "train.steps=1")
    run = run_toy(tmp_path, "run", *keys, observers=[StopInPretraining(step=1)])
    assert [path.name for path in in_order(run.folder / "checkpoints")] == ["value-000001"]


def test_a_checkpoint_within_value_pretraining_gives_way_to_later_ones(tmp_path: Path):
    run = run_toy(tmp_path, "run", *PRETRAINING, "checkpoint.keep=2", "checkpoint.every_steps=2", "train.steps=0")
    assert [path.name for path in in_order(run.folder / "checkpoints")] == ["value-000004", "step-000000"]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["dapo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_gradient_checkpointing_changes_memory_not_mathematics(tmp_path: Path, preset: str):
    plain = run_toy(tmp_path, "plain", f"preset={preset}").folder
    checkpointed = run_toy(tmp_path, "checkpointed", f"preset={preset}", "train.gradient_checkpointing=true").folder
    newest = in_order(plain / "checkpoints")[-1].relative_to(plain)
    files = sorted((plain / newest / "model").rglob("*.safetensors"))
    assert len(files) == (3 if preset == "ppo" else 1)  # the policy; the critic and its head
    for file in files:
        again = load_file(checkpointed / file.relative_to(plain))
        for name, weight in load_file(file).items():
            assert_close(again[name], weight, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_verdicts_that_depend_on_the_clock_are_replayed_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A verifier that is slow only while a file exists: it times out in the first life and would not in the second."""
    slow = tmp_path / "slow"
    slow.write_text("")
    monkeypatch.setenv("TOY_SLOW_WHILE", str(slow))
    keys = ("rewards.verifier=toy:slow_while_marked", "rewards.cpu_seconds=0.2")
    run_toy(tmp_path, "run", "train.steps=1", *keys)
    journal = [json.loads(line) for line in (tmp_path / "run" / "verdicts.jsonl").read_text().splitlines()]
    assert {line["judgement"]["verdict"] for line in journal} == {"TIMEOUT"}
    before = metrics(tmp_path / "run")
    slow.unlink()
    for manifest in (tmp_path / "run").glob("checkpoints/*/MANIFEST.json"):  # as if killed before any checkpoint
        manifest.unlink()
    resumed = resume_run(tmp_path / "run")
    train(resumed)
    resumed.close()
    assert metrics(tmp_path / "run") == before


@pytest.mark.slow
def test_logits_that_are_not_finite_are_events_and_the_config_says_whether_the_run_goes_on(tmp_path: Path):
    def poisoned(name: str, *overrides: str) -> Run:
        run = start_run(recipe(tmp_path, "train.steps=1", "sampling.dynamic=false", *overrides), tmp_path / name, [])
        with torch.no_grad():
            run.policy.backbone.embed_tokens.weight[12] = float("nan")
        return run

    run = poisoned("on")
    train(run)
    run.close()
    events = [event for event in read_lines(run.folder / "events.jsonl") if event["kind"] == "fault"]
    [metrics] = read_lines(run.folder / "metrics.jsonl")
    assert len(events) == metrics["engine/faults"] > 0
    assert "logits are not finite" in events[0]["message"]

    run = poisoned("eval", "rollout.on_fault=stop", "eval.every_steps=1", "data.eval=['toy:problems']", "eval.k=4")
    with pytest.raises(EngineError, match=r"rollout.on_fault = stop: .* in the evaluation of .* after step 0"):
        train(run)
    run.close()
    assert not list(read_lines(run.folder / "eval.jsonl"))  # a run that goes on evaluates again

    run = poisoned("stop", "rollout.on_fault=stop")
    with pytest.raises(EngineError, match=r"rollout.on_fault = stop"):
        train(run)
    run.close()

    run = poisoned("value", "rollout.on_fault=stop", "preset=vapo")
    with pytest.raises(EngineError, match=r"rollout.on_fault = stop: .* in step 1 of value pretraining"):
        train(run)
    run.close()
    assert not list(read_lines(run.folder / "value.jsonl"))


def test_the_critic_is_not_pretrained_on_responses_that_the_engine_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stage: Any = importlib.import_module("dapo.trainer.pretrain_value")
    trained: list[StopReason] = []
    fitted: list[int] = []

    def update(step: Step, rows: list[int]) -> None:
        groups = step.batch.groups
        size = len(groups[0].completions)
        trained.extend(groups[row // size].completions[row % size].stop_reason for row in rows)

    monkeypatch.setattr(stage, "update_critic", update)
    monkeypatch.setattr(stage, "fit_activations", lambda step: fitted.append(len(step.batch.lengths)))
    keys = (
        "preset=vapo",
        "algorithm.critic.pretrain_responses=1",
        "train.steps=1",
        "train.gradient_checkpointing=auto",
    )
    run = start_run(recipe(tmp_path, *keys), tmp_path / "run", [])
    with torch.no_grad():
        run.policy.backbone.embed_tokens.weight[12] = float("nan")
    train(run)
    run.close()
    assert "fault" in {event["kind"] for event in read_lines(run.folder / "events.jsonl")}
    assert trained
    assert StopReason.ABORTED not in trained
    assert len(fitted) == 1


# ---------------------------------------------------------------- budgets


@pytest.mark.slow
def test_a_budget_of_tokens_ends_the_run_after_the_step_that_spends_it(tmp_path: Path):
    straight = [line["tokens/generated"] for line in metrics(run_toy(tmp_path, "straight", "train.steps=6").folder)]
    budget = int(sum(straight[:2])) + 1  # two steps do not spend it, the third does
    run = run_toy(tmp_path, "run", "train.steps=6", f"train.max_generated_tokens={budget}")
    assert (run.step, run.is_complete) == (3, True)
    assert [line["tokens/generated"] for line in metrics(run.folder)] == straight[:3]
    events = (run.folder / "events.jsonl").read_text()
    assert f"train.max_generated_tokens = {budget} is spent" in events
    assert load_run(run.folder).state == "finished"

    again = resume_run(run.folder, [("train.max_generated_tokens", int(sum(straight[:3])) + 1)])
    train(again)
    again.close()
    assert [line["tokens/generated"] for line in metrics(run.folder)] == straight[:4]


@pytest.mark.slow
def test_tokens_of_value_pretraining_count(tmp_path: Path):
    changes = (*PRETRAINING, "train.steps=4")
    straight = run_toy(tmp_path, "straight", *changes).folder
    before = sum(line["tokens/generated"] for line in metrics(straight, "value.jsonl"))
    first = metrics(straight)[0]["tokens/generated"]
    assert run_toy(tmp_path, "run", *changes, f"train.max_generated_tokens={int(before + first)}").step == 1
    assert run_toy(tmp_path, "none", *changes, f"train.max_generated_tokens={int(before)}").step == 0
    cut = run_toy(tmp_path, "cut", *changes, "train.max_generated_tokens=1")
    assert (cut.step, len(metrics(cut.folder, "value.jsonl"))) == (0, 1)
    assert "max_generated_tokens = 1 is spent" in (cut.folder / "events.jsonl").read_text()


def test_a_budget_of_minutes_counts_steps_also_those_before_a_resume(tmp_path: Path):
    run = run_toy(tmp_path, "run", "train.steps=1")
    taken = json.loads((run.folder / "metrics.jsonl").read_text())["timing.step_s"]
    again = resume_run(run.folder, [("train.steps", 50), ("train.max_minutes", taken / 60)])
    assert again.is_complete
    again.close()
    more = resume_run(run.folder, [("train.steps", 5000), ("train.max_minutes", 1.5 * taken / 60)])
    train(more)
    more.close()
    assert 1 < more.step < 5000


def test_a_crafted_state_is_refused_with_one_message(tmp_path: Path):
    """The manifest is right: whoever made the state made it too."""
    keys = ("train.steps=1", "sampling.partial_rollouts=true", "sampling.carry_over=true", "train.updates_per_step=1")
    run = run_toy(tmp_path, "run", *keys, "algorithm.correction.cap=2.0", "sampling.max_staleness_updates=4")
    checkpoint = run.folder / "checkpoints" / "step-000001"
    whole = (checkpoint / "state.json").read_text()
    in_flight = json.loads(whole)["sampling"]["in_flight"]
    assert in_flight["engine"]["requests"]
    assert in_flight["groups"]
    texts = ["", "{", "[]", "null", "[" * 100_000, '{"updates": ' + "9" * 5_000 + "}", "{}"]
    for path, value in {
        "updates": -1,
        "data": 3,
        "config": [],
        "tokens_per_microbatch": 0,
        "held_out_fits": [{"problems": 1}],
        "sampling.order.position": 41,
        "sampling.order.put_off": [40],
        "sampling.acceptance.tried": 0.0,
        "sampling.posteriors": {"toy-1": [1.0]},
        "sampling.in_flight.due": [[0, 10**6, 0]],
        "sampling.in_flight.engine.lengths": [1],
        "sampling.in_flight.engine.requests.0.key.response_index": 7,
        "sampling.in_flight.groups.0.problem": "another",
        "sampling.in_flight.groups.0.prompt": [999_999],
    }.items():
        state = json.loads(whole)
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        holder = state
        for part in parents:
            holder = holder[part]
        assert last in holder
        holder[last] = value
        texts.append(json.dumps(state))
    for text in texts:
        (checkpoint / "state.json").write_text(text)
        (checkpoint / "MANIFEST.json").write_text(manifest_of(checkpoint, 1))
        with pytest.raises(CheckpointError) as refusal:
            resume_run(run.folder).close()
        assert "state.json: is not what a run writes: " in str(refusal.value) or "data cursor: " in str(refusal.value)
        release(run.folder)
    (checkpoint / "state.json").write_text("{}")
    (checkpoint / "MANIFEST.json").write_text(manifest_of(checkpoint, 1))
    with pytest.raises(CheckpointError, match="is not what a run writes: config: field required"):
        export_run(run.folder, tmp_path / "out")
