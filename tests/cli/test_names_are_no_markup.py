"""Names that others chose (files, sources, sets, questions) are printed as they are, whatever signs they hold."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from dapo.cli import data, data_probe, eval
from dapo.cli.running import terminal as watch_terminal
from dapo.data.check import check
from dapo.evaluation.probe import Difficulty, summary

NAME = "a[/b] [bold]c[/bold] :smile:"
ROOT = Path(__file__).parents[2]


def test_a_source_in_the_table_of_an_evaluation(capsys: pytest.CaptureFixture[str]):
    scores = dict.fromkeys(("avg@k", "pass@k", "maj@k"), 0.5)
    intervals = {f"{name}_interval": [0.4, 0.6] for name in scores}
    shape = {"k": 1, "problems": 2, "unparseable": 0.0, "truncated": 0.0, "mean_tokens": 1.0, "dropped_prompts": 0}
    eval.print_table({**scores, **intervals, **shape, "faults": 3, "by_source": {NAME: 0.5, "d": 1.0}})
    written = capsys.readouterr().out
    assert NAME in written
    assert "3 responses aborted by the engine" in " ".join(written.split())


def test_a_folder_in_the_live_view(capsys: pytest.CaptureFixture[str]):
    view = watch_terminal.LiveView()
    config = SimpleNamespace(is_paper_algorithm=True, preset="dapo", train=SimpleNamespace(steps=3))
    view.on_start(SimpleNamespace(folder=Path(NAME), config=config, step=0))
    view.on_event("fault", NAME)
    view.close()
    assert capsys.readouterr().out.count(NAME) == 2


def test_a_problem_set_and_its_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "[bold]set :smile:.jsonl"
    path.write_text("".join(json.dumps({"question": f"{NAME} {i}", "answer": str(i)}) + "\n" for i in range(3)))
    data.show(check(str(path)))
    assert "[bold]set:smile:.jsonl" in "".join(capsys.readouterr().out.split())  # wherever the title wraps
    table = [Difficulty(NAME, NAME, 4, 2, 10.0, 0.0)]
    data_probe.show({"set": NAME, "k": 4, "dropped_prompts": 0, **summary(table)}, table)
    assert capsys.readouterr().out.count("a[/b] [bold]c[/bold]") == 3  # the set, the problem and its question


def test_every_console_of_a_verb_prints_text_as_it_is():
    """`explain` and `selfcheck` write markup of their own, and escape what is not theirs."""
    own = {"cli/explain/command.py", "cli/selfcheck.py", "cli/options/examination.py"}
    paths = [path for area in ("cli", "report") for path in (ROOT / "src" / "dapo" / area).glob("*.py")]
    wrong = [
        f"{path.name}: {call}"
        for path in paths
        if f"{path.parent.name}/{path.name}" not in own
        for call in re.findall(r"(?<!\w)Console\([^)]*\)", path.read_text())
        if "markup=False" not in call and "class Pipe" not in call
    ]
    assert wrong == []
