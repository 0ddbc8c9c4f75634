"""Pass rates under a model: what they promise for groups of G, going on after a kill, selection and seeding."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy

from command_line import Answer, dapo
from dapo.cli import data_probe
from dapo.config import load_recipe
from dapo.data.encoded import EncodedSet
from dapo.data.problems import load_problems
from dapo.errors import ConfigError, DataError
from dapo.evaluation.offline import OfflineEval, run_offline_eval
from dapo.evaluation.probe import Difficulty, difficulties, fitted_prior, histogram, mixed_fraction, select, summary
from dapo.evaluation.runner import summarise
from dapo.models.load import save_policy
from dapo.sampling.predictive import Posteriors, chance_mixed, counts_in, n_right
from dapo.trainer.assemble import first_posteriors
from dapo.trainer.loop import train
from dapo.trainer.resume import resume_run
from dapo.trainer.start import start_run
from dapo.types import Group, Judgement, Problem
from tiny_models import tiny_policy


def seen(n: int, *correct: int) -> list[Difficulty]:
    return [Difficulty(f"p{i}", f"question {i}", n, c, 10.0, 0.0) for i, c in enumerate(correct)]


# ---------------------------------------------------------------- expected mixed groups


@pytest.mark.parametrize(("n", "c", "G"), [(8, 3, 4), (8, 1, 8), (6, 5, 2), (8, 0, 4), (8, 8, 8)])
def test_the_chance_of_a_mixed_group_counts_subsets(n: int, c: int, G: int):
    def is_mixed(chosen: tuple[int, ...]) -> bool:
        return 0 < sum(i < c for i in chosen) < G

    subsets = list(combinations(range(n), G))
    assert mixed_fraction(seen(n, c), G) == pytest.approx(sum(map(is_mixed, subsets)) / len(subsets))


def test_graded_responses_are_mixed_where_their_values_are_not_all_the_same():
    """Six values, 3 + 2 + 1: of the 15 pairs 3 + 1 are of one value, of the 20 triples one is."""
    one = Difficulty("p", "question", 6, 3, 10.0, 0.0, mean_value=0.5, alike=(3, 2, 1))
    assert [mixed_fraction([one], G) for G in (2, 3, 4)] == pytest.approx([11 / 15, 19 / 20, 1.0])


def test_one_problem_with_few_responses_is_judged_by_what_the_set_is_like():
    """Nearly all are hopeless: so is most likely one that was asked twice, of which a flat prior thinks better."""
    table = [*seen(8, *[0] * 60), *seen(2, 0)]
    assert mixed_fraction(table, 8) < 0.1 * chance_mixed(1 + 0, 1 + 2, 8) / len(table)


def test_the_estimate_is_unbiased():
    p, n, G = 0.3, 8, 4
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(w * mixed_fraction(seen(n, c), G) for c, w in enumerate(weights))
    assert mean == pytest.approx(1 - p**G - (1 - p) ** G)


def test_beyond_k_hopeless_problems_do_not_count_as_half_hopeful():
    table = seen(8, *[0] * 45, *[8] * 45, *[4] * 10)  # a tenth of the set is ever mixed
    a, b = fitted_prior(table)
    assert a < 0.3
    assert b < 0.3
    assert 0.1 <= mixed_fraction(table, 32) <= 0.3
    assert chance_mixed(1 + 0, 1 + 8, 32) > 0.75  # what a flat prior would say of a problem never solved


def test_all_of_one_kind_stays_finite():
    for table in (seen(8, 0, 0, 0), seen(8, 8, 8), seen(1, 1), seen(1, 0)):
        for share in summary(table)["mixed"].values():
            assert 0 <= share <= 1


def test_the_histogram_has_never_and_always_apart():
    rows = histogram(seen(10, 0, 0, 1, 2, 9, 10))
    assert [row["problems"] for row in rows] == [2, 1, 1, 0, 0, 1, 1]
    assert rows[0]["to"] == 0.0
    assert rows[-1]["from"] == 1.0


# ---------------------------------------------------------------- on a model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe") / "model"
    save_policy(tiny_policy("llama", seed=1), folder)
    return folder


def offline(model: Path, **changes: object) -> OfflineEval:
    settings: dict[str, object] = {
        "model": str(model), "data": "toy:problems", "use": "train", "k": 4, "temperature": 1.0, "top_p": 1.0,
        "max_response_tokens": 12, "max_prompt_tokens": 16, "template": "raw", "chat": False,
        "verifier": "toy:contains", "seed": 0, "concurrent": 16, "device": "cpu",
    }  # fmt: skip
    return OfflineEval(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_killed_examination_goes_on_without_repeating(model: Path, tmp_path: Path):
    straight = run_offline_eval(offline(model))
    journal = tmp_path / "answers.jsonl"

    class Killed(BaseException):
        pass

    def kill(done: int, total: int) -> None:  # noqa: ARG001
        if done == 50:
            raise Killed

    with pytest.raises(Killed):
        run_offline_eval(offline(model), journal=journal, on_progress=kill)
    assert len(journal.read_text().splitlines()) == 1 + 50
    with journal.open("a") as file:
        file.write('{"problem_id": "toy-')  # torn by the kill
    counted: list[int] = []
    resumed = run_offline_eval(offline(model), journal=journal, on_progress=lambda done, _total: counted.append(done))
    assert counted == list(range(51, 161))
    assert resumed.answers == straight.answers
    assert len(journal.read_text().splitlines()) == 1 + 160
    with pytest.raises(DataError, match="something else"):
        run_offline_eval(offline(model, seed=1), journal=journal)


@pytest.mark.parametrize(
    ("changes", "is_other"),
    [
        ({"temperature": 0.5}, True), ({"top_p": 0.5}, True), ({"seed": 1}, True), ({"k": 5}, True),
        ({"max_response_tokens": 11}, True), ({"template": "dapo"}, True), ({"chat": True}, True),
        ({"verifier": "exact"}, True), ({"engine": "plain"}, True), ({"environment": "guess"}, True),
        ({"concurrent": 3}, False), ({"device": "cuda"}, False), ({"max_prompt_tokens": 15}, False),
        ({"max_turns": 3}, False),  # without an environment
    ],
)  # fmt: skip
def test_responses_belong_to_what_decides_them(tmp_path: Path, changes: dict[str, object], is_other: bool):
    problems: Any = SimpleNamespace(sha256="0")
    settings = [offline(tmp_path, **given).settings("here", problems) for given in ({}, changes)]
    assert (settings[0] != settings[1]) == is_other


def test_responses_belong_to_what_the_file_held_and_not_to_its_name(tmp_path: Path):
    read: list[Any] = [SimpleNamespace(sha256=sha256) for sha256 in "01"]
    before, edited = (offline(tmp_path).settings("here", problems) for problems in read)
    assert before != edited
    assert offline(tmp_path, data="moved.jsonl").settings("here", read[0]) == before


def test_a_prompt_over_the_limit_is_left_out_and_counted(model: Path, tmp_path: Path):
    lines = [{"question": question, "answer": "1"} for question in ("w10 w11 " * 9, "w12 w13")]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = run_offline_eval(offline(model, data=str(tmp_path / "two.jsonl"), verifier="exact", k=2))
    assert ([problem.question for problem in found.problems], found.n_dropped) == (["w12 w13"], 1)
    assert len(found.answers) == 2


def test_responses_are_drawn_as_the_plan_says(model: Path):
    def texts(**changes: object) -> list[str]:
        plan = offline(model, k=2, max_response_tokens=6, verifier="exact", **changes)
        answers = run_offline_eval(plan).answers
        return [answers[key].text for key in sorted(answers)]

    greedy = texts(temperature=0.0)
    assert texts(top_p=1e-6) == texts(temperature=1e-4) == greedy  # the nucleus is the likeliest token alone
    assert greedy[::2] == greedy[1::2]
    first, other = texts(), texts(seed=1)
    assert greedy != first != other


def test_selection_keeps_ids_and_order(model: Path):
    result = run_offline_eval(offline(model))
    table = difficulties(result.problems, result.answers, k=4)
    kept = select(result.problems, table, 0.25, 0.75)
    rates = {one.id: one.pass_rate for one in table}
    assert 0 < len(kept) < len(table)
    assert all(0.25 <= rates[problem.id] <= 0.75 for problem in kept)
    with pytest.raises(DataError, match=r"--select 0\.9 0\.95: no problem"):
        select(result.problems, table, 0.9, 0.95)


def test_graded_responses_are_counted_as_the_group_filter_counts_them(model: Path):
    result = run_offline_eval(offline(model, verifier="toy:counts", k=5))
    table = difficulties(result.problems, result.answers, k=5)
    for one in table:
        own = [result.answers[one.id, i] for i in range(5)]
        assert one.truncated == sum(answer.is_truncated for answer in own) / 5
        assert one.mean_tokens == pytest.approx(sum(answer.n_tokens for answer in own) / 5)
        values = [answer.value for answer in own]
        judgements = tuple(Judgement(answer.verdict, answer.value, graded=answer.is_graded) for answer in own)
        group = Group(result.problems[0], 0, (), (), judgements)
        assert one.correct == n_right(group)
        assert (0 < one.correct < one.n) == group.is_mixed
        pairs = list(combinations(values, 4))
        mixed = sum(len(set(chosen)) > 1 for chosen in pairs) / len(pairs)
        assert mixed_fraction([one], 4) == pytest.approx(mixed)
        if group.is_graded:  # else all five were cut off
            assert one.as_json()["mean_value"] == pytest.approx(sum(values) / 5)
    assert 0.1 < summary(table)["pass_rate"] < 0.9
    line = summarise("toy", result.problems, result.answers, k=5)
    assert line["avg@k"] == 0  # nothing is called correct, and the mean value says why
    assert line["mean_value"] == pytest.approx(sum(a.value for a in result.answers.values()) / len(result.answers))


def test_a_function_is_tried_on_all_that_a_response_is_judged_with(model: Path, tmp_path: Path):
    (tmp_path / "asks.py").write_text("def reward(response, answer, meta): return bool(meta['question'])\n")
    plan = offline(model, verifier=f"{tmp_path}/asks.py:reward", k=1, max_response_tokens=2)
    assert len(run_offline_eval(plan).answers) == 40


OPTIONS = (
    "--k", "4", "--max-response-tokens", "12", "--max-prompt-tokens", "16", "--template", "raw", "--no-chat",
    "--verifier", "toy:contains", "--device", "cpu",
)  # fmt: skip


def probe(*arguments: str) -> Answer:
    return dapo("data", "probe", *arguments)


def test_the_command_writes_counts_and_a_selection(model: Path, tmp_path: Path):
    out, chosen = tmp_path / "probe.jsonl", tmp_path / "chosen.jsonl"
    arguments = ("toy:problems", "--model", str(model), *OPTIONS, "--out", str(out), "--json")
    answer = probe(*arguments, "--select", "0.25", "0.75", "--write", str(chosen))
    assert answer.returncode == 0, answer.stderr
    figures = json.loads(answer.stdout)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == figures["per_problem"]
    assert list(lines[0]) == ["id", "question", "n", "correct", "pass_rate", "mean_tokens", "truncated"]
    assert sum(row["problems"] for row in figures["histogram"]) == figures["problems"] == len(lines) == 40
    kept = [line["id"] for line in lines if 0.25 <= line["pass_rate"] <= 0.75]
    assert [problem.id for problem in load_problems(str(chosen), verifier="exact")] == kept
    assert figures["selected"] == len(kept)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--select", "0.1", "0.9"), "--write"),
        (("--write", "{tmp}/x.jsonl"), "--select"),
        (("--select", "0.9", "0.1", "--write", "{tmp}/x.jsonl"), "LOW <= HIGH"),
        (("--select", "0.1", "0.9", "--write", "{tmp}/taken.jsonl"), "exists already"),
        (("--out", "{tmp}/taken.jsonl"), "exists already"),
        (("--k", "0"), "--k"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(tmp_path: Path, arguments: tuple[str, ...], message: str):
    (tmp_path / "taken.jsonl").write_text("mine\n")
    typed = [argument.format(tmp=tmp_path) for argument in arguments]
    answer = probe("toy:problems", "--model", str(tmp_path / "none"), *typed)
    assert answer.returncode == 2
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr
    assert (tmp_path / "taken.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.jsonl", "--model", "{tmp}"), "nowhere.jsonl"),
        (("toy:problems", "--model", "{tmp}", "--verifier", "toy:contains"), "no config.json"),
        (("toy:problems", "--model", "{tmp}", "--template", "fancy"), "no such prompt template"),
    ],
)
def test_bad_sets_and_models_are_one_message(tmp_path: Path, arguments: tuple[str, ...], message: str):
    answer = probe(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert answer.returncode == 2
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr


# ---------------------------------------------------------------- seeding predictive selection


def write_counts(path: Path, counts: dict[str, tuple[int, int]]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "n": n, "correct": c}) + "\n" for i, (c, n) in counts.items()))
    return path


def test_counts_become_posteriors(tmp_path: Path):
    path = write_counts(tmp_path / "probe.jsonl", {"a": (8, 8), "b": (4, 8)})
    posteriors = Posteriors(counts=counts_in(path))
    assert posteriors.chance("a", 8) == pytest.approx(chance_mixed(9, 1, 8))
    assert posteriors.chance("b", 8) == pytest.approx(chance_mixed(5, 5, 8))
    with pytest.raises(ConfigError, match="no such file"):
        counts_in(tmp_path / "none.jsonl")
    path.write_text('{"id": "a", "n": 2, "correct": 3}\n')
    with pytest.raises(ConfigError, match="line 1 has no id, n and correct"):
        counts_in(path)


def test_a_run_starts_from_the_counts_and_resumes_without_the_file(tmp_path: Path):
    path = write_counts(tmp_path / "probe.jsonl", {f"toy-{i}": (8, 8) for i in range(30)})
    keys = ("preset=dapo-fast", f"sampling.posteriors={path}", "train.steps=1")
    run = start_run(toy.recipe(tmp_path, *keys, dtype="float32"), tmp_path / "run")
    assert run.posteriors.counts["toy-0"] == (8.0, 0.0)
    train(run)
    run.close()
    path.unlink()
    resumed = resume_run(tmp_path / "run")
    resumed.close()
    assert resumed.posteriors.counts == run.posteriors.counts


def test_in_a_mixture_the_counts_are_those_of_each_source_that_has_the_problem(tmp_path: Path):
    path = write_counts(tmp_path / "probe.jsonl", {"toy-3": (6, 8), "other": (1, 2)})
    mixture = "data.train={a={path='toy:problems', template='boxed'}, b={path='toy:problems', template='raw'}}"
    run = start_run(toy.recipe(tmp_path, "preset=dapo-fast", f"sampling.posteriors={path}", mixture), tmp_path / "run")
    run.close()
    assert run.posteriors.counts == {"a/toy-3": (6.0, 2.0), "b/toy-3": (6.0, 2.0)}


def test_in_a_mixture_a_problem_whose_own_id_has_a_slash_keeps_its_counts(tmp_path: Path):
    path = write_counts(tmp_path / "probe.jsonl", {"algebra/3": (6, 8)})
    config = toy.recipe(tmp_path, "preset=dapo-fast", f"sampling.posteriors={path}").config
    source = EncodedSet("a", "", (Problem("a/algebra/3", "?", ""),), ((1,),))
    mixture = replace(source, sources=(source,))
    assert first_posteriors(config, mixture).counts == {"a/algebra/3": (6.0, 2.0)}


def test_counts_of_other_problems_and_a_key_without_effect_are_refused(tmp_path: Path):
    path = write_counts(tmp_path / "probe.jsonl", {"other": (1, 2)})
    with pytest.raises(ConfigError, match="holds none of the problems"):
        start_run(toy.recipe(tmp_path, "preset=dapo-fast", f"sampling.posteriors={path}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"sampling\.posteriors: has no effect here"):
        load_recipe("quickstart", [f"sampling.posteriors={path}"])


# ---------------------------------------------------------------- borders


@pytest.mark.parametrize("n", [1, 2, 4, 5, 6, 11])
def test_border_every_problem_is_in_the_one_bin_its_pass_rate_lies_in(n: int):
    """Five bins between never and always; a pass rate on a bin's edge is in the bin that begins there."""
    for correct in range(n + 1):
        (row,) = [row for row in histogram(seen(n, correct)) if row["problems"]]
        rate = Fraction(correct, n)
        if correct in (0, n):
            assert row["from"] == row["to"] == rate
        else:
            assert Fraction(row["from"]).limit_denominator(5) <= rate < Fraction(row["to"]).limit_denominator(5)
    assert sum(row["problems"] for row in histogram(seen(n, *range(n + 1)))) == n + 1


@pytest.mark.parametrize("n", [1, 19, 20, 21, 41])
def test_border_problems_beyond_the_table_are_counted(n: int, capsys: pytest.CaptureFixture[str]):
    table = seen(2, *[1] * n)
    data_probe.show({"set": "s", "k": 2, "dropped_prompts": 0} | summary(table), table)
    printed = capsys.readouterr().out
    shown = [line.split()[0] for line in printed.splitlines() if "question" in line and line.startswith("p")]
    assert shown == [f"p{i}" for i in range(min(n, 20))]
    assert ("more: --json" in printed) == (n > 20)
    assert n <= 20 or f"and {n - 20} more" in printed


@pytest.mark.parametrize("n", [1, 3, 4, 5, 9])
def test_border_selection_takes_both_bounds_in(n: int):
    """Pass rates 0, 1/n, …, 1: from one of them to another are all between, in their order."""
    table = seen(n, *range(n + 1))
    problems = [Problem(one.id, "", "") for one in table]
    for low in range(n + 1):
        for high in range(low, n + 1):
            kept = select(problems, table, low / n, high / n)
            assert kept == problems[low : high + 1]
