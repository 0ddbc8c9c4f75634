"""Ranks that are killed, told to stop or given bad input: the run ends soon, says why once, and can go on."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from launch import children, environment, torchrun
from ranks import one_process
from test_torchrun import furthest, lines, weights, written
from toy import recipe_file

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
RANKS = str(Path(__file__).with_name("ranks.py"))
STEPS = ["train.steps=3"]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        one_process(folder, [{"name": "straight", "overrides": STEPS}])
    return folder


def end_of(process: subprocess.Popen[str], seconds: float) -> tuple[int, str, str]:
    """Exit status, output and errors, with nothing of it left running."""
    family = children(process.pid)
    out, err = process.communicate(timeout=seconds)
    left = [pid for pid in family if Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text()]
    assert not left, "a process was left behind"
    return process.returncode, out, err


# In the second of three steps (ticks 41 to 68): in the middle of sampling, or between the two updates.
@pytest.mark.parametrize(("rank", "phase", "n"), [(1, "fill", 50), (0, "fill", 50), (1, "update", 3)])
def test_a_killed_rank_ends_the_run_and_resume_goes_on_exactly(root: Path, rank: int, phase: str, n: int):
    name = f"killed-{rank}-{phase}"
    plan: dict[str, Any] = {"name": name, "overrides": [*STEPS, "cluster.shard=full"], "kill": [rank, phase, n]}
    process = torchrun(2, RANKS, str(root), json.dumps([plan]))
    while process.poll() is None and not (root / name / "metrics.jsonl").exists():
        time.sleep(0.2)
    code, _, err = end_of(process, 100)
    assert code != 0
    assert err.count("lost contact with another rank") <= 2  # the message, and its line in a traceback
    done = len(lines(root / name))
    assert 1 <= done < 3
    one_process(root, [{"name": name, "overrides": [], "resumes": True}])
    assert written(root / name) == written(root / "straight")
    assert furthest(weights(root / name), weights(root / "straight")) < 1e-9


def command_line(root: Path, *arguments: str) -> list[str]:
    path, keys = recipe_file(root / "llama-float64")
    sets = [part for key in [*keys, "cluster.backend=torchrun"] for part in ("--set", key)]
    return ["-m", "dapo", "train", str(path), *sets, *arguments]


def test_bad_input_is_said_once_without_a_traceback_of_ours(root: Path):
    code, out, err = end_of(torchrun(2, *command_line(root, "--out", str(root / "straight"))), 100)
    assert code != 0
    assert err.count("exists already.") == 1
    assert "[rank" not in err
    assert "Stopped" not in out


def test_a_signal_to_one_rank_stops_all_at_a_checkpoint(root: Path):
    run = root / "signalled"
    process = torchrun(2, *command_line(root, "--set", "train.steps=10000", "--out", str(run)))
    while process.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.2)
    ranks = [
        pid for pid in children(process.pid) if b"-u\0-m\0dapo\0train" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGUSR1)  # what Slurm sends ahead of the time limit
    code, out, _ = end_of(process, 100)
    assert code == 0
    done = len(lines(run))
    assert f"Stopped after step {done} of 10000. Go on: dapo resume {run}" in out
    assert (run / "checkpoints" / f"step-{done:06d}" / "MANIFEST.json").is_file()
