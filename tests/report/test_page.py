"""The page from a run folder alone: what it shows, what it says when something is missing, and that text stays text."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_runs import byte_level, evaluation, metrics, row, save_tokenizer, write_rollouts, write_run

from command_line import dapo
from dapo.config.load import load_recipe, to_toml
from dapo.errors import DataError
from dapo.report import page_data
from dapo.report.examined import examine_run
from dapo.report.load import load_run
from dapo.report.page import SCRIPTS, asset, write_page
from dapo.report.page_data import read_overlay
from dapo.report.rollouts.chunks import parse_script
from dapo.tracking.metrics import METRICS

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> \u202e\u2028\x00<!--"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten steps, two evaluations with their problems, two recorded steps, everything with hostile text in it."""
    folder = tmp_path / "run"
    evaluations = [evaluation(0, 0.25, set=HOSTILE), evaluation(10, 0.75, set=HOSTILE, by_source={"__proto__": 0.5})]
    write_run(folder, metrics(10), evaluations=evaluations, every=5)
    pieces = save_tokenizer(folder, byte_level())
    for step in (5, 10):
        rows = [
            row(
                pieces,
                f"{HOSTILE} {step} {i}",
                problem=p,
                index=i,
                question=HOSTILE,
                verdict="WRONG" if i else "CORRECT",
            )
            for p in ("p1", "p2")
            for i in range(4)
        ]
        write_rollouts(folder, step, rows)
    with (folder / "eval_problems.jsonl").open("w") as file:
        for step, correct in ((0, [0, 8, 4]), (10, [8, 0, 4])):
            line = {
                "step": step,
                "set": HOSTILE,
                "k": 8,
                "ids": ["a", "b", "c"],
                "questions": [HOSTILE] * 3,
                "correct": correct,
            }
            file.write(json.dumps(line) + "\n")
    (folder / "events.jsonl").write_text(json.dumps({"step": 3, "kind": "sampling", "message": HOSTILE}) + "\n")
    return folder


def data_of(folder: Path) -> dict:
    return parse_script((folder / "report" / "data.js").read_text())


def test_the_page_lies_beside_its_scripts_and_knows_the_run(run: Path):
    page = write_page(run)
    assert page == run / "report.html"
    for name in (*SCRIPTS, "style.css", "plotly.min.js", "data.js", "history-0.js"):
        assert (run / "report" / name).stat().st_size > 0
    (shown,) = data_of(run)["runs"]
    assert (shown["state"], shown["step"], shown["steps"]) == ("finished", 10, 10)
    assert [line["avg"] for line in shown["evaluations"]] == [0.25, 0.75]
    assert shown["metrics"]["accuracy"][0] == 0.3
    assert shown["metrics"]["accuracy"][-1] == 0.7
    assert shown["missing"] == []
    assert [r["step"] for r in shown["rollouts"]] == [5, 10]
    assert {command.split()[1] for _, command in shown["commands"]} == {"resume", "eval", "export", "watch"}


def test_the_questions_of_a_newcomer_are_answered(run: Path):
    write_page(run)
    answers = {answer["name"]: answer for answer in data_of(run)["runs"][0]["answers"]}
    assert answers["learnt"]["answer"] == "Inconclusive"  # three problems, as many won as lost
    assert answers["entropy"]["answer"] == "No"
    assert answers["time"]["answer"].startswith("Rollout,")  # 4 s of 10, the updates as much
    assert answers["time"]["fractions"][0][1] == pytest.approx(0.4)
    assert answers["clipped"]["answer"] == "0.40% low, 0.20% high"
    assert answers["waste"]["answer"] == "40% of the tokens"  # 300 + 100 of 1000
    assert dict(answers["waste"]["fractions"])["all wrong"] == pytest.approx(0.3)
    assert answers["flips"]["answer"] == "1 learned, 1 lost"


def test_a_problem_can_be_followed_over_the_steps(run: Path):
    write_page(run)
    history = parse_script((run / "report" / "history-0.js").read_text())
    assert history["steps"] == [5, 10]
    assert dict(history["problems"])["p2"] == [[0, 1, 1, 4], [1, 1, 1, 4]]  # [which step, row, right, of]


def test_the_page_itself_holds_no_text_of_a_model_and_no_inline_script(run: Path):
    text = write_page(run).read_text()
    assert "alert" not in text
    assert "default-src 'none'" in text
    assert "'unsafe-eval'" not in text
    assert "script-src 'self' file:;" in text
    assert text.count("<script") == text.count('<script src="report/') == len(SCRIPTS) + 1
    for path in (run / "report").glob("*.js"):
        if path.name.startswith(("data", "history")):
            assert path.read_text(encoding="ascii").count("\n") == 1
            assert "\x00" not in path.read_text()


def test_no_script_of_ours_builds_markup_from_text():
    for name in SCRIPTS:
        for danger in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
        ):
            assert danger not in asset(name), f"{name}: {danger}"


def test_names_from_data_are_never_keys_of_the_page(run: Path):
    write_page(run)
    assert data_of(run)["runs"][0]["evaluations"][1]["by_source"] == [["__proto__", 0.5]]


def test_the_glossary_is_the_declaration_of_the_metrics(run: Path):
    write_page(run)
    for name, unit, meaning in data_of(run)["glossary"]:
        assert METRICS[name] == (unit, meaning)
    assert {name for name, _, _ in data_of(run)["glossary"]} == set(metrics(1)[0])


def test_the_docs_have_every_metric_as_it_is_declared():
    rows = [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in METRICS.items()]
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("| `")] == rows


# ------------------------------------------------------------------ what is missing


def test_a_torn_line_is_said_and_left_out(run: Path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "accu')
    write_page(run)
    (shown,) = data_of(run)["runs"]
    assert shown["missing"] == ["metrics.jsonl: line 11 is corrupt and left out"]
    assert shown["step"] == 10


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl"])
def test_a_missing_file_is_said(run: Path, name: str):
    (run / name).unlink()
    write_page(run)
    assert f"{name}: missing" in data_of(run)["runs"][0]["missing"]


def test_a_missing_or_torn_rollout_file_is_said(run: Path):
    (run / "rollouts" / "step-000005.parquet").unlink()
    (run / "rollouts" / "step-000010.parquet").write_bytes(b"PAR1 torn")
    write_page(run)
    missing = data_of(run)["runs"][0]["missing"]
    assert any("step-000005.parquet: missing" in text for text in missing)
    assert any("step-000010.parquet: cannot be read" in text for text in missing)


def test_parquet_alone_is_enough_and_scripts_alone_are_too(run: Path):
    write_page(run)
    first = data_of(run)["runs"][0]["rollouts"]
    assert len(first) == 2
    for path in (run / "rollouts").glob("*.parquet"):
        path.unlink()
    write_page(run)
    assert data_of(run)["runs"][0]["rollouts"] == first
    assert data_of(run)["runs"][0]["missing"] == []


def test_a_run_without_steps_and_one_without_anything(tmp_path: Path):
    write_run(tmp_path / "a", [])
    write_page(tmp_path / "a")
    assert "No step has finished" in data_of(tmp_path / "a")["runs"][0]["verdict"]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.toml").write_text("")
    write_page(tmp_path / "b")
    assert "metrics.jsonl: missing" in data_of(tmp_path / "b")["runs"][0]["missing"]


@pytest.mark.parametrize(
    "line", ['{"step": "x"}', "[]", "null", '{"step": 3, "accuracy": "high"}', '{"step": 3, "accuracy": null}']
)
def test_odd_lines_do_no_harm(run: Path, line: str):
    write_page(run)
    before = data_of(run)["runs"][0]["metrics"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with (run / "eval.jsonl").open("a") as file:
        file.write('{"step": 3, "avg@k": 1}\n')
    write_page(run)
    after = data_of(run)["runs"][0]["metrics"]
    n = len(before["step"])
    assert after["step"][:n] == before["step"]
    assert after["lr"][:n] == before["lr"]


def test_a_run_that_is_not_the_papers_algorithm_says_so(tmp_path: Path):
    write_run(tmp_path, metrics(3), config="[sampling]\ncarry_over = true\n")
    write_page(tmp_path)
    assert data_of(tmp_path)["runs"][0]["is_paper_algorithm"] is False


@pytest.mark.parametrize(
    ("preset", "key", "value", "is_papers"),
    [
        ("dapo", "sampling.schedule", "rounds", True),
        ("dapo-fast", "sampling.predictive", "false", False),
        ("dapo", "sampling.predictive", "true", False),
        ("dapo", "sampling.retire_above", "0.9", False),
        ("dapo", "rewards.control", "negated", False),
    ],
)
def test_the_report_and_the_config_have_one_rule_for_that(
    tmp_path: Path, preset: str, key: str, value: str, is_papers: bool
):
    config = load_recipe("quickstart", [f"preset={preset}", f"{key}={value}"]).config
    write_run(tmp_path, metrics(3))
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert config.is_paper_algorithm is load_run(tmp_path).is_paper_algorithm is is_papers


# ------------------------------------------------------------------ several runs, other lists, other curves


def test_several_runs_in_one_page(run: Path, tmp_path: Path):
    other = write_run(tmp_path / "a b" / "other", metrics(20))
    page = write_page(run, other, out=tmp_path / "both")
    assert page == tmp_path / "both" / "report.html"
    shown = data_of(tmp_path / "both")["runs"]
    assert [one["name"] for one in shown] == ["run", "other"]
    assert [one["place"] for one in shown] == ["../run/rollouts", "../a%20b/other/rollouts"]


def test_another_phrase_list_is_counted_anew(run: Path):
    write_page(run)
    assert data_of(run)["runs"][0]["rollouts"][0]["behaviour"]["doubt"] == 0
    (run / "phrases.toml").write_text('[en]\ndoubt = ["alert"]\n')
    write_page(run)
    assert data_of(run)["runs"][0]["rollouts"][0]["behaviour"]["doubt"] == 8


def test_curves_to_overlay(tmp_path: Path):
    path = tmp_path / "fig.csv"
    path.write_text("metric,step,value,label\npolicy/entropy,1,0.5,paper\npolicy/entropy,2,0.4,paper\navg@k,1,0.3,\n")
    curves = read_overlay(path)
    assert curves[0] == {"metric": "policy/entropy", "label": "paper", "x": [1.0, 2.0], "y": [0.5, 0.4]}
    assert curves[1]["label"] == "fig"  # without a label, the name of the file
    path.write_text("metric,step,value\nnonsense,1,2\n")
    with pytest.raises(DataError, match="nonsense"):
        read_overlay(path)
    path.write_text("metric,step,value\naccuracy,one,2\n")
    with pytest.raises(DataError, match="line 2"):
        read_overlay(path)


# ------------------------------------------------------------------ the command


def test_the_old_name_of_the_overlay_names_the_new_one(run: Path):
    answer = dapo("report", str(run), "--beside", "fig.csv")
    assert answer.returncode == 2
    assert "Use --overlay fig.csv." in answer.stderr
    assert "--beside" not in dapo("report", "--help").stdout


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="is not a run"):
        write_page(tmp_path)
    for verb in ("report", "doctor", "watch"):
        answer = dapo(verb, str(tmp_path))
        assert answer.returncode == 2, verb
        assert "is not a run" in answer.stderr
        assert "Traceback" not in answer.stderr


def test_the_report_needs_no_torch(run: Path):
    code = (
        "import sys; from pathlib import Path; from dapo.report import serve, terminal;"
        "from dapo.report.page import write_page;"
        f"write_page(Path({str(run)!r})); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("n", [0, 1, 4, 5, 6, 11])
def test_border_what_the_page_leaves_out_is_counted(n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Problem i has i % 3 of 2 right, then 1: a third of them is learnt, a third lost, a third as before."""
    monkeypatch.setattr(page_data, "SHOWN_EVENTS", 5)
    monkeypatch.setattr(page_data, "SHOWN_FLIPS", 5)
    folder = write_run(tmp_path / "run", metrics(10))
    ids = [f"p{i}" for i in range(n)]
    lines = [
        {"step": step, "set": "s", "k": 2, "ids": ids, "questions": ids, "correct": correct}
        for step, correct in ((0, [i % 3 for i in range(n)]), (10, [1] * n))
    ]
    (folder / "eval_problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"step": 1, "kind": "note", "message": str(i)} for i in range(n)]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    data = page_data.run_data(examine_run(folder), "")
    assert (data["n_events"], [message for *_, message in data["events"]]) == (n, [str(i) for i in range(n)][-5:])
    assert data["n_flips"] == {"learnt": len(range(0, n, 3)), "lost": len(range(2, n, 3)), "same": len(range(1, n, 3))}
    by_change = sorted(range(n), key=lambda i: -abs(1 - i % 3))
    assert [flip["id"] for flip in data["flips"]] == [f"p{i}" for i in by_change][:5]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 7])
def test_border_every_missing_record_is_named_or_counted(n: int, tmp_path: Path):
    """Three are named one by one, more as a range with their number."""
    write_run(tmp_path / "run", metrics(max(n, 1)), every=1)
    if n == 0:
        (tmp_path / "run" / "rollouts" / "step-000001").mkdir(parents=True)
    told = [text for text in load_run(tmp_path / "run").missing if text.startswith("rollouts/")]
    if n <= 3:
        assert told == [f"rollouts/step-{i:06d}.parquet: missing, with its scripts" for i in range(1, n + 1)]
    else:
        assert told == [f"rollouts/step-000001.parquet … step-{n:06d}.parquet: {n} files missing, with their scripts"]
