"""Nothing is written through a link that lies in the folder of a run, by any command."""

from pathlib import Path

import pytest
from fake_runs import byte_level, metrics, row, save_tokenizer, write_rollouts, write_run

from command_line import dapo
from dapo.ablation.arms import choose_arms
from dapo.ablation.plan import ArmBudget, plan_jobs
from dapo.ablation.run import claimed
from dapo.config.load import load_recipe, to_toml
from dapo.errors import ConfigError, DapoError
from dapo.files import append_line, replace_file


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with a file of the user's, where links lead to."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("data.js", "base.js", "notes.txt"):
        (folder / name).write_text("mine")
    return folder


def is_untouched(mine: Path) -> bool:
    return {p.name: p.read_text() for p in mine.iterdir()} == dict.fromkeys(("data.js", "base.js", "notes.txt"), "mine")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", metrics(5), wanted=20, every=5)
    pieces = save_tokenizer(folder, byte_level())
    write_rollouts(folder, 5, [row(pieces, "the answer", index=i) for i in range(3)])
    return folder


def test_a_report_is_not_written_through_a_linked_folder(run, mine):
    (run / "report").symlink_to(mine)
    answer = dapo("report", str(run))
    assert answer.returncode == 2
    assert "is a link" in answer.stderr
    assert is_untouched(mine)


def test_a_report_is_not_written_through_linked_rollouts(run, mine):
    (run / "rollouts").rename(run.parent / "aside")
    (run / "rollouts").symlink_to(mine)
    assert dapo("report", str(run)).returncode == 2
    assert is_untouched(mine)


@pytest.mark.parametrize("name", ["report.html", "report/data.js", "report/plotly.min.js", "rollouts/step-000005"])
def test_a_report_takes_the_place_of_a_link(name, run, mine):
    (run / "report").mkdir()
    (run / name).symlink_to(mine if name.startswith("rollouts") else mine / "notes.txt")
    assert dapo("report", str(run)).returncode == 0
    assert not (run / name).is_symlink()
    assert is_untouched(mine)


def test_a_name_written_aside_that_is_a_link_is_not_followed(tmp_path, mine, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda _n: "0")
    (tmp_path / ".file.0.tmp").symlink_to(mine / "notes.txt")
    replace_file(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"
    assert is_untouched(mine)


def test_lines_are_not_appended_through_a_link(tmp_path, mine):
    (tmp_path / "metrics.jsonl").symlink_to(mine / "notes.txt")
    with pytest.raises(DapoError, match=r"metrics\.jsonl: cannot be written"):
        append_line(tmp_path / "metrics.jsonl", {"step": 1})
    assert is_untouched(mine)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoints", "rollouts", "tensorboard"])
def test_a_run_does_not_go_on_where_its_folders_are_links(name, tmp_path, mine):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(load_recipe("quickstart", []).config))
    (folder / name).symlink_to(mine)
    answer = dapo("resume", str(folder))
    assert answer.returncode == 2
    assert "is a link" in answer.stderr
    assert is_untouched(mine)


@pytest.mark.parametrize("name", ["naive", "naive/seed-0", "naive/seed-0.log"])
def test_a_ladder_does_not_go_on_through_links(name, tmp_path, mine):
    (tmp_path / "ladder" / name).parent.mkdir(parents=True)
    (tmp_path / "ladder" / name).symlink_to(mine)
    with pytest.raises(ConfigError, match="is a link"):
        plan_jobs("ladder", choose_arms("naive"), (0,), ArmBudget(), (), tmp_path / "ladder")


def test_a_ladders_lock_is_no_link(tmp_path, mine):
    (tmp_path / ".lock").symlink_to(mine / "new")
    with pytest.raises(ConfigError, match="cannot be written"), claimed(tmp_path):
        pass
    assert is_untouched(mine)
