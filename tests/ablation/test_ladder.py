"""`dapo ladder` as a command: bad input, whole ladders of tiny runs, and what is left when it is stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_ladder import job, write_done
from toy import recipe_file

from dapo.ablation.run import claimed
from dapo.cli.main import main
from dapo.errors import ConfigError

TESTS = Path(__file__).parents[1]
SOURCES = [str(TESTS.parent / "src"), str(TESTS), str(TESTS / "trainer")]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["ladder", *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arms", "nonsense"], ("--arms nonsense", "There are: ladder, all, naive")),
        (["--seeds", "one"], ("--seeds one", "--seeds 0,1,2")),
        (["--budget", "5"], ("--budget 5", "steps=60")),
        (["--smoke", "--budget", "steps=5"], ("--budget steps=5", "Leave out one")),
        (["--table-only"], ("--table-only", "no run", "Leave out")),
        (["no-such-recipe"], ("no-such-recipe", "There are:")),
        (["dapo"], ("is a preset",)),
        (["--set", "train.lrr=1"], ("train.lrr", "train.lr")),
        (["--set", "train.seed=4"], ("train.seed", "--seeds")),
        (["--set", "preset=dapo"], ("preset", "--arms")),
        (["--set", "naive:preset=dapo"], ("preset", "--arms")),
        (["--arms", "dapo", "--set", "naive:train.lr=1"], ("naive:train.lr=1", "--arms")),
        (["--set", "naive:train.lrr=1"], ("train.lrr", "train.lr")),
        (["--budget", "steps=5", "--set", "train.steps=4"], ("train.steps", "--budget")),
        (["--set", "eval.every_steps=0"], ("eval.every_steps = 0", "above 0")),
    ],
)
def test_bad_input_is_refused_by_key_value_reason_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: tuple[str, ...]
):
    out = tmp_path / "out"
    error = refused(capsys, *arguments, "--out", str(out))
    assert all(part in error for part in said), error
    assert not out.exists()


def test_a_table_of_what_is_done_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    planned = [job(tmp_path, name, 0, "train.steps=4") for name in ("naive", "overlong-filter")]
    write_done(planned[0], {0: [0, 2], 4: [2, 3]})
    options = ["--arms", "naive,overlong-filter", "--seeds", "0", "--set", "train.steps=4", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(["ladder", *options, "--table-only", "--json"])
    assert ended.value.code == 0
    summary = json.loads(capsys.readouterr().out)
    assert [line["name"] for line in summary["arms"]] == ["naive"]
    assert (summary["missing"], summary["machine"]) == (["overlong-filter"], {})
    assert not planned[1].folder.exists()


def test_a_folder_belongs_to_one_ladder_at_a_time(tmp_path: Path):
    with claimed(tmp_path), pytest.raises(ConfigError, match="another ladder"), claimed(tmp_path):
        pass
    with claimed(tmp_path):
        pass


# ---------------------------------------------------------------- whole ladders


def toy_ladder(folder: Path, *more: str, steps: int = 2) -> list[str]:
    """A ladder of a random model on the toy task: runs of a second, after imports."""
    recipe, keys = recipe_file(folder)
    keys = [key for key in keys if not key.startswith(("data.eval", "eval.", "train.steps", "rollouts."))]
    keys += ["data.eval=['toy:problems']", f"eval.every_steps={steps}", "eval.k=2", f"train.steps={steps}"]
    sets = [part for key in keys for part in ("--set", key)]
    return [sys.executable, "-m", "dapo", "ladder", str(recipe), "--out", str(folder / "out"), *sets, *more]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(SOURCES), "OMP_NUM_THREADS": "1"}


def finish(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=1800)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_ladder_runs_writes_its_files_and_does_not_run_again_what_is_done(tmp_path: Path):
    command = toy_ladder(tmp_path, "--arms", "naive,dapo", "--seeds", "0", "--jobs", "2", "--json")
    first = finish(command, tmp_path)
    assert first.returncode == 0, first.stderr
    summary = json.loads(first.stdout)
    assert [line["name"] for line in summary["arms"]] == ["naive", "dapo"]
    out = tmp_path / "out"
    for name in ("ladder.json", "ladder.md", "ladder.svg", "ladder.html"):
        assert (out / name).is_file()
    config = (out / "dapo" / "seed-0" / "config.toml").read_text()  # an ordinary run: another verb can read it
    assert "dynamic = true" in config
    metrics = out / "naive" / "seed-0" / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    second = finish(command, tmp_path)
    assert second.returncode == 0
    assert metrics.stat().st_mtime_ns == before
    again = json.loads(second.stdout)
    assert again["arms"] == summary["arms"]
    changed = finish([*command, "--set", "train.lr=3e-3"], tmp_path)
    assert changed.returncode == 2
    assert "train.lr = 0.01 (now 0.003)" in changed.stderr


@pytest.mark.slow
def test_ctrl_c_leaves_runs_that_go_on_as_if_nothing_had_been(tmp_path: Path):
    command = toy_ladder(tmp_path, "--arms", "naive", "--seeds", "0", "--jobs", "1", steps=60)
    run = tmp_path / "out" / "naive" / "seed-0"
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 1800
    while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=1800)
    assert process.returncode == 130, error
    assert "the same command" in error
    stopped = len(lines(run / "metrics.jsonl"))
    assert 0 < stopped < 60
    done = finish(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == list(range(1, 61))
    assert f"resumed after step {stopped}" in (run / "events.jsonl").read_text()


@pytest.mark.slow
def test_a_run_that_cannot_start_ends_the_ladder_with_its_message(tmp_path: Path):
    command = toy_ladder(
        tmp_path, "--arms", "naive", "--seeds", "0,1", "--jobs", "1", "--set", f"model.path={tmp_path}/nowhere"
    )
    ended = finish(command, tmp_path)
    assert ended.returncode == 2
    assert f"{tmp_path}/nowhere" in ended.stderr
    assert "naive seed 0" in ended.stderr
    assert not (tmp_path / "out" / "naive" / "seed-1.log").exists()  # it would have failed in the same way
