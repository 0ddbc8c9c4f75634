"""The doctor: for every finding a run that has it and one that has not, derived from the thresholds themselves."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from fake_runs import evaluation, metrics, write_run

from dapo.report.answers import learnt
from dapo.report.doctor.diagnose import examine, verdict
from dapo.report.doctor.findings import NOTE, WARNING, Disk, Finding, Thresholds, Visit
from dapo.report.doctor.sources import idle_sources
from dapo.report.load import load_run

T = Thresholds()
ROOT = Path(__file__).parents[2]
GIB = 2**30


def look(folder: Path, lines: list[dict[str, float]], *, summaries=(), disk=None, **more) -> list[Finding]:
    return examine(load_run(write_run(folder, lines, **more)), summaries, disk=disk)


def names(findings: list[Finding]) -> set[str]:
    return {finding.name for finding in findings}


def falls(start: float, end: float):
    return lambda t: start + (end - start) * t


EPISODES = {
    "episode/turns": 2.5, "episode/tool_calls": 1.5, "episode/tool_failures": 0.1, "timing.environments_s": 0.1,
}  # fmt: skip

# name -> (metrics that have it, metrics just on the other side of its threshold)
BY_METRICS = {
    # Entropy falls below a quarter of its start, accuracy stands still; the other falls as much, but learns.
    "entropy-collapse": (
        metrics(accuracy=0.5, policy__entropy=lambda t: 0.4 if t < 0.5 else 0.4 * T.entropy_collapse_ratio * 0.9),
        metrics(accuracy=falls(0.3, 0.7), policy__entropy=lambda t: 0.4 if t < 0.5 else 0.09),
    ),
    "entropy-explosion": (
        metrics(policy__entropy=lambda t: 0.4 if t < 0.5 else 0.4 * T.entropy_explosion_ratio * 1.1),
        metrics(policy__entropy=lambda t: 0.4 if t < 0.5 else 0.4 * T.entropy_explosion_ratio * 0.9),
    ),
    "one-sided-clipping": (
        metrics(clip__low=2 * T.clip_fraction / T.clip_asymmetry * 0.9, clip__high=2 * T.clip_fraction),
        metrics(clip__low=2 * T.clip_fraction / T.clip_asymmetry * 1.1, clip__high=2 * T.clip_fraction),
    ),
    "length-runaway": (
        metrics(accuracy=0.5, length__mean=lambda t: 300 if t < 0.5 else 300 * T.length_runaway_ratio * 1.1),
        metrics(
            accuracy=falls(0.3, 0.7), length__mean=lambda t: 300 if t < 0.5 else 300 * T.length_runaway_ratio * 1.1
        ),
    ),
    "truncation": (metrics(length__truncated=T.truncated + 0.01), metrics(length__truncated=T.truncated - 0.01)),
    "too-easy": (
        metrics(
            sampling__groups_kept=T.acceptance - 0.01, sampling__groups_all_correct=80, sampling__groups_all_wrong=20
        ),
        metrics(
            sampling__groups_kept=T.acceptance + 0.01, sampling__groups_all_correct=80, sampling__groups_all_wrong=20
        ),
    ),
    "too-hard": (
        metrics(
            sampling__groups_kept=T.acceptance - 0.01, sampling__groups_all_correct=20, sampling__groups_all_wrong=80
        ),
        metrics(
            sampling__groups_kept=T.acceptance - 0.01, sampling__groups_all_correct=80, sampling__groups_all_wrong=20
        ),
    ),
    "few-mixed-groups": (
        metrics(
            sampling__groups_kept=T.acceptance - 0.01, sampling__groups_all_correct=50, sampling__groups_all_wrong=50
        ),
        metrics(
            sampling__groups_kept=T.acceptance - 0.01, sampling__groups_all_correct=20, sampling__groups_all_wrong=80
        ),
    ),
    "all-equal": (
        metrics(
            sampling__groups_kept=T.acceptance - 0.01, sampling__groups_all_equal=90, sampling__groups_all_wrong=10
        ),
        metrics(
            sampling__groups_kept=T.acceptance - 0.01, sampling__groups_all_equal=50, sampling__groups_all_wrong=50
        ),
    ),
    "answer-only": (
        metrics(
            accuracy=falls(0.3, 0.7), length__mean=lambda t: 300 if t < 0.5 else 300 * T.answer_only_length_ratio * 0.9
        ),
        metrics(accuracy=0.5, length__mean=lambda t: 300 if t < 0.5 else 300 * T.answer_only_length_ratio * 0.9),
    ),
    "engine-gap": (
        metrics(engine__gap_mean=T.engine_gap_nats * 1.1),
        metrics(engine__gap_mean=T.engine_gap_nats * 0.9),
    ),
    "dead-gradients": (
        metrics(policy__grad_norm=lambda t: 0.5 if t < 0.8 else 0.0),
        metrics(policy__grad_norm=lambda t: 0.0 if t < 0.8 else 0.5),
    ),
    "non-finite-gradients": (
        metrics(policy__skipped_updates=lambda t: float(t == 1.0)),
        metrics(policy__skipped_updates=0),
    ),
    "verifier-failures": (
        metrics(verdict__timeout=T.verifier_failures * 1.1),
        metrics(verdict__timeout=T.verifier_failures * 0.9),
    ),
    "environment-failures": (
        metrics(**EPISODES, verdict__crash=T.verifier_failures * 1.1),
        metrics(**EPISODES, verdict__crash=T.verifier_failures * 0.9),
    ),
    "slow-environment": (
        metrics(**EPISODES | {"timing.environments_s": 4.0 * T.environment_waiting * 1.1}),
        metrics(**EPISODES | {"timing.environments_s": 4.0 * T.environment_waiting * 0.9}),
    ),
    "failing-calls": (
        metrics(**EPISODES | {"episode/tool_failures": T.tool_failures + 0.01}),
        metrics(**EPISODES | {"episode/tool_failures": T.tool_failures - 0.01}),
    ),
    # Its tools were called at first; a game has none, and is played by turns.
    "unused-environment": (
        metrics(**EPISODES | {"episode/tool_calls": lambda t: 0.5 if t < 0.5 else T.tool_calls * 0.9}),
        metrics(**EPISODES | {"episode/tool_calls": 0.0}),
    ),
    "unparseable": (
        metrics(verdict__unparseable=T.unparseable + 0.01),
        metrics(verdict__unparseable=T.unparseable - 0.01),
    ),
    # 6 of 10 s is more than half; 4 of 10 is not.
    "bound-by-rollout": (metrics(timing__rollout_s=6.0, timing__update_s=2.0), metrics()),
    # A third of the time is enough where nothing is done in it.
    "bound-by-tail": (
        metrics(timing__tail_s=10 * T.waiting_time_fraction * 1.1),
        metrics(timing__tail_s=10 * T.waiting_time_fraction * 0.9),
    ),
    "bound-by-verdicts": (
        metrics(timing__verdicts_s=10 * T.waiting_time_fraction * 1.1),
        metrics(timing__verdicts_s=10 * T.waiting_time_fraction * 0.9),
    ),
    "bound-by-update": (metrics(timing__rollout_s=2.0, timing__update_s=6.0), metrics()),
    "bound-by-old-logp": (metrics(timing__old_logp_s=6.0, timing__rollout_s=2.0, timing__update_s=1.0), metrics()),
    "bound-by-other": (metrics(timing__rollout_s=2.0, timing__update_s=1.0, timing__old_logp_s=1.0), metrics()),
    # checkpoint.every_steps = 10 of 30 steps: 10 x 6.5 minutes is more than an hour, 10 x 5.5 is not.
    "rare-checkpoints": (metrics(timing__step_s=6.5 * 60), metrics(timing__step_s=5.5 * 60)),
}


def test_skipped_updates_are_not_dead_gradients(tmp_path: Path):
    """Nothing was learnt for want of a finite gradient, not of one above 0. Older runs wrote 0 for their norm."""
    skipped = metrics(policy__grad_norm=0.0, policy__skipped_updates=4)
    without = [{name: value for name, value in line.items() if name != "policy/grad_norm"} for line in skipped]
    dead_before = metrics(policy__grad_norm=0.0)[:10] + without[10:]
    for at, lines in enumerate((skipped, without, dead_before)):
        found = names(look(tmp_path / str(at), lines))
        assert "non-finite-gradients" in found
        assert "dead-gradients" not in found


def test_dead_gradients_of_imitation_lead_to_the_verdicts(tmp_path: Path):
    lines = metrics(policy__gradient_norm=0.0)
    for config, where in (("", "sampling/groups_kept"), ('[algorithm]\nadvantage = "none"\n', "accuracy")):
        run = load_run(write_run(tmp_path / where, lines, config=config))
        (finding,) = [finding for finding in examine(run) if finding.name == "dead-gradients"]
        assert finding.metrics[1] == where
        assert where in finding.remedy


@pytest.mark.parametrize("name", BY_METRICS)
def test_a_finding_fires_on_the_run_that_has_it_and_not_on_the_other(tmp_path: Path, name: str):
    has, has_not = BY_METRICS[name]
    found = look(tmp_path / "has", has)
    assert name in names(found)
    assert name not in names(look(tmp_path / "not", has_not))
    finding = next(finding for finding in found if finding.name == name)
    assert re.search(r"\d", finding.detail)  # cites its numbers
    assert finding.remedy
    assert finding.steps is not None
    assert 1 <= finding.steps[0] <= finding.steps[1] <= 30


@pytest.mark.parametrize("name", BY_METRICS)
def test_a_level_or_a_trend_is_not_told_of_a_few_steps(tmp_path: Path, name: str):
    """The last steps of a run that has the finding, as the first ones of a run: only what has happened is told."""
    has, _ = BY_METRICS[name]
    young = [line | {"step": at} for at, line in enumerate(has[-(T.min_steps - 1) :], start=1)]
    run = load_run(write_run(tmp_path, young, wanted=30))
    assert names(examine(run)) <= {"non-finite-gradients"}
    if name != "non-finite-gradients":
        assert verdict(examine(run), run).startswith(f"Not enough steps to diagnose: {T.min_steps - 1} steps")
    else:
        assert names(examine(run)) == {name}


def test_a_healthy_run_of_episodes_has_no_finding(tmp_path: Path):
    assert look(tmp_path, metrics(**EPISODES)) == []


def test_failures_of_episodes_are_told_once(tmp_path: Path):
    found = names(look(tmp_path, metrics(**EPISODES, verdict__timeout=0.1)))
    assert "environment-failures" in found
    assert "verifier-failures" not in found


@pytest.mark.parametrize(
    ("changes", "config", "level"),
    [
        ({"episode/turns": 1.0, "episode/tool_calls": 0.0}, "", WARNING),
        ({"episode/turns": 1.0, "episode/tool_calls": 0.0, "accuracy": 0.95}, "", NOTE),
        ({"episode/tool_calls": 0.0}, 'environment = "python"', WARNING),
        ({"episode/tool_calls": 0.0}, 'environment = "guess"', None),
    ],
)
def test_an_environment_is_unused_where_it_never_answers_or_its_tools_are_not_called(
    tmp_path: Path, changes: dict[str, float], config: str, level: str | None
):
    run = write_run(tmp_path, metrics(**EPISODES | changes))
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("[data]\n", f"[data]\n{config}\n"))
    found = [finding for finding in examine(load_run(run)) if finding.name == "unused-environment"]
    assert [finding.level for finding in found] == ([level] if level else [])


def mixture(kept: float, *, accuracy: float = 0.97, tried: int = 10, early: float = 0.5) -> list[dict[str, float]]:
    """Thirty steps on two sources: `old` gives mixed groups at first, `new` always."""
    old = {"accuracy": accuracy, "prompts_tried": tried, "share_submitted": 0.25}
    new = {"accuracy": 0.5, "prompts_tried": 30, "share_submitted": 0.75, "groups_kept": 0.6}
    return [
        line
        | {f"source/old/{name}": value for name, value in old.items()}
        | {"source/old/groups_kept": early if line["step"] <= 15 else kept}
        | {f"source/new/{name}": value for name, value in new.items()}
        for line in metrics()
    ]


MIXED = "{old = {}, new = {weight = 3.0, verifier = 'exact'}}"


def test_a_source_without_mixed_groups_is_named_with_what_to_do(tmp_path: Path):
    kept = T.idle_source_kept
    finding = the(look(tmp_path / "solved", mixture(kept - 0.01), train=MIXED), "idle-source")
    assert finding.title == "Source old teaches nothing any more"
    assert "of its last 100 prompts" in finding.detail
    assert "solved" in finding.detail
    assert "25% of the prompts" in finding.detail
    assert finding.steps == (21, 30)
    assert "data.train.old.weight" in finding.remedy
    assert "sampling.retire_above" in finding.remedy
    hard = the(look(tmp_path / "hard", mixture(0.0, accuracy=0.0, early=0.0), train=MIXED), "idle-source")
    assert hard.title == "Source old teaches nothing"
    assert "verifier" in hard.remedy


def test_a_source_that_still_teaches_or_was_hardly_asked_is_no_finding(tmp_path: Path):
    kept, least = T.idle_source_kept, T.idle_source_prompts
    assert "idle-source" not in names(look(tmp_path / "mixed", mixture(kept + 0.01), train=MIXED))
    assert "idle-source" in names(look(tmp_path / "n", mixture(0.0, tried=-(-least // 15)), train=MIXED))
    assert "idle-source" not in names(look(tmp_path / "early", mixture(0.0, tried=least // 15 - 2), train=MIXED))
    assert "idle-source" not in names(look(tmp_path / "few", mixture(0.0, early=0.0, tried=3), train=MIXED))
    assert "idle-source" not in names(look(tmp_path / "one", mixture(0.0)))  # no table: there are no sources
    critic = '[algorithm]\nadvantage = "gae"\n'
    assert "idle-source" not in names(look(tmp_path / "critic", mixture(0.0), train=MIXED, config=critic))


def test_no_recorded_run_taken_for_one_source_is_an_idle_source():
    """The rate of false alarms, for the page: every recorded run of one source and without a critic, after every step.

    Of Countdown's three sources 0.5 B learns two no further, and the finding says so: no false alarm.
    """
    found = {"runs": 0, "looks": 0, "alarms": 0, "lowest share of mixed groups": 1.0}
    for path in sorted((ROOT / "docs" / "results").rglob("metrics.jsonl")):
        run = load_run(path.parent)
        if run.key("algorithm", "advantage") == "gae" or len(run.metrics) < T.min_steps:
            continue
        if isinstance(run.key("data", "train"), dict):
            continue
        own = {"groups_kept": "sampling/groups_kept", "accuracy": "accuracy", "prompts_tried": "sampling/prompts_tried"}
        lines = [
            {"step": m["step"]} | {f"source/x/{name}": m[there] for name, there in own.items()} for m in run.metrics
        ]
        kept = [line["source/x/groups_kept"] for line in lines]
        for n in range(T.min_steps, len(lines) + 1):
            one = dataclasses.replace(run, metrics=lines[:n], config={"data": {"train": {"x": {}}}})
            found["looks"] += 1
            found["alarms"] += len(list(idle_sources(Visit(one, (), None, T))))
        found["runs"] += 1
        found["lowest share of mixed groups"] = min(found["lowest share of mixed groups"], round(min(kept), 2))
    recorded = json.loads((ROOT / "docs" / "results" / "benchmarks" / "mixture.json").read_text())
    assert found == recorded["runs"][1]["values"]


def test_what_is_told_after_the_first_steps_that_count_is_told_of_their_median(tmp_path: Path):
    """One odd step among the last three is no finding, at the sixth step as later."""
    lines = metrics(T.min_steps, length__truncated=lambda t: 0.9 * (t == 1.0))
    assert "truncation" not in names(look(tmp_path / "one", lines))
    assert "truncation" in names(look(tmp_path / "all", metrics(T.min_steps, length__truncated=0.9)))


def test_a_healthy_run_gets_a_clean_bill(tmp_path: Path):
    run = load_run(write_run(tmp_path, metrics(), evaluations=[evaluation(0, 0.3), evaluation(30, 0.6)]))
    findings = examine(run, disk=Disk(free=500 * GIB, total=1000 * GIB, checkpoint=10 * GIB))
    assert findings == []
    assert verdict(findings, run).startswith("No issues found")


SHIPPED = [
    "quickstart/dapo-seed0", "quickstart/dapo-seed1", "quickstart/dapo-seed2", "quickstart/vapo",
    "arithmetic-smollm2-135m/seed0/", "arithmetic-smollm2-135m/seed1/",
]  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_the_recorded_healthy_runs_get_a_clean_bill(tmp_path: Path, name: str):
    prefix = name if name.endswith("/") else f"{name}."
    lines = [json.loads(line) for line in (ROOT / f"docs/results/{prefix}metrics.jsonl").read_text().splitlines()]
    evaluations = [json.loads(line) for line in (ROOT / f"docs/results/{prefix}eval.jsonl").read_text().splitlines()]
    findings = look(tmp_path, lines, evaluations=evaluations)
    assert [finding for finding in findings if finding.level != NOTE] == []


@pytest.mark.parametrize("name", ["control-negated", "control-shuffled"])
def test_the_recorded_controls_do_not(tmp_path: Path, name: str):
    lines = [
        json.loads(line) for line in (ROOT / f"docs/results/quickstart/{name}.metrics.jsonl").read_text().splitlines()
    ]
    evaluations = [
        json.loads(line) for line in (ROOT / f"docs/results/quickstart/{name}.eval.jsonl").read_text().splitlines()
    ]
    assert "forgetting" in names(look(tmp_path, lines, evaluations=evaluations))


def summary(responses: int = 100, answer_only: int = 0, top=None, groups: int = 10) -> dict:
    return {"responses": responses, "answer_only": answer_only, "top_answer": top, "groups": groups}


def test_answer_only_responses_are_counted_in_the_rollouts_where_there_are_any(tmp_path: Path):
    rising = metrics(accuracy=falls(0.3, 0.7))
    grown = int(100 * T.answer_only_rise)
    has = [(10, summary(answer_only=5)), (30, summary(answer_only=5 + grown + 1))]
    has_not = [(10, summary(answer_only=5)), (30, summary(answer_only=5 + grown))]
    assert "answer-only" in names(look(tmp_path / "a", rising, summaries=has))
    assert "answer-only" not in names(look(tmp_path / "b", rising, summaries=has_not))
    assert "answer-only" not in names(look(tmp_path / "c", metrics(accuracy=0.5), summaries=has))


def test_one_answer_dominates_unless_the_references_do_too(tmp_path: Path):
    # ["42", how many responses say it, of how many problems it is the reference]
    n = int(100 * T.dominating_answer)
    asked = int(10 * T.dominating_reference)
    for name, top, fires in (
        ("has", ["42", n, asked], True),
        ("rarer", ["42", n - 1, asked], False),
        ("expected", ["42", n, asked + 1], False),
    ):
        found = names(look(tmp_path / name, metrics(), summaries=[(30, summary(top=top))]))
        assert ("dominating-answer" in found) == fires, name


def the(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def config_of(section: str, **keys: object) -> str:
    lines = (f"{name} = {json.dumps(value)}" for name, value in keys.items())
    return f"[{section}]\n" + "".join(line.replace(": ", " = ") + "\n" for line in lines)


@pytest.mark.parametrize(("start", "end"), [(0.0, 0.0), (0.0, 2 * T.entropy_explosion_rise)])
def test_an_entropy_that_was_nothing_at_the_start_has_no_ratio(tmp_path: Path, start: float, end: float):
    found = look(tmp_path, metrics(accuracy=0.1, policy__entropy=lambda t: start if t < 0.5 else end))
    finding = next(finding for finding in found if finding.name.startswith("entropy-"))
    assert "%" not in finding.detail


def test_a_truncated_response_may_count_where_the_config_says_so(tmp_path: Path):
    lines = metrics(length__truncated=T.truncated + 0.01)
    never = the(look(tmp_path / "never", lines), "truncation")
    may = the(look(tmp_path / "may", lines, config=config_of("rewards", truncated_may_be_correct=True)), "truncation")
    assert "never counts as correct" in never.detail
    assert "never" not in may.detail


@pytest.mark.parametrize(
    ("right", "masked", "remedy"),
    [
        (1.1, True, "Raise limits.max_response_tokens"),
        (0.9, True, "shaping.overlong_filter = false"),
        (0.9, False, "Read the longest responses"),
    ],
)
def test_a_higher_limit_is_no_remedy_where_right_responses_are_short(
    tmp_path: Path, right: float, masked: bool, remedy: str
):
    """`right`: the mean length of right responses, in units of what makes the limit just enough."""
    tokens = round(right * 1000 / T.truncated_room)
    lines = metrics(length__truncated=T.truncated + 0.01, length__correct=tokens)
    found = the(look(tmp_path, lines, config=config_of("shaping", overlong_filter=masked)), "truncation")
    assert remedy in found.remedy
    assert ("Raise" in found.remedy, f"{tokens} tokens" in found.detail) == (right > 1, right < 1)


def test_the_recorded_long_run_whose_masked_responses_go_in_circles_is_told_so():
    found = the(examine(load_run(ROOT / "docs/results/gsm8k-coder-0.5b/long-sequence-seed0")), "truncation")
    assert "overlong_filter = false" in found.remedy


def test_what_is_on_already_is_no_remedy(tmp_path: Path):
    growing = metrics(
        accuracy=0.5,
        length__truncated=0.5,
        length__mean=lambda t: 300 if t < 0.5 else 300 * T.length_runaway_ratio * 1.1,
    )
    off = look(tmp_path / "off", growing)
    config = config_of("shaping", overlong_penalty=1.0) + config_of("algorithm", loss_aggregation="token")
    on = look(tmp_path / "on", growing, config=config)
    for name in ("length-runaway", "truncation"):
        assert "overlong_penalty" in the(off, name).remedy
        assert "overlong_penalty" not in the(on, name).remedy
        assert "algorithm.loss_aggregation" not in the(on, name).remedy
    gap = metrics(engine__gap_mean=T.engine_gap_nats * 1.1)
    assert "correction.cap" in the(look(tmp_path / "free", gap), "engine-gap").remedy
    for name, keys in (("capped", {"correction": {"cap": 2.0}}), ("bypass", {"old_logp": "bypass"})):
        finding = the(look(tmp_path / name, gap, config=config_of("algorithm", **keys)), "engine-gap")
        assert (finding.level, "correction.cap" in finding.remedy) == ("severe", False)


def test_the_gap_of_carried_tokens_is_not_laid_at_the_engines_door(tmp_path: Path):
    gap = metrics(engine__gap_mean=T.engine_gap_nats * 1.1)
    config = config_of("sampling", partial_rollouts=True, max_staleness_updates=16)
    config += config_of("algorithm", correction={"cap": 2.0})
    by_config = the(look(tmp_path / "config", gap, config=config), "engine-gap")
    assert "at most 16 updates old" in by_config.detail
    by_age = the(look(tmp_path / "age", metrics(engine__gap_mean=1.0, sampling__staleness_max=3)), "engine-gap")
    for finding in (by_config, by_age):
        assert finding.level == "warning"
        assert "engine disagree" not in finding.title
        assert "correction.cap" not in finding.remedy


def test_groups_of_equal_graded_values_are_counted(tmp_path: Path):
    few = {
        "sampling__groups_kept": T.acceptance - 0.01,
        "sampling__groups_all_correct": 0,
        "sampling__groups_all_wrong": 0,
    }
    graded = the(look(tmp_path / "graded", metrics(**few, sampling__groups_all_equal=9)), "all-equal")
    assert "of the others 9 per step had equal rewards." in graded.detail
    assert "sampling/groups_all_equal" in graded.metrics
    # 6 of 10 all correct: no cause makes up one_cause of all three kinds.
    mixed = metrics(**few | {"sampling__groups_all_correct": 6}, sampling__groups_all_equal=4)
    assert T.one_cause > 0.6
    finding = the(look(tmp_path / "mixed", mixed), "few-mixed-groups")
    assert "4 per step had equal rewards, 6 per step were all correct and 0 all wrong." in finding.detail


def test_nothing_is_dropped_without_dynamic_sampling(tmp_path: Path):
    few = {"sampling__groups_kept": T.acceptance - 0.01}
    easy = metrics(**few, sampling__groups_all_correct=9, sampling__groups_all_wrong=0)
    both = metrics(**few, sampling__groups_all_correct=5, sampling__groups_all_wrong=5)
    group = config_of("sampling", dynamic=False)
    critic = group + config_of("algorithm", advantage="gae")
    assert "trained on" not in the(look(tmp_path / "dynamic", easy), "too-easy").detail
    assert "trained on with an advantage of 0." in the(look(tmp_path / "group", easy, config=group), "too-easy").detail
    assert the(look(tmp_path / "critic", easy, config=critic), "too-easy").detail.endswith("They are trained on.")
    assert "few-mixed-groups" in names(look(tmp_path / "both", both, config=group))
    assert "few-mixed-groups" not in names(look(tmp_path / "lone", both, config=critic))
    for finding in look(tmp_path / "word", easy, config=group):
        assert "dropped" not in finding.detail


def test_a_critic_that_explains_less_than_a_constant_is_named(tmp_path: Path):
    bad, good = (metrics(critic__explained_variance=T.critic_explained + off) for off in (-0.01, 0.01))
    finding = the(look(tmp_path / "bad", bad), "negative-explained-variance")
    assert finding.remedy.startswith("Pretrain it")
    started = config_of("algorithm.critic", pretrain_responses=10)
    assert the(look(tmp_path / "started", bad, config=started), "negative-explained-variance").remedy.startswith(
        "Try another"
    )
    assert "negative-explained-variance" not in names(look(tmp_path / "good", good))


def test_a_reward_that_reaches_only_the_end_is_named(tmp_path: Path):
    # γλ = 0.9: a reward reaches 10 tokens, a fifth of 50.
    gae = config_of("algorithm.gae", gamma=1.0, lam=0.9)
    stuck = {"accuracy": 0.5, "critic__explained_variance": 0.9}
    long, short = (metrics(**stuck, length__mean=length) for length in (51, 49))
    finding = the(look(tmp_path / "long", long, config=gae), "short-gae-horizon")
    assert "the last 10 of 51 tokens" in finding.detail
    assert finding.detail.endswith("accuracy 0.500 half-way, 0.500 now.")
    assert finding.remedy.startswith("Try algorithm.gae.lam = 1.0; or")
    discounted = config_of("algorithm.gae", gamma=0.9, lam=1.0)
    assert "gamma = 1.0 (now 0.9)" in the(look(tmp_path / "gamma", long, config=discounted), "short-gae-horizon").remedy
    gaining = metrics(**stuck | {"accuracy": falls(0.3, 0.7)}, length__mean=400)
    assert the(look(tmp_path / "gaining", gaining, config=gae), "short-gae-horizon").detail.endswith("values alone.")
    adaptive = config_of("algorithm.gae", lam=0.9, length_adaptive_alpha=0.05)
    assert "short-gae-horizon" in names(look(tmp_path / "adaptive, gaining", gaining, config=adaptive))
    floor = config_of("algorithm.gae", length_adaptive_alpha=0.05, length_adaptive_floor=400.0)
    silent = {
        "short": (short, gae),
        "all of it": (long, config_of("algorithm.gae", lam=1.0)),
        "adaptive, all of it": (long, config_of("algorithm.gae", lam=0.9, length_adaptive_alpha=1.0)),
        "adaptive, from a floor on": (metrics(**stuck, length__mean=3000), floor),
        "as long as the paper's": (metrics(**stuck, length__mean=8000), adaptive),
        "no critic": (metrics(accuracy=0.5, length__mean=400), gae),
    }
    for name, (lines, config) in silent.items():
        assert "short-gae-horizon" not in names(look(tmp_path / name, lines, config=config)), name


def test_graded_rewards_are_progress_where_no_response_counts_as_right(tmp_path: Path):
    bad = {
        "accuracy": 0.0,
        "length__mean": lambda t: 300 if t < 0.5 else 900,
        "policy__entropy": lambda t: 0.4 if t < 0.5 else 0.05,
    }
    found = look(tmp_path / "stuck", metrics(**bad, reward__raw=0.5))
    assert {"entropy-collapse", "length-runaway"} <= names(found)
    collapse = the(found, "entropy-collapse")
    assert "mean reward 0.500 half-way, 0.500 now: the model has stopped exploring." in collapse.detail
    assert collapse.level == WARNING
    once_right = bad | {"accuracy": lambda t: 0.002 * (t == 1.0)}
    for name, lines in (("rising", bad), ("once", once_right)):
        found = look(tmp_path / name, metrics(**lines, reward__raw=falls(0.0, 0.9)))
        assert not {"entropy-collapse", "length-runaway"} & names(found), name


def test_a_reward_far_from_0_rises_by_its_own_range(tmp_path: Path):
    """From 10 to 10.2 is all that it has ever risen; 2 % of 10 would be as much again."""
    lines = metrics(accuracy=0.0, length__mean=lambda t: 300 if t < 0.5 else 900, reward__raw=falls(10.0, 10.2))
    assert "length-runaway" not in names(look(tmp_path, lines))


def test_a_small_rise_of_the_entropy_is_no_explosion_however_many_times_the_start(tmp_path: Path):
    for name, start, fires in (("small", 0.4 * T.entropy_explosion_rise, False), ("large", 0.4, True)):
        end = start * T.entropy_explosion_ratio * 1.6
        lines = metrics(policy__entropy=lambda t, a=start, b=end: a if t < 0.5 else b)
        assert end > T.entropy_explosion_rise
        assert ("entropy-explosion" in names(look(tmp_path / name, lines))) == fires, name


def test_the_engine_may_be_far_off_by_its_kl_or_its_effective_sample_size_alone(tmp_path: Path):
    limits = (("engine__kl", T.engine_kl_nats, 1.1), ("engine__effective_sample_size", T.effective_sample_size, 0.9))
    for name, limit, beyond in limits:
        for side, fires in ((beyond, True), (2 - beyond, False)):
            found = names(look(tmp_path / f"{name}-{side}", metrics(**{name: limit * side})))
            assert ("engine-gap" in found) == fires, (name, side)


def test_a_checkpoint_at_the_end_alone_is_as_far_off_as_the_end_of_the_run(tmp_path: Path):
    """30 of 1,000 steps of 10 s: what a crash loses is nearly three hours, not the five minutes so far."""
    for name, wanted, fires in (("long", 1000, True), ("short", 100, False)):
        folder = write_run(tmp_path / name, metrics(), wanted=wanted)
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(
            text.replace("[checkpoint]\nevery_steps = 10", "[checkpoint]\nevery_steps = 0")
        )
        assert ("rare-checkpoints" in names(examine(load_run(folder)))) == fires, name


def test_a_trend_counts_beyond_what_two_medians_differ_by_through_the_scatter_alone(tmp_path: Path):
    """Steps 1 apart by turns: of each 1/(√2·0.6745), of a median of 6 √(π/2)/√6 of it, and √2 for two of them."""
    folder = write_run(tmp_path, metrics(accuracy=lambda t: float(round(29 * t) % 2)))
    noise = Visit(load_run(folder), (), None, T).noise("accuracy")
    assert noise == pytest.approx(T.trend_noise * math.sqrt(math.pi / 2) / (math.sqrt(2) * 0.6745) * math.sqrt(2 / 6))


def test_a_collapse_without_accuracy_or_reward_says_nothing_of_them(tmp_path: Path):
    lines = metrics(policy__entropy=lambda t: 0.4 if t < 0.5 else T.entropy_collapse_nats / 2)
    lines = [{k: v for k, v in line.items() if k not in ("accuracy", "reward/raw")} for line in lines]
    assert "None" not in the(look(tmp_path, lines), "entropy-collapse").detail


def test_a_reach_that_grows_with_the_length_may_be_too_short_too(tmp_path: Path):
    lines = metrics(accuracy=0.5, critic__explained_variance=0.1, length__mean=400)
    finding = the(
        look(tmp_path, lines, config=config_of("algorithm.gae", length_adaptive_alpha=0.05)), "short-gae-horizon"
    )
    assert (
        "algorithm.gae.length_adaptive_alpha = 0.05 the reward reaches about the last 20 of 400 tokens"
        in finding.detail
    )
    assert "algorithm.gae.length_adaptive_floor = 400" in finding.remedy


def right_of(step: int, right: str, name: str = "held-out", **more: object) -> dict[str, object]:
    """A line of eval_problems.jsonl: 1 or 0 for each problem."""
    ids = [f"p{i}" for i in range(len(right))]
    correct = [int(c) for c in right]
    return {"step": step, "set": name, "k": 1, "sampling": [1.0, 0.7, 0], "ids": ids, "questions": ids,
            "correct": correct} | more  # fmt: skip


def exam(folder: Path, problems: list[dict[str, object]]) -> list[Finding]:
    """What the doctor says of a run that was evaluated before and after 30 steps."""
    sets = dict.fromkeys(str(line["set"]) for line in problems)
    exams = [evaluation(step, avg, k=1, set=name) for name in sets for step, avg in ((0, 0.6), (30, 0.55))]
    write_run(folder, metrics(), evaluations=exams)
    (folder / "eval_problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in problems))
    return examine(load_run(folder))


BEFORE, WORSE, BETTER = "1" * 60 + "0" * 40, "0" * 12 + "1" * 48 + "0" * 40, "1" * 70 + "0" * 30


def test_a_model_that_answers_fewer_of_the_same_problems_than_before_training_is_told(tmp_path: Path):
    finding = the(exam(tmp_path, [right_of(0, BEFORE), right_of(30, WORSE)]), "worse-than-before")
    assert "avg@1 on held-out: 0.600 before, 0.480 after step 30" in finding.detail
    # 12 of 100 lost: a standard deviation of 0.3266, so 0.12 -+ 1.96 * 0.0327
    assert "a loss of 0.056 to 0.184 (95 % interval)" in finding.detail
    assert "critic" not in finding.remedy
    two = exam(
        tmp_path / "two",
        [
            right_of(step, right, name)
            for name in "ab"
            for step, right in ((0, BEFORE), (30, WORSE if name == "b" else BETTER))
        ],
    )
    assert the(two, "worse-than-before").title.endswith(" on b")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("as many won as lost", [right_of(0, BEFORE), right_of(30, "0" * 12 + "1" * 60 + "0" * 28)]),
        ("few changed", [right_of(0, BEFORE), right_of(30, "0" * (T.changed_problems - 1) + BEFORE[9:])]),
        ("better", [right_of(0, BEFORE), right_of(30, BETTER)]),
        ("not evaluated before", [right_of(10, BEFORE), right_of(30, WORSE)]),
        ("the last one is missing", [right_of(0, BEFORE), right_of(10, WORSE)]),
        ("sampled otherwise", [right_of(0, BEFORE, sampling=[0.0, 1.0, 0]), right_of(30, WORSE)]),
        ("another k", [right_of(0, BEFORE), right_of(30, WORSE, k=8)]),
        ("other problems", [right_of(0, BEFORE), right_of(30, WORSE[:-1])]),
    ],
)
def test_no_loss_is_told_of_where_there_is_none_or_nobody_can_know(tmp_path: Path, name: str, lines: list):
    assert "worse-than-before" not in names(exam(tmp_path, lines)), name


def test_the_recorded_vapo_run_on_gsm8k_is_seen_through(tmp_path: Path):
    source = ROOT / "docs/results/gsm8k-coder-1.5b/decay"
    folder = shutil.copytree(source / "vapo-20-seed0", tmp_path / "vapo")
    problems = json.loads((source / "problems.json").read_text())
    lines = [right_of(step, problems[f"vapo-20-seed0, step {step}"], "gsm8k:test") for step in (0, 10, 20)]
    (folder / "eval_problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = load_run(folder)
    assert {"short-gae-horizon", "worse-than-before"} <= names(examine(run))
    assert learnt(run).answer == "Worse"  # the card above the doctor's findings says the same


def test_the_recorded_ppo_run_on_gsm8k_is_seen_through(tmp_path: Path):
    folder = shutil.copytree(ROOT / "docs/results/gsm8k-coder-1.5b/decay/ppo-20-seed0", tmp_path / "ppo")
    found = names(examine(load_run(folder)))
    assert {"short-gae-horizon", "forgetting", "truncation"} <= found


def test_bypass_is_not_said_to_save_time_nor_checkpoints_to_be_in_a_step(tmp_path: Path):
    before = metrics(timing__old_logp_s=6.0, timing__rollout_s=2.0, timing__update_s=1.0)
    assert "bypass" not in the(look(tmp_path / "old", before), "bound-by-old-logp").remedy
    other = metrics(timing__rollout_s=2.0, timing__update_s=1.0, timing__old_logp_s=1.0)
    assert "checkpoint" not in the(look(tmp_path / "other", other), "bound-by-other").remedy


def test_responses_that_the_engine_gave_up_are_named_wherever_it_was(tmp_path: Path):
    sampled = metrics(engine__faults=lambda t: 2.0 * (t == 1.0))
    tested = [evaluation(0, 0.5, faults=0), evaluation(10, 0.5, faults=3)]
    assert the(look(tmp_path / "step", sampled), "engine-faults").steps == (30, 30)
    finding = the(look(tmp_path / "both", sampled, evaluations=tested), "engine-faults")
    assert finding.steps == (10, 30)
    assert "2 responses in 1 steps, 3 in 1 evaluations" in finding.detail
    assert "engine-faults" not in names(look(tmp_path / "none", metrics(), evaluations=tested[:1]))


@pytest.mark.parametrize("norm", [0.0, None, float("nan")])
def test_skipped_updates_are_not_called_dead_gradients(tmp_path: Path, norm: float | None):
    lines = metrics(policy__skipped_updates=lambda t: float(t > 0.8))
    for line in lines[-5:]:
        del line["policy/grad_norm"]
        if norm is not None:
            line["policy/grad_norm"] = line["policy/loss"] = norm
    found = names(look(tmp_path, lines))
    assert "non-finite-gradients" in found
    assert "dead-gradients" not in found


def test_lines_without_their_numbers_can_be_read(tmp_path: Path):
    lines = [{"step": step, "timing.step_s": None, "policy/loss": float("nan")} for step in range(1, 9)]
    run = load_run(write_run(tmp_path, lines, wanted=100))
    assert run.state == "running"
    assert verdict(examine(run), run).startswith("No issues found")


def test_the_way_back_to_the_better_checkpoint_is_told_where_there_is_one(tmp_path: Path):
    fallen = [evaluation(0, 0.5), evaluation(10, 0.7), evaluation(30, 0.4)]

    def remedy(folder: Path, checkpoints: str = "[checkpoint]") -> str:
        config = write_run(folder, metrics(), evaluations=fallen) / "config.toml"
        config.write_text(config.read_text().replace("[checkpoint]", checkpoints))
        return the(examine(load_run(folder)), "forgetting").remedy

    for name, step in (("gone", 30), ("there", 10), ("on", 30)):
        (tmp_path / name / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    assert "checkpoint.keep_best = true" in remedy(tmp_path / "gone")
    assert remedy(tmp_path / "there").endswith("--step 10")
    is_on = remedy(tmp_path / "on", "[checkpoint]\nkeep_best = true")
    assert "gone" in is_on
    assert "keep_best" not in is_on
    record_alone = remedy(tmp_path / "bundle")
    assert "gone" not in record_alone
    assert "step 10" in record_alone


def test_graded_rewards_have_fallen_where_their_mean_has(tmp_path: Path):
    def graded(*means: float) -> list[dict[str, object]]:
        shares = (0.3, 0.7, 0.4)  # of right responses: they rise and fall
        return [
            evaluation(10 * i, share, mean_value=mean, mean_value_interval=[mean - 0.03, mean + 0.03])
            for i, (share, mean) in enumerate(zip(shares, means, strict=True), 1)
        ]

    assert "forgetting" not in names(look(tmp_path / "rises", metrics(), evaluations=graded(0.2, 0.4, 0.6)))
    finding = the(look(tmp_path / "falls", metrics(), evaluations=graded(0.2, 0.6, 0.4)), "forgetting")
    assert "mean reward on held-out: 0.600 after step 20, 0.400 after step 30" in finding.detail


def test_rollout_bounds_the_time_with_those_of_its_parts_that_do_not_by_themselves(tmp_path: Path):
    whole = metrics(timing__rollout_s=7.0, timing__update_s=2.0, timing__tail_s=2.5)
    finding = the(look(tmp_path / "whole", whole), "bound-by-rollout")
    assert finding.title == "Most of the time goes to rollout"
    assert "67% of the run's time" in finding.detail
    parted = names(look(tmp_path / "tail", metrics(timing__rollout_s=7.0, timing__update_s=2.0, timing__tail_s=4.0)))
    assert parted & {"bound-by-rollout", "bound-by-tail"} == {"bound-by-tail"}


def test_the_evaluation_has_fallen_only_where_the_intervals_part(tmp_path: Path):
    parted = [evaluation(0, 0.5), evaluation(10, 0.7), evaluation(30, 0.7 - 0.03 - 0.03 - 0.01)]
    touching = [evaluation(0, 0.5), evaluation(10, 0.7), evaluation(30, 0.7 - 0.03 - 0.03 + 0.01)]
    assert "forgetting" in names(look(tmp_path / "a", metrics(), evaluations=parted))
    assert "forgetting" not in names(look(tmp_path / "b", metrics(), evaluations=touching))


def test_evaluation_bounds_the_time_from_its_own_share_on(tmp_path: Path):
    whole = 30 * 10.0
    share = T.evaluation_time_fraction
    for name, seconds, fires in (
        ("a", whole * share / (1 - share) * 1.1, True),
        ("b", whole * share / (1 - share) * 0.9, False),
    ):
        lines = [evaluation(30, 0.5, **{"timing.evaluation_s": seconds})]
        assert ("bound-by-evaluation" in names(look(tmp_path / name, metrics(), evaluations=lines))) == fires


def test_a_disk_is_nearly_full_by_share_or_by_checkpoints(tmp_path: Path):
    total = 1000 * GIB
    enough = int(T.disk_free_fraction * total)
    for name, disk, fires in (
        ("share", Disk(enough - GIB, total, GIB), True),
        ("room", Disk(enough + GIB, total, GIB), False),
        ("checkpoints", Disk(100 * GIB, total, int(100 * GIB / T.disk_checkpoints) + GIB), True),
        ("fits", Disk(100 * GIB, total, int(100 * GIB / T.disk_checkpoints) - GIB), False),
    ):
        assert ("disk-full" in names(look(tmp_path / name, metrics(), disk=disk))) == fires, name


def test_a_run_that_stopped_before_its_end(tmp_path: Path):
    import os
    import time

    folder = write_run(tmp_path, metrics(), wanted=100)
    assert load_run(folder).state == "running"  # it wrote a moment ago
    long_ago = time.time() - 3600
    for path in folder.iterdir():
        os.utime(path, (long_ago, long_ago))
    run = load_run(folder)
    assert run.state == "stopped"
    assert "stopped" in names(examine(run))
    assert "stopped" not in names(look(tmp_path / "b", metrics()))


@pytest.mark.parametrize(
    "lines", [[], metrics(1), metrics(5), [{"step": 1}], [{"step": 1, "policy/entropy": float("nan")}]]
)
def test_a_young_or_empty_run_says_nothing_false(tmp_path: Path, lines: list):
    run = load_run(write_run(tmp_path, lines, wanted=100))
    findings = examine(run)
    assert [f for f in findings if f.level != NOTE] == []
    assert verdict(findings, run)


def test_every_threshold_stands_in_the_docs_with_its_value():
    text = (ROOT / "docs" / "doctor.md").read_text()
    for field in dataclasses.fields(Thresholds):
        value = getattr(T, field.name)
        assert re.search(rf"`{field.name}` \| {re.escape(f'{value:g}')} \|", text), f"{field.name} = {value:g}"


def test_every_finding_stands_in_the_docs():
    text = (ROOT / "docs" / "doctor.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "src/dapo/report/doctor").glob("*.py"))
    known = set(re.findall(r'Finding\(\s*"([a-z-]+)"', source)) | {
        "too-easy",
        "too-hard",
        "few-mixed-groups",
        "all-equal",
        "bound-by-",
    }
    assert len(known) >= 17
    assert [name for name in known if f"`{name}" not in text] == []
