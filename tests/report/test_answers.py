"""The answers at the top of the report say what their numbers say."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from fake_runs import evaluation, metrics, write_run

from dapo.report.answers import BAD, GOOD, PLAIN, Answer, collapsed, in_percent, learnt, slow
from dapo.report.doctor.diagnose import examine
from dapo.report.evidence import MIN_CHANGED_PROBLEMS, MIN_STEPS
from dapo.report.learning import by_problems, change_of
from dapo.report.load import RunRecord, load_run
from dapo.report.page_data import headline


@pytest.mark.parametrize(
    ("end", "answer", "tone"), [(0.9, "No", GOOD), (0.25, "Not yet", PLAIN), (0.6, "Not yet", PLAIN)]
)
def test_more_certain_is_good_only_where_it_is_more_often_right(tmp_path: Path, end: float, answer: str, tone: str):
    # Entropy falls to 0.37 of its start: too little for the doctor, enough to say something of accuracy.
    lines = metrics(8, policy__entropy=lambda t: 1.0 - 0.63 * t, accuracy=lambda t: 0.6 + (end - 0.6) * t)
    run = load_run(write_run(tmp_path, lines))
    said = collapsed(run, examine(run))
    assert (said.answer, said.tone) == (answer, tone)
    assert f"(0.60 → {end:.2f})" in said.detail
    assert ("more accurate" in said.detail.replace("not more accurate", "")) == (end > 0.6)


def test_percentages_are_all_printed_so_that_they_add_up():
    fractions = [("a", 0.5), ("b", 0.2), ("c", 0.15), ("d", 0.1), ("e", 0.046), ("none in print", 0.004)]
    assert in_percent(fractions) == "a 50%, b 20%, c 15%, d 10%, e 5%"


# ------------------------------------------------------------------ did it learn? The doctor and the page agree


def evaluated(
    folder: Path,
    before: list[int],
    after: list[int],
    *,
    steps: int = 30,
    averages: tuple[float, float] = (0.5, 0.5),
    **more,
) -> RunRecord:
    """Right or wrong per problem, one response each; eval.jsonl has wide intervals, which overlap."""
    exams = [evaluation(step, avg, half=0.3, k=1) for step, avg in zip((0, steps), averages, strict=True)]
    write_run(folder, metrics(steps), evaluations=exams, **more)
    names = [f"p{i}" for i in range(len(before))]
    lines = [
        {"step": step, "set": "held-out", "k": 1, "ids": names, "questions": names, "correct": right}
        for step, right in ((0, before), (steps, after))
    ]
    (folder / "eval_problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_run(folder)


N = 100


def first(n: int) -> list[int]:
    return [int(i < n) for i in range(N)]


@pytest.mark.parametrize(
    ("after", "answer", "tone"),
    [(first(62), "Improved", GOOD), (first(38), "Worse", BAD), (first(50), "Inconclusive", PLAIN)],
)
def test_learning_is_judged_on_the_same_problems_by_page_and_doctor_alike(
    tmp_path: Path, after: list[int], answer: str, tone: str
):
    """12 of 100 problems more or fewer: the intervals of the averages overlap, that of the difference lies apart."""
    run = evaluated(tmp_path, first(50), after)
    said = learnt(run)
    assert (said.answer, said.tone) == (answer, tone)
    assert headline(run)["verdict"] == answer.lower()
    found = {finding.name for finding in examine(run)}
    assert ("worse-than-before" in found) == (answer == "Worse")


def test_the_headline_says_what_it_is(tmp_path: Path):
    shown = headline(evaluated(tmp_path, first(50), first(62)))
    assert shown["what"] == "avg@1 on held-out problems, before → after step 30"
    assert (shown["from"], shown["to"]) == (0.5, 0.62)
    # 12 of 100 won: a standard deviation of 0.3266, so 0.12 -+ 1.96 * 0.0327
    assert shown["why"] == "on the same problems +0.056 to +0.184 (95 % interval)"


def test_the_interval_of_few_problems_is_by_the_deviation_of_a_sample():
    """10 of 12 won. Divided by 12 instead of 11 the interval would be 4 % too narrow."""
    deviation = math.sqrt((10 * (1 / 6) ** 2 + 2 * (5 / 6) ** 2) / 11)
    half = 1.96 * deviation / math.sqrt(12)
    verdict, _, interval = by_problems(np.zeros(12), np.array([1.0] * 10 + [0.0] * 2), 30)
    assert verdict == "improved"
    assert interval == pytest.approx((10 / 12 - half, 10 / 12 + half))


def test_nothing_is_claimed_after_few_steps_or_of_few_problems(tmp_path: Path):
    few = learnt(evaluated(tmp_path / "steps", first(10), first(90), steps=MIN_STEPS - 1))
    assert (few.answer, few.tone) == ("Inconclusive", PLAIN)
    assert f"{MIN_STEPS - 1} steps, at least {MIN_STEPS} needed" in few.detail
    assert learnt(evaluated(tmp_path / "enough", first(10), first(90), steps=MIN_STEPS)).answer == "Improved"
    changed = MIN_CHANGED_PROBLEMS - 1
    assert learnt(evaluated(tmp_path / "changed", first(10), first(10 + changed))).answer == "Inconclusive"
    assert learnt(evaluated(tmp_path / "one more", first(10), first(11 + changed))).answer == "Improved"


def test_without_single_problems_the_two_intervals_must_part(tmp_path: Path):
    def by(name: str, *averages: float, steps: int = 30) -> Answer:
        exams = [evaluation(step, avg) for step, avg in zip((0, steps), averages, strict=True)]
        return learnt(load_run(write_run(tmp_path / name, metrics(steps), evaluations=exams)))

    assert by("up", 0.5, 0.57).answer == "Improved"
    assert by("down", 0.5, 0.43).answer == "Worse"
    assert by("overlap", 0.5, 0.55).answer == "Inconclusive"
    assert by("short", 0.2, 0.8, steps=MIN_STEPS - 1).answer == "Inconclusive"


def test_steps_are_counted_from_the_first_of_two_evaluations(tmp_path: Path):
    """One after step 28 and one after step 30 are 2 steps apart, of however long a run."""
    run = evaluated(tmp_path, first(10), first(90))
    for line in (run.evaluations[0], run.eval_problems[0]):
        line["step"] = 28
    answer = learnt(run)
    assert answer.answer == "Inconclusive"
    assert f"2 steps, at least {MIN_STEPS} needed" in answer.detail


def test_what_was_sampled_otherwise_is_not_compared(tmp_path: Path):
    """`eval.temperature` may change at a resume: neither the problems nor the intervals then say what training did."""
    run = evaluated(tmp_path, first(10), first(90), averages=(0.1, 0.9))
    assert learnt(run).answer == "Improved"
    run.eval_problems[0]["sampling"], run.eval_problems[1]["sampling"] = [1.0, 0.7, 0], [0.0, 1.0, 0]
    assert change_of(run) is None
    assert (headline(run)["from"], headline(run)["to"]) == (None, 0.9)
    assert learnt(run).answer not in ("Improved", "Worse")


def test_evaluations_before_rewards_were_graded_are_not_compared(tmp_path: Path):
    exams = [evaluation(0, 0.9), evaluation(10, 0.0, mean_value=0.2), evaluation(30, 0.0, mean_value=0.4)]
    change = change_of(load_run(write_run(tmp_path, metrics(30), evaluations=exams)))
    assert change is not None
    assert (change.steps, change.before, change.after) == ((10, 30), 0.2, 0.4)


def test_graded_rewards_are_judged_by_their_values(tmp_path: Path):
    exams = [evaluation(step, 0.0, mean_value=value) for step, value in ((0, 0.2), (30, 0.4))]
    write_run(tmp_path, metrics(30), evaluations=exams)
    run = load_run(tmp_path)
    assert (learnt(run).answer, headline(run)["from"], headline(run)["to"]) == ("Inconclusive", 0.2, 0.4)
    assert headline(run)["what"].startswith("mean reward on held-out problems")
    names = [f"p{i}" for i in range(20)]
    lines = [
        {"step": step, "set": "held-out", "k": 8, "ids": names, "questions": names, "correct": [0] * 20,
         "values": [value + i / 100 for i in range(20)]}
        for step, value in ((0, 0.2), (30, 0.4))
    ]  # fmt: skip
    (tmp_path / "eval_problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert learnt(load_run(tmp_path)).answer == "Improved"


def test_graded_rewards_without_values_are_not_paired_by_what_was_right(tmp_path: Path):
    exams = [evaluation(step, 0.0, mean_value=value) for step, value in ((0, 0.31), (30, 0.74))]
    write_run(tmp_path, metrics(30), evaluations=exams)
    names = [f"p{i}" for i in range(20)]
    same = {"set": "held-out", "k": 8, "ids": names, "questions": names, "correct": [0] * 20}
    text = "".join(json.dumps({"step": step, **same}) + "\n" for step in (0, 30))
    (tmp_path / "eval_problems.jsonl").write_text(text)
    shown = headline(load_run(tmp_path))
    assert (shown["from"], shown["to"], shown["why"]) == (0.31, 0.74, "no scores per problem")


def test_the_headline_is_of_the_first_set(tmp_path: Path):
    exams = [evaluation(0, 0.3), evaluation(0, 0.9, set="other")]
    shown = headline(load_run(write_run(tmp_path, metrics(30), evaluations=exams)))
    assert (shown["to"], shown["from"]) == (0.3, None)


@pytest.mark.parametrize("exams", [[], [evaluation(0, 0.5)]])
def test_a_finished_run_is_never_too_early(tmp_path: Path, exams: list[dict]):
    assert learnt(load_run(write_run(tmp_path / "done", metrics(30), evaluations=exams))).answer == "Not measured"
    running = load_run(write_run(tmp_path / "running", metrics(30), evaluations=exams, wanted=100))
    assert learnt(running).answer == "Too early to tell"
    for path in (tmp_path / "running").iterdir():
        os.utime(path, (0, 0))
    assert learnt(load_run(tmp_path / "running")).answer == "Not measured"  # it stopped


def test_evaluation_that_is_off_is_not_missing(tmp_path: Path):
    folder = write_run(tmp_path, metrics(30), config="[eval]\nevery_steps = 0\n")
    (folder / "eval.jsonl").unlink()
    run = load_run(folder)
    assert run.missing == []
    assert learnt(run).answer == "Not evaluated"
    assert headline(run)["what"] == "Evaluation is switched off."


# ------------------------------------------------------------------ where the time goes


@pytest.mark.parametrize(
    ("seconds", "largest", "titles"),
    [
        (
            100.0,
            "rollout",
            [],
        ),  # 180 s of 400 go into sampling, 100 into evaluation: no more than a quarter
        (150.0, "rollout", ["Much of the time goes to evaluation"]),  # a third, and sampling still has more
        (200.0, "evaluation", ["Much of the time goes to evaluation"]),
        (400.0, "evaluation", ["Most of the time goes to evaluation"]),
    ],
)
def test_page_and_doctor_name_the_same_phase_as_the_largest(
    tmp_path: Path, seconds: float, largest: str, titles: list[str]
):
    exam = evaluation(30, 0.5, **{"timing.evaluation_s": seconds})
    lines = metrics(30, timing__rollout_s=6.0, timing__update_s=2.0)
    run = load_run(write_run(tmp_path, lines, evaluations=[exam]))
    assert slow(run).answer.rsplit(",", 1)[0].lower() == largest
    assert [finding.title for finding in examine(run) if finding.name.startswith("bound-by-")] == titles


def test_time_in_which_little_is_generated_is_told_apart_from_the_rollout(tmp_path: Path):
    """Of steps of 10 s 7 s are sampling; older runs did not measure its parts."""
    parts = {"timing__tail_s": 2.0, "timing__verdicts_s": 1.0, "timing__environments_s": 0.5}
    split = load_run(write_run(tmp_path / "split", metrics(30, timing__rollout_s=7.0, timing__update_s=1.0, **parts)))
    assert dict(slow(split).fractions) == pytest.approx(
        {
            "rollout": 0.35,
            "a step's last responses": 0.2,
            "log-prob passes (π_old, reference, critic)": 0.15,
            "waiting for verdicts": 0.1,
            "updates": 0.1,
            "waiting for environments": 0.05,
            "everything else": 0.05,
        }
    )
    whole = load_run(write_run(tmp_path / "whole", metrics(30, timing__rollout_s=7.0, timing__update_s=1.0)))
    assert dict(slow(whole).fractions)["rollout"] == pytest.approx(0.7)
