"""`dapo data prepare`: a whole cleaned set with its manifest, or nothing at all."""

import json
from pathlib import Path

import pytest

from dapo.chat_client import ChatServer, NoReply
from dapo.cli.main import main
from dapo.data import load_problems, sources
from dapo.data.contamination import EvaluationTexts, find_contamination
from dapo.data.prepare import clean as preparing
from dapo.data.prepare.integer_answers import Restated, with_answer
from dapo.data.prepare.journal import Journal
from dapo.data.prepare.restate import NotVerified
from dapo.data.whole_file import write_whole
from dapo.errors import DataError
from dapo.types import Problem

LONG = "A train leaves the town of {a} at noon and travels to the north for two hours; how far does it go at {n} mph?"


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main(["data", *argv])
    return exit.value.code or 0


@pytest.fixture
def dirty(write_jsonl) -> Path:
    rows = [
        ("What is 2 + 3?", "5", {"level": 1}),
        ("what is  2 + 3?", "5", {}),
        ("Which?", "1", {}),
        ("Which?", "2", {}),
        ("None?", None, {}),
        (LONG.format(a="Ayr", n=30), "60", {}),
        ("Half of one?", "\\frac{1}{2}", {"tests": [1, {"a": "\ud800"}]}),
    ]
    return write_jsonl([{"question": q, "answer": a, **more} for q, a, more in rows], "dirty.jsonl")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_cleaned_set_reads_back_as_it_was_cleaned(suffix, dirty, tmp_path, capsys):
    out = tmp_path / f"out{suffix}"
    assert run("prepare", str(dirty), "--out", str(out)) == 0
    cleaned, again = load_problems(str(dirty)), load_problems(str(out))
    assert [(p.id, p.question, p.answer, p.source, p.meta) for p in again] == [
        (p.id, p.question, p.answer, p.source, p.meta) for p in cleaned
    ]
    assert not again.drops
    manifest = json.loads((tmp_path / f"out{suffix}.manifest.json").read_text())
    assert manifest["problems"] == 3
    assert manifest["problems_sha256"] == cleaned.sha256
    assert manifest["dropped"] == {"duplicate": 1, "conflicting answers": 2, "no reference": 1}
    assert [(d["row"], d["why"]) for d in manifest["drops"]][:2] == [(2, "duplicate"), (3, "conflicting answers")]
    assert "3 problems" in capsys.readouterr().out


def test_evaluation_problems_are_taken_out(dirty, write_jsonl, tmp_path, capsys):
    """One in other white space, one with a single number changed: exact and n-gram."""
    rows = [{"question": "WHAT is 2 + 3?", "answer": "5"}, {"question": LONG.format(a="Ayr", n=50), "answer": "100"}]
    evaluation = write_jsonl(rows, "eval.jsonl")
    out = tmp_path / "out.jsonl"
    assert run("prepare", str(dirty), "--against", str(evaluation), "--out", str(out), "--json") == 0
    assert json.loads(capsys.readouterr().out)["dropped"]["contaminated"] == 2
    assert [p.question for p in load_problems(str(out))] == ["Half of one?"]
    details = [d["detail"] for d in json.loads(out.with_name("out.jsonl.manifest.json").read_text())["drops"]]
    assert any(detail.startswith("exact match") for detail in details)
    assert any(detail.startswith("n-gram match") for detail in details)


def test_the_share_is_of_the_evaluation_problems_ngrams():
    """20 words have 8 runs of 13; replacing the last word spoils exactly one of them."""
    words = [f"w{i}" for i in range(20)]
    texts = EvaluationTexts("eval", [" ".join(words)])
    changed = " ".join([*words[:-1], "other"])
    found = find_contamination([changed, "nothing alike"], texts, share=7 / 8).found
    assert [(one.index, one.how, one.share) for one in found] == [(0, "n-gram", 7 / 8)]
    assert not find_contamination([changed], texts, share=0.9, near=False).found


def test_integer_answers_without_a_server(dirty, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert run("prepare", str(dirty), "--out", str(out), "--integer-answers", "--json") == 0
    assert json.loads(capsys.readouterr().out)["restated"] == 1
    assert [p.answer for p in load_problems(str(out))] == ["5", "60", "3"]
    assert not out.with_name("out.jsonl.journal.jsonl").exists()


def test_nothing_is_overwritten(dirty, tmp_path, capsys):
    out, manifest = tmp_path / "out.jsonl", tmp_path / "out.jsonl.manifest.json"
    for existing in (out, manifest):
        existing.write_text("mine")
        assert run("prepare", str(dirty), "--out", str(out)) == 2
        assert f"{existing}: exists already" in capsys.readouterr().err
        assert existing.read_text() == "mine"
        existing.unlink()
    assert run("prepare", str(dirty), "--out", str(tmp_path / "no" / "out.jsonl")) == 2
    assert run("prepare", str(dirty), "--out", str(tmp_path / "out.csv")) == 2
    assert sorted(tmp_path.iterdir()) == [dirty]


@pytest.mark.parametrize("broken", ["write_problems", "describe", "write_json"])
def test_a_failure_leaves_nothing(broken, dirty, tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preparing, broken, fail)
    with pytest.raises((DataError, OSError)):
        preparing.prepare(str(dirty), tmp_path / "out.jsonl")
    assert sorted(tmp_path.iterdir()) == [dirty]


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def interrupted(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "out", interrupted)
    assert not list(tmp_path.iterdir())


def test_a_file_made_meanwhile_is_kept(tmp_path):
    def slow(path: Path) -> None:
        path.write_text("ours")
        (tmp_path / "out").write_text("theirs")

    with pytest.raises(DataError, match="exists already"):
        write_whole(tmp_path / "out", slow)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["theirs"]


def test_check_prints_a_table_or_json(dirty, write_jsonl, capsys):
    evaluation = write_jsonl([{"question": "What is 2+3?", "answer": "5"}], "eval.jsonl")
    assert run("check", str(dirty), "--against", str(evaluation)) == 0
    table = capsys.readouterr().out
    assert "conflicting answers" in table
    assert "1 (row 3) / 2 (row 4): Which?" in table
    assert run("check", str(dirty), "--against", str(evaluation), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["distinct"], report["duplicate_rows"], report["usable"]) == (7, 5, 2, 3)
    assert report["no_reference"] == [5]
    assert report["answer_types"] == {"integer": 5, "fraction": 1}
    assert report["contamination"][0]["found"][0]["how"] == "loose"


def test_check_counts_tokens(dirty, tmp_path, capsys):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>").save_pretrained(tmp_path / "model")
    options = ["--tokenizer", str(tmp_path / "model"), "--template", "raw", "--max-prompt-tokens", "5", "--json"]
    assert run("check", str(dirty), *options) == 0
    report = json.loads(capsys.readouterr().out)
    lengths = sorted(len(p.question.split()) for p in load_problems(str(dirty)))
    assert (report["prompt_tokens"]["min"], report["prompt_tokens"]["max"]) == (lengths[0], lengths[-1])
    assert report["over_limit"] == sum(n > 5 for n in lengths)
    assert run("check", str(dirty), "--max-prompt-tokens", "5") == 2
    assert run("check", str(dirty), "--tokenizer", str(tmp_path / "none")) == 2


def test_data_and_its_verb_import_without_torch():
    import subprocess
    import sys

    code = "import sys, dapo.data, dapo.cli.data; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_reader_who_has_seen_enough_is_no_error(write_jsonl):
    import subprocess
    import sys

    path = write_jsonl(
        [{"question": "q?", "answer": "1"}, {"question": "Q?", "answer": "2"}, {"question": "r?", "answer": "2"}]
    )
    shell = f"set -o pipefail; {sys.executable} -m dapo data check {path} | true"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hub", "why"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_without_a_network_a_known_name_says_what_to_do(hub, why, tmp_path):
    import os
    import subprocess
    import sys

    environment = {**os.environ, **hub, "HF_HOME": str(tmp_path)}
    environment.pop("DAPO_DATA", None)
    command = [sys.executable, "-m", "dapo", "data", "check", "math500"]
    done = subprocess.run(command, capture_output=True, check=False, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"DataError: HuggingFaceH4/MATH-500: split test could not be loaded from the hub: {why}"
    )
    assert "DAPO_DATA" in done.stderr


def test_a_data_set_of_the_cache_says_itself_what_it_lacks(monkeypatch):
    import datasets

    def load_dataset(*_arguments, **_options):
        raise ValueError("Unknown split \"exam\". Should be one of ['train'].")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "why_offline", lambda: "HF_HUB_OFFLINE is set, so the hub is not asked")
    with pytest.raises(DataError, match='Unknown split "exam"'):
        next(sources.hub_rows("owner/name", config=None, split="exam", revision=None))


# ------------------------------------------------------------------ problems held out


@pytest.fixture
def forty(write_jsonl) -> Path:
    """Forty problems, most too short to have a template; two have one, and differ in one number."""
    towns = ["Ayr", "Bude", "Corby", "Deal"]
    rows = [{"question": f"Reckon {n} times {n * n + 7}.", "answer": str(n)} for n in range(38)]
    return write_jsonl(
        rows + [{"question": LONG.format(a=towns[0], n=n), "answer": str(n)} for n in (30, 50)], "f.jsonl"
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_held_out_problems_are_in_a_file_of_their_own_and_nowhere_else(suffix, forty, tmp_path, capsys):
    out, held_out = tmp_path / f"train{suffix}", tmp_path / f"train.held-out{suffix}"
    assert run("prepare", str(forty), "--hold-out", "12", "--out", str(out)) == 0
    everything, train, held = (load_problems(str(path)) for path in (forty, out, held_out))
    assert len(held) == 12
    assert not {p.id for p in train} & {p.id for p in held}
    assert {p.id for p in train} | {p.id for p in held} <= {p.id for p in everything}
    assert not find_contamination([p.question for p in train], EvaluationTexts("", [p.question for p in held])).found
    manifest = json.loads((tmp_path / f"train{suffix}.manifest.json").read_text())
    assert manifest["held_out"]["problems"] == 12
    assert manifest["problems"] == len(train)
    printed = capsys.readouterr().out
    assert f"data.train={out}" in printed
    assert f'data.eval=["{held_out}"]' in printed


def test_a_near_duplicate_of_a_held_out_problem_is_not_trained_on(forty, tmp_path):
    """However many are held out: never one of the two trains in each file."""
    lonely = 0
    for n in range(5, 38, 4):
        out = tmp_path / f"{n}.jsonl"
        prepared = preparing.prepare(str(forty), out, n_held=n)
        trains = [
            sum("train leaves" in p.question for p in load_problems(str(path))) for path in (out, prepared.held_out)
        ]
        assert 0 in trains
        lonely += trains == [0, 1]
        assert prepared.problems.dropped.get("contaminated", 0) == (trains == [0, 1])
    assert lonely  # or nothing was tested


ONE_TEMPLATE = "{name} has {a} {what} and buys {b} more at the market. How many {what} does {pronoun} have now?"
PEOPLE = [("Tom", "he"), ("Anna", "she"), ("Mary Ann", "she"), ("Mark", "he"), ("Zoë", "they"), ("Tuan", "he")]


@pytest.fixture
def near_duplicates(write_jsonl) -> Path:
    """120 problems made from one template, among thirty that were not."""
    rows = [
        ONE_TEMPLATE.format(name=name, pronoun=pronoun, a=f"{a * 700:,}", b=a + 2, what="apples")
        for a in range(20)
        for name, pronoun in PEOPLE
    ]
    others = [
        f"In year {n} of its {kind} the {thing} was sold {how}; by what share did its price rise after that?"
        for n, (kind, thing, how) in enumerate(
            (f"kind{i}", f"thing{i % 5} of wood{i}", f"twice in town{i} and once at sea{i}") for i in range(30)
        )
    ]
    return write_jsonl(
        [{"question": q, "answer": str(at)} for at, q in enumerate(rows + others)], "near-duplicates.jsonl"
    )


def test_of_problems_made_from_one_template_none_is_trained_on_beside_those_held_out(near_duplicates, tmp_path, capsys):
    out = tmp_path / "train.jsonl"
    assert run("prepare", str(near_duplicates), "--hold-out", "20", "--out", str(out)) == 0
    train, held = load_problems(str(out)), load_problems(str(out.with_name("train.held-out.jsonl")))
    n_held = sum("apples" in p.question for p in held)
    assert n_held
    assert not any("apples" in p.question for p in train)
    assert len(train) == 30 - (20 - n_held)
    printed = capsys.readouterr().out
    assert f"20 problems held out; {120 - n_held} others resemble one of them and were dropped." in printed
    assert "up to numbers and names" in printed
    assert " of 130 problems match a problem held out up to numbers and names, such as" in printed
    assert "keep them: --keep-near-duplicates" in printed
    manifest = json.loads((tmp_path / "train.jsonl.manifest.json").read_text())
    assert manifest["held_out"]["resembling_dropped"] == 120 - n_held
    drop = next(drop for drop in manifest["drops"] if drop["detail"].startswith("near-duplicate match"))
    assert "apples" in drop["detail"]  # the evidence: the problem held out


def test_near_duplicates_stay_where_they_are_asked_for(near_duplicates, tmp_path, capsys):
    """A set made from one template alone cannot be split otherwise: refused with the option that does it."""
    alike = tmp_path / "alike.jsonl"
    alike.write_text(
        "".join(line for line in near_duplicates.read_text().splitlines(keepends=True) if "apples" in line)
    )
    out = tmp_path / "a b.jsonl"
    assert run("prepare", str(alike), "--hold-out", "20", "--out", str(out)) == 2
    error = capsys.readouterr().err
    assert "every problem resembles one of the 20 held out" in error
    assert "--keep-near-duplicates" in error
    assert run("prepare", str(alike), "--hold-out", "20", "--keep-near-duplicates", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert len(load_problems(str(out))) > 20
    assert "numbers and names" not in printed  # nobody looked for them
    assert f"--set 'data.train={out}'" in printed
    assert run("prepare", str(alike), "--keep-near-duplicates", "--out", str(tmp_path / "c.jsonl")) == 2
    assert "no effect without --hold-out or --against" in capsys.readouterr().err


def test_check_counts_near_duplicates_of_an_evaluation_set(near_duplicates, write_jsonl, capsys):
    person = {"question": ONE_TEMPLATE.format(name="Ute", pronoun="she", a=3, b=400, what="apples"), "answer": "7"}
    evaluation = write_jsonl([person], "eval.jsonl")
    assert run("check", str(near_duplicates), "--against", str(evaluation)) == 0
    table = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "exact 0, loose 0, 13-gram 0, near-duplicate 120: 1 of its 1 problems" in table


def test_the_same_problems_are_held_out_again(forty, tmp_path):
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    held = [preparing.prepare(str(forty), out, n_held=9).held_out.read_bytes() for out in files]
    assert held[0] == held[1]


def test_holding_out_everything_is_refused_and_leaves_nothing(forty, tmp_path, capsys):
    assert run("prepare", str(forty), "--hold-out", "40", "--out", str(tmp_path / "none" / "x.jsonl")) == 2
    out = tmp_path / "x.jsonl"
    assert run("prepare", str(forty), "--hold-out", "40", "--out", str(out)) == 2
    assert "cannot hold out 40 of 40" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [forty.name]


def test_a_failure_after_the_first_file_takes_it_back(forty, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "describe", None)
    with pytest.raises(TypeError, match="not callable"):
        preparing.prepare(str(forty), tmp_path / "x.jsonl", n_held=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [forty.name]


def test_an_existing_held_out_file_is_not_overwritten(forty, tmp_path):
    mine = tmp_path / "x.held-out.jsonl"
    mine.write_text("mine")
    with pytest.raises(DataError, match="exists already"):
        preparing.prepare(str(forty), tmp_path / "x.jsonl", n_held=3)
    assert mine.read_text() == "mine"


def test_a_set_made_meanwhile_by_another_is_kept(forty, tmp_path, monkeypatch):
    out = tmp_path / "x.jsonl"
    load = preparing.load_problems

    def load_slowly(*arguments, **options):
        problems = load(*arguments, **options)
        out.write_text("theirs")
        return problems

    monkeypatch.setattr(preparing, "load_problems", load_slowly)
    with pytest.raises(DataError, match="exists already"):
        preparing.prepare(str(forty), out, n_held=3)
    assert out.read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([forty.name, out.name])


# ------------------------------------------------------------------ borders


@pytest.mark.parametrize("n_words", [1, 12, 13, 14, 27])
def test_border_a_question_of_one_run_of_words_is_found_in_a_longer_one(n_words):
    """A run has 13 words; what is shorter matches as a whole only."""
    question = " ".join(f"w{i}" for i in range(n_words))
    texts = EvaluationTexts("eval", [question])
    assert find_contamination([question], texts).count("exact") == 1
    assert find_contamination([f"first {question} last"], texts).count("n-gram") == (n_words >= 13)


@pytest.mark.parametrize("n_problems", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n_known", [0, 1, 3])
def test_border_every_problem_is_asked_once_and_gets_its_own_restatement(n_problems, n_known, tmp_path, monkeypatch):
    """By three at a time, some of them answered by an earlier attempt; every second one is not verified."""
    asked = []

    def ask(problem, _server):
        asked.append(problem.id)
        if int(problem.id) % 2:
            raise NotVerified(f"not {problem.id}")
        return Restated(with_answer(problem, f"{problem.question}!", int(problem.id)), "k", "k", {"k": 1})

    monkeypatch.setattr(preparing, "ask_for_restatement", ask)
    monkeypatch.setattr(preparing, "cannot_verify", lambda _problem: None)
    problems = [Problem(str(i), f"{i}?", "x") for i in range(n_problems)]
    server, path = ChatServer("http://127.0.0.1:9", "tiny"), tmp_path / "journal.jsonl"
    for some in (problems[:n_known], problems):
        outcomes = preparing.ask_all(some, server, path, "digest", n_workers=3)
        told = [one if isinstance(one, str) else one.problem.answer for one in outcomes]
        assert told == [f"not {p.id}" if int(p.id) % 2 else p.id for p in some]
    assert sorted(asked) == [problem.id for problem in problems]


@pytest.mark.parametrize("n_problems", [1, 3, 4, 5, 9])
def test_border_a_dead_server_is_asked_so_often_and_nothing_that_came_is_lost(n_problems, tmp_path, monkeypatch):
    asked, is_up = [], False

    def ask(problem, _server):
        asked.append(problem.id)
        if is_up:
            raise NotVerified("no")
        raise NoReply("HTTP 503")

    monkeypatch.setattr(preparing, "ask_for_restatement", ask)
    monkeypatch.setattr(preparing, "GIVE_UP_AFTER", 4)
    problems = [Problem(str(i), f"{i}?", "x") for i in range(n_problems)]
    server, journal = ChatServer("http://127.0.0.1:9", "tiny"), Journal(tmp_path / "journal.jsonl", {})
    with pytest.raises(DataError, match=f"no reply for {n_problems} of {n_problems}"):
        preparing.fill_journal(problems, server, journal, n_workers=1)
    assert asked == [problem.id for problem in problems][:4]
    is_up = True
    assert list(preparing.fill_journal(problems, server, journal, n_workers=1)) == [p.id for p in problems]
