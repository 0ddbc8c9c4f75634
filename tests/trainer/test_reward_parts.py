"""Rewards in parts through a run: what is added and what is not, what is recorded, and who decides what is kept."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.testing import assert_close
from toy import recipe

from command_line import dapo
from dapo.config.schema import Config
from dapo.errors import VerifierError
from dapo.learner.batch import make_batch
from dapo.sampling.collect import MOST_FAILURES
from dapo.trainer.evaluate import evaluate_run
from dapo.trainer.loop import train
from dapo.trainer.run import Run
from dapo.trainer.start import start_run
from dapo.trainer.step_metrics import batch_metrics
from dapo.types import Completion, Group, Judgement, Problem, StopReason, Verdict

HERE = Path(__file__).parent
NORMALIZED = "rewards.aggregation=normalize_then_sum"


def parts(**named: float | tuple[str, float]) -> str:
    """--set: a weight alone for what the verifier returns, or a function of the toy's and its weight."""
    entries = [
        f"{name} = {{weight = {given}}}"
        if isinstance(given, float)
        else f"{name} = {{function = 'toy:{given[0]}', weight = {given[1]}}}"
        for name, given in named.items()
    ]
    return f"rewards.parts={{{', '.join(entries)}}}"


def config_of(tmp_path: Path, *overrides: str) -> Config:
    return recipe(tmp_path, "limits.max_response_tokens=12", "algorithm.group.eps=0.0", *overrides).config


def group(p: int, *judged: tuple[bool, float | None, int]) -> Group:
    """Responses given as (is it correct, its format, how many tokens it has)."""
    completions, judgements = [], []
    for is_right, format_, length in judged:
        tokens = np.full(length, 7, np.int32)
        completions.append(
            Completion(tokens, np.zeros(length, np.float32), np.zeros(length, np.int32), StopReason.EOS, "")
        )
        given = {} if format_ is None else {"format": format_}
        verdict = Verdict.CORRECT if is_right else Verdict.WRONG
        judgements.append(Judgement(verdict, 1.0 if is_right else -1.0, parts=given))
    return Group(Problem(str(p), "", ""), 0, (5,), tuple(completions), tuple(judgements))


# One right and one wrong, both well written; and one right and well written, one neither.
GROUPS = [group(0, (True, 1.0, 1), (False, 1.0, 1)), group(1, (True, 1.0, 1), (False, 0.0, 1))]
FORMAT = parts(format=("short", 0.5))


def advantages(groups: list[Group], config: Config) -> list[float]:
    return make_batch(groups, config, torch.float64).advantage.flat.tolist()


def test_two_parts_summed_by_hand(tmp_path: Path):
    # R = ±1 + ½·format: (1.5, −0.5) and (1.5, −1). Two numbers a group: ±(difference/2)/(difference/√2) = ±1/√2.
    config = config_of(tmp_path, FORMAT)
    batch = make_batch(GROUPS, config, torch.float64)
    assert batch.reward.tolist() == [1.5, -0.5, 1.5, -1.0]
    s = 1 / math.sqrt(2)
    assert_close(batch.advantage.flat, torch.tensor([s, -s, s, -s], dtype=torch.float64))
    # Of the second group's difference of 2.5 the format has 0.5: a share of 1/5 there, none in the first.
    assert batch.part_shares == pytest.approx({"correct": 0.9, "format": 0.1})


def test_two_parts_normalized_each_by_hand(tmp_path: Path):
    # correct: ±s in both groups, s = 1/√2; format: 0 and ±s. A = (±s, ±1.5s), Σ A² = 2·½·(1 + 2.25) = 3.25 over four
    # responses, sample std √(3.25/3).
    config = config_of(tmp_path, FORMAT, NORMALIZED)
    s, std = 1 / math.sqrt(2), math.sqrt(3.25 / 3)
    assert advantages(GROUPS, config) == pytest.approx([s / std, -s / std, 1.5 * s / std, -1.5 * s / std])
    # Σ a_k A: correct 2·½·(1 + 1.5) = 2.5, format 2·½·½·1.5 = 0.75
    shares = make_batch(GROUPS, config, torch.float64).part_shares
    assert shares == pytest.approx({"correct": 2.5 / 3.25, "format": 0.75 / 3.25})


def test_shares_are_of_the_advantages_that_are_trained_on(tmp_path: Path):
    # Differences: (2, 0) of correct and weighted format in one group, (2, 0.5) in the other. Without a std they weigh
    # as they are, Σ A² ~ 4 + 6.25: format has 0.5·2.5 of it. A step's std divides both groups alike.
    keys = ("algorithm.group.std=none",), ("algorithm.group.std_over=batch",)
    for shares in (make_batch(GROUPS, config_of(tmp_path, FORMAT, *key), torch.float64).part_shares for key in keys):
        assert shares == pytest.approx({"correct": 9 / 10.25, "format": 1.25 / 10.25})
    # Against the step's mean, 3/8: A = (9, -7, 9, -11)/8, of which format, mean 3/8 too, has (1, 1, 1, -3)/8.
    config = config_of(tmp_path, FORMAT, "algorithm.group.baseline=batch", "algorithm.group.std_over=batch")
    shares = make_batch(GROUPS, config, torch.float64).part_shares
    assert shares == pytest.approx({"correct": 288 / 332, "format": 44 / 332})


def test_the_overlong_penalty_belongs_to_the_correct_part(tmp_path: Path):
    # L_max 12, L_cache 4: a response of 10 tokens has −½, by the weight of the part `correct`, 2.
    keys = (parts(correct=2.0, format=("short", 0.5)), "shaping.overlong_buffer_tokens=4")
    batch = make_batch([group(0, (True, 1.0, 10), (False, 0.0, 1))], config_of(tmp_path, *keys), torch.float64)
    assert batch.reward.tolist() == [2 * (1 - 0.5) + 0.5, -2.0]
    assert batch.part_rewards.flatten(1).tolist() == [[0.5, -1.0], [1.0, 0.0]]


def test_without_parts_a_reward_is_what_it_was_to_the_bit(tmp_path: Path):
    batch = make_batch(GROUPS, config_of(tmp_path), torch.float64)
    assert torch.equal(batch.reward, batch.raw_reward + batch.overlong_penalty)
    assert batch.part_shares == {}


def test_a_part_without_a_weight_is_recorded_and_not_added(tmp_path: Path):
    batch = make_batch(GROUPS, config_of(tmp_path), torch.float64)
    assert batch.parts["format"].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert batch.reward.tolist() == [1.0, -1.0, 1.0, -1.0]
    found = batch_metrics(batch)
    assert found["reward/part/format/mean"] == 0.75
    assert "reward/part/format/share" not in found


def test_a_part_that_failed_counts_as_the_worst_of_its_group_and_is_counted(tmp_path: Path):
    groups = [group(0, (True, None, 1), (False, 0.25, 1)), group(1, (True, None, 1), (False, None, 1))]
    batch = make_batch(groups, config_of(tmp_path, FORMAT), torch.float64)
    assert batch.reward.tolist() == [1.125, -0.875, 1.0, -1.0]
    found = batch_metrics(batch)
    assert found["reward/part/format/unknown"] == 0.75
    assert found["reward/part/format/mean"] == 0.25
    assert found["reward/part/correct/unknown"] == 0.0


def test_parts_are_shuffled_and_negated_with_the_verdicts(tmp_path: Path):
    negated = make_batch(GROUPS, config_of(tmp_path, FORMAT, "rewards.control=negated"), torch.float64)
    assert negated.reward.tolist() == [-1.5, 0.5, -1.5, 1.0]


# ---------------------------------------------------------------- a run


def run_toy(tmp_path: Path, *overrides: str) -> Run:
    run = start_run(recipe(tmp_path, "train.steps=2", *overrides, dtype="float32"), tmp_path / "run")
    try:
        train(run)
    finally:
        run.close()
    return run


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_run_adds_records_and_reports_its_parts(tmp_path: Path):
    run = run_toy(tmp_path, "rewards.verifier=toy:with_parts", parts(short=0.5, same=("short", -0.25)), "train.steps=1")
    table = pq.read_table(run.folder / "rollouts" / "step-000001.parquet")
    rows = {name: np.array(table[name].to_pylist(), dtype=float) for name in table.column_names if "reward" in name}
    assert {name for name in rows if "part" in name} == {
        "reward_part_short",
        "reward_part_same",
        "reward_part_words",
    }
    words = [min(12, text.count("w")) for text in table["response_text"].to_pylist()]
    assert rows["reward_part_same"].tolist() == pytest.approx([1 - n / 12 for n in words])
    is_known = ~np.isnan(rows["reward_part_short"])  # of a truncated response the verifier was not asked
    assert is_known.tolist() == [reason == "EOS" for reason in table["stop_reason"].to_pylist()]
    assert rows["reward_part_short"][is_known].tolist() == rows["reward_part_same"][is_known].tolist()
    added = rows["reward_raw"] + rows["reward_overlong"] + 0.5 * rows["reward_part_short"]
    added -= 0.25 * rows["reward_part_same"]
    assert rows["reward"][is_known].tolist() == pytest.approx(added[is_known].tolist())
    (step,) = lines(run.folder)
    assert step["reward/part/same/mean"] == pytest.approx(rows["reward_part_same"].mean())
    assert step["reward/part/correct/mean"] == pytest.approx(step["reward/raw"])
    assert step["reward/mean"] == pytest.approx(rows["reward"].mean())
    assert sum(step[f"reward/part/{name}/share"] for name in ("correct", "short", "same")) == pytest.approx(1.0)
    assert "reward/part/words/mean" in step  # returned, without a weight
    assert "reward/part/words/share" not in step


def test_an_evaluation_asks_for_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = ("data.eval=['toy:problems']", "eval.every_steps=1", "eval.k=1", "limits.max_response_tokens=5")
    run = start_run(recipe(tmp_path, parts(short=("short", 0.5)), *keys), tmp_path / "run")
    asked: list[object] = []
    monkeypatch.setattr(run.parts, "submit", asked.append)
    (line,) = evaluate_run(run)
    run.close()
    assert (line["problems"], asked) == (40, [])


def test_a_group_whose_verdicts_agree_is_dropped_even_if_another_part_differs(tmp_path: Path):
    keys = (parts(short=("short", 1.0)), "rewards.verifier=toy:never", "sampling.max_prompts_tried_per_step=8")
    run = run_toy(tmp_path, *keys, "train.steps=1", "limits.max_response_tokens=6")
    (step,) = lines(run.folder)
    assert step["sampling/groups_trained"] == 0
    assert step["sampling/groups_all_wrong"] == 8
    dropped = pq.read_table(run.folder / "rollouts" / "dropped" / "step-000001.parquet")
    assert len(set(dropped["reward_part_short"].to_pylist())) > 1


def test_a_part_that_fails_on_everything_stops_the_run_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = "def fails(response, answer, meta):\n    if response == f'Answer: {answer}':\n        return 1.0\n"
    (tmp_path / "failing_parts.py").write_text(module + "    raise RuntimeError('no licence for this part')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = ("sampling.max_prompts_tried_per_step=1000", "limits.max_response_tokens=64")
    part = "rewards.parts={licensed = {function = 'failing_parts:fails', weight = 1.0}}"
    says = f"rewards.parts.licensed: {MOST_FAILURES} verdicts in a row were CRASH.*no licence for this part"
    with pytest.raises(VerifierError, match=says):
        run_toy(tmp_path, part, *keys)


def test_a_part_that_returns_nan_does_not_start_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "nan_parts.py").write_text("def part(response, answer, meta):\n    return float('nan')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    part = "rewards.parts={neat = {function = 'nan_parts:part', weight = 1.0}}"
    answer = dapo("train", "quickstart", "--set", part, "--set", "train.steps=1", "--out", str(tmp_path / "run"))
    assert answer.returncode == 2
    for words in ("rewards.parts.neat.function", "nan_parts:part", "the reward is nan", "returns a number"):
        assert words in " ".join(answer.stderr.split())
    assert "Traceback" not in answer.stderr
    assert not (tmp_path / "run").exists()


def test_explain_says_what_is_added_and_who_decides_what_is_kept():
    for aggregation, how in (("sum_then_normalize", "summed, then normalized"), ("normalize_then_sum", "GDPO")):
        part = "rewards.parts={neat = {function = 'mine:neat', weight = -0.2}}"
        shown = dapo("explain", "quickstart", "--set", part, "--set", f"rewards.aggregation={aggregation}").stdout
        shown = " ".join(shown.split())
        for words in ("correct x 1, neat x -0.2", how, "groups are kept by correct alone"):
            assert words in shown
