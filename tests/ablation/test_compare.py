"""Intervals over seeds and problems, paired differences, and when a curve reaches the baseline's best."""

import json
from pathlib import Path

import numpy as np
import pytest
from fake_ladder import job, write_done

from dapo.ablation.arms import ARMS
from dapo.ablation.compare import compare_runs, estimate, mean_curve, reaching
from dapo.ablation.measure import Spent, measure
from dapo.ablation.summary import FEWER_SEEDS, ONE_SEED, summarise
from dapo.ablation.write import markdown
from dapo.report.paired import paired_difference, resampled_means


def test_resampling_draws_seeds_and_problems_both():
    """Var of the mean of a crossed design without interaction is σ_seed²/S + σ_problem²/P, each by its sample's ÷n."""
    S, P = 4, 50
    generator = np.random.default_rng(1)
    of_seed, of_problem = generator.normal(size=(S, 1)), generator.normal(size=(1, P))
    means = resampled_means(of_seed + of_problem, resamples=40_000)
    expected = of_seed.var() / S + of_problem.var() / P
    assert means.var() == pytest.approx(expected, rel=0.03)
    assert means.mean() == pytest.approx((of_seed + of_problem).mean(), abs=0.01)


def test_an_interval_holds_the_mean_and_is_empty_where_nothing_varies():
    scores = np.random.default_rng(0).random((3, 40))
    found = estimate(scores)
    assert found.low < found.value < found.high
    assert found.value == pytest.approx(scores.mean())
    same = estimate(np.full((3, 40), 0.25))
    assert (same.low, same.value, same.high) == pytest.approx((0.25, 0.25, 0.25))


def test_pairing_removes_what_problems_and_seeds_have_in_common():
    generator = np.random.default_rng(0)
    base = generator.random((3, 200))
    change = paired_difference(base + 0.05 + 0.01 * generator.normal(size=base.shape), base)
    assert change.value == pytest.approx(0.05, abs=0.003)
    assert change.high - change.low < 0.01  # unpaired, the spread of `base` alone would make it 0.1
    assert change.p < 0.01
    none = paired_difference(base, base)
    assert (none.value, none.low, none.high, none.p) == (0.0, 0.0, 0.0, 1.0)


def test_seeds_that_disagree_leave_no_significance_however_many_problems():
    difference = np.repeat([[0.1], [-0.1], [0.05]], 1000, axis=1)
    assert paired_difference(difference, np.zeros_like(difference)).p > 0.3


def two_arms(tmp_path: Path):
    """Four steps; naive is best in the middle. The score is right responses of k = 4 over two problems."""
    for seed in (0, 1):
        naive, dapo = job(tmp_path, "naive", seed, "train.steps=4"), job(tmp_path, "dapo", seed, "train.steps=4")
        write_done(naive, {0: [0, 2], 2: [2, 4], 4: [1, 3]}, entropy=0.25)
        write_done(dapo, {0: [0, 2], 2: [3, 4], 4: [4, 4]})
    jobs = {name: [job(tmp_path, name, seed, "train.steps=4") for seed in (0, 1)] for name in ("naive", "dapo")}
    return {name: [measure(own) for own in planned] for name, planned in jobs.items()}


def test_a_run_is_measured_from_its_files(tmp_path: Path):
    naive = two_arms(tmp_path)["naive"][0]
    assert [e.avg for e in naive.evaluations] == [0.25, 0.75, 0.5]
    assert [(e.step, e.spent) for e in naive.evaluations] == [
        (0, Spent(0, 0, 0.0)), (2, Spent(32, 2000, 4.0)), (4, Spent(64, 4000, 8.0))
    ]  # fmt: skip
    assert (naive.best.avg, naive.end.avg, naive.late.mean()) == (0.75, 0.5, 0.5)
    assert (naive.entropy, naive.waste, naive.clip) == (0.25, 0.25, pytest.approx(0.012))
    assert naive.mixed_groups == pytest.approx(np.mean([0.75, 0.5, 0.25, 0.0]))  # as many as came


def test_value_pretraining_is_paid_for_before_the_first_step(tmp_path: Path):
    planned = job(tmp_path, "vapo", 0, "train.steps=4")
    write_done(planned, {0: [0, 2], 4: [2, 3]})
    stage = [{"step": step, "tokens/generated": 500, "timing.step_s": 3.0} for step in (1, 2)]
    (planned.folder / "value.jsonl").write_text("".join(json.dumps(line) + "\n" for line in stage))
    measured = measure(planned)
    assert [e.spent for e in measured.evaluations] == [Spent(0, 1000, 6.0), Spent(64, 5000, 14.0)]
    assert measured.waste == pytest.approx(1 - 3000 / 5000)


def test_the_end_is_the_last_ten_steps_and_wrong_responses_have_a_length_of_their_own(tmp_path: Path):
    planned = job(tmp_path, "naive", 0, "train.steps=20")
    write_done(planned, {0: [0, 2], 20: [2, 3]})
    file = planned.folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    changed = [
        line | {"length/truncated": float(line["step"] <= 10), "length/mean": line["step"], "clip/low": line["step"]}
        for line in lines
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in changed))
    measured = measure(planned)
    assert (measured.truncated, measured.truncated_end) == (0.5, 0.0)
    assert (measured.length, measured.length_wrong) == (15.5, 22.0)
    assert measured.clip == pytest.approx(10.5 + 0.002)  # of all twenty
    assert (measured.step_seconds, measured.mixed_groups_end) == (2.0 * 20, pytest.approx(1 - 15.5 / 20))


def test_late_is_the_mean_over_the_last_quarter(tmp_path: Path):
    planned = job(tmp_path, "naive", 0, "train.steps=40")
    write_done(planned, {0: [0, 0], 30: [4, 4], 35: [0, 2], 40: [2, 4]})
    measured = measure(planned)
    assert measured.late.tolist() == [0.25, 0.75]  # steps 35 and 40; 30 is at three quarters, not after
    assert measured.end.scores.tolist() == [0.5, 1.0]


def test_all_trained_groups_are_mixed_under_dynamic_sampling(tmp_path: Path):
    assert two_arms(tmp_path)["dapo"][0].mixed_groups == 1.0


def test_with_a_critic_no_group_needs_to_be_mixed(tmp_path: Path):
    planned = job(tmp_path, "vapo-no-groups", 0, "train.steps=4")
    write_done(planned, {0: [0, 2], 4: [2, 3]})
    assert measure(planned).mixed_groups is None


def test_the_baselines_best_is_reached_at_the_first_point_at_or_above_it(tmp_path: Path):
    runs = two_arms(tmp_path)
    curve = mean_curve([run.evaluations for run in runs["dapo"]])
    assert [(p.step, p.avg) for p in curve] == [(0, 0.25), (2, 0.875), (4, 1.0)]
    assert [(p.updates, p.tokens, p.minutes) for p in curve] == [(0, 0, 0), (32, 2000, 4 / 60), (64, 4000, 8 / 60)]
    assert reaching(curve, 0.75).step == 2
    assert reaching(curve, 1.01) is None


def test_seeds_that_end_at_different_steps_share_the_last_point(tmp_path: Path):
    """By a budget of tokens: it stands at the mean of where they ended."""
    for seed, end in ((0, 4), (1, 8)):
        planned = job(tmp_path, "naive", seed, f"train.steps={end}")
        write_done(planned, {0: [0, 2], 2: [2, 4], end: [4, 2 * seed]})
    jobs = [job(tmp_path, "naive", seed, f"train.steps={4 + 4 * seed}") for seed in (0, 1)]
    curve = mean_curve([measure(planned).evaluations for planned in jobs])
    assert [(p.step, p.updates, p.tokens, p.avg) for p in curve] == [
        (0, 0, 0, 0.25),
        (2, 32, 2000, 0.75),
        (6, 96, 6000, (4 / 8 + 6 / 8) / 2),
    ]


def test_pairs_are_of_the_same_seed(tmp_path: Path):
    runs = two_arms(tmp_path)
    change = compare_runs(runs["dapo"][:1], runs["naive"])
    assert (change.seeds, change.value) == (1, 0.5)
    assert compare_runs(runs["dapo"][:1], runs["naive"][1:]) is None


def test_the_shorter_of_two_runs_decides_whether_there_is_enough_evidence(tmp_path: Path):
    """An arm may have spent its budget of tokens in fewer steps."""
    short, long = job(tmp_path, "naive", 0, "train.steps=40"), job(tmp_path, "dapo", 0, "train.steps=40")
    problems = 12
    write_done(short, {0: [0] * problems, 4: [1] * problems})
    write_done(long, {0: [0] * problems, 40: [3] * problems})
    for one, other in ((short, long), (long, short)):
        change = compare_runs([measure(one)], [measure(other)])
        assert (change.insufficient_evidence, change.shown_p) == ("4 steps, at least 6 needed", None)


def test_the_summary_says_what_was_measured(tmp_path: Path):
    runs = two_arms(tmp_path)
    arms = [ARMS[name] for name in ("naive", "token-loss", "dapo")]
    summary = summarise(arms, runs, settings={"seeds": [0, 1]}, machine={}, failed={"token-loss seed 0": "torn"})
    naive, dapo = summary["arms"]
    assert summary["baseline"]["avg"] == 0.75
    assert (naive["reaches_baseline_best"]["updates"], dapo["reaches_baseline_best"]["tokens"]) == (32, 2000)
    assert (naive["late"]["value"], dapo["late"]["value"], dapo["over_baseline"]["value"]) == (0.5, 1.0, 0.5)
    assert (naive["start"], naive["end_by_seed"], naive["late_by_seed"]) == (0.25, [0.5, 0.5], [0.5, 0.5])
    assert (naive["best"]["value"], dapo["start"], dapo["end_by_seed"]) == (0.75, 0.25, [1.0, 1.0])
    assert dapo["difference"] is None  # the rung before it is not there
    assert (summary["missing"], summary["failed"]) == (["token-loss"], {"token-loss seed 0": "torn"})
    assert (dapo["spent"]["step"], dapo["spent"]["updates"], dapo["spent"]["tokens"]) == (4, 64, 4000)
    assert summary["notes"] == []  # two seeds each
    assert dapo["published"] == {"paper": 50.0, "reproduction": 52.0}


def test_arms_with_fewer_seeds_are_named(tmp_path: Path):
    runs = two_arms(tmp_path)
    runs["dapo"] = runs["dapo"][1:]
    arms = [ARMS[name] for name in ("naive", "dapo")]
    settings = {"seeds": [0, 1], "command": "dapo ladder", "recipe": "ladder", "budget": "4 steps"}
    summary = summarise(arms, runs, settings=settings, machine={}, failed={})
    assert summary["notes"] == [f"{FEWER_SEEDS} {ARMS['dapo'].label} (1).", ONE_SEED]
    assert f"- {summary['notes'][0]}" in markdown(summary).splitlines()
