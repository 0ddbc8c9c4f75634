"""Ranks that are killed, told to stop or given bad input: the run ends soon, says why once, and can go on."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from launch import TESTS, children, environment, torchrun
from ranks import one_process
from test_torchrun import furthest, lines, weights, written
from toy import recipe_file

from dapo.checkpoints.load import newest_intact

pytestmark = pytest.mark.distributed
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


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, output and errors, with nothing of it left running."""
    family = children(process.pid)
    out, err = process.communicate(timeout=1800)
    left = [pid for pid in family if Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text()]
    assert not left, "a process was left behind"
    return process.returncode, out, err


# In the second of three steps (ticks 41 to 68): in the middle of sampling, between the two updates, inside of the
# second one's backward pass; or while the checkpoint of the first step is written.
@pytest.mark.parametrize(
    ("rank", "phase", "n"),
    [(1, "sampling", 50), (0, "sampling", 50), (1, "update", 3), (1, "backward", 4), (1, "save", 2)],
)
def test_a_killed_rank_ends_the_run_and_resume_goes_on_exactly(root: Path, rank: int, phase: str, n: int):
    name = f"killed-{rank}-{phase}"
    plan: dict[str, Any] = {"name": name, "overrides": [*STEPS, "cluster.shard=full"], "kill": [rank, phase, n]}
    process = torchrun(2, RANKS, str(root), json.dumps([plan]))
    while process.poll() is None and not (root / name / "metrics.jsonl").exists():
        time.sleep(0.2)
    code, _, err = end_of(process)
    assert code != 0
    assert err.count("lost contact with another rank") <= 2  # the message, and its line in a traceback
    done = len(lines(root / name))
    assert 1 <= done < 3
    if phase == "save":
        newest, skipped = newest_intact(root / name / "checkpoints")
        assert newest == root / name / "checkpoints" / "step-000000"
        assert not skipped
    goes_on_exactly(root, name)


def goes_on_exactly(root: Path, name: str) -> None:
    """Resumed by one process, it ends as the run that nobody disturbed: no response lost, none trained on twice."""
    one_process(root, [{"name": name, "overrides": [], "resumes": True}])
    assert written(root / name) == written(root / "straight")
    assert furthest(weights(root / name), weights(root / "straight")) < 1e-9


def test_a_rank_that_sends_garbage_stops_the_run_by_name_and_nobody_trains_on_it(root: Path):
    plan: dict[str, Any] = {"name": "garbage", "overrides": STEPS, "garble": [1, 20]}
    code, _, err = end_of(torchrun(2, RANKS, str(root), json.dumps([plan])))
    assert code != 0
    assert "rank 1 sent responses that cannot be true: response" in err
    assert "has a token outside of the vocabulary" in err
    assert len(lines(root / "garbage")) < 3
    goes_on_exactly(root, "garbage")


@pytest.fixture(scope="module")
def finished(root: Path) -> Path:
    """Runs that end well, by one start: a rank with a third of the memory, collectives by way of the host, a resume."""
    plans: list[dict[str, Any]] = []
    for shard in ("full", "none"):
        keys = [*STEPS, f"cluster.shard={shard}"]
        short = [*keys, "train.tokens_per_microbatch=60"]
        plans.append({"name": f"short-{shard}", "overrides": short, "memory": [1, 20]})
        plans.append({"name": f"staged-{shard}", "overrides": keys, "stages": True})
    sharded = [*STEPS, "cluster.shard=full"]
    plans.append({"name": "sharded", "overrides": sharded})
    plans.append({"name": "half", "overrides": [*sharded, "train.steps=2"]})
    plans.append({"name": "half", "overrides": STEPS, "resumes": True})
    code, _, err = end_of(torchrun(2, RANKS, str(root), json.dumps(plans)))
    assert code == 0, err
    return root


@pytest.mark.parametrize("shard", ["full", "none"])
def test_a_rank_with_a_third_of_the_memory_only_makes_the_micro_batches_smaller(finished: Path, shard: str):
    """It runs out of memory on micro-batches that the other one has room for: both go on with a quarter of them."""
    run = finished / f"short-{shard}"
    assert written(run) == written(finished / "straight")
    assert furthest(weights(run), weights(finished / "straight")) < 1e-9
    assert len(run.with_suffix(".shortages").read_text().split()) >= 2  # from 60 to 30, and from 30 to 15
    if shard == "full":  # else it is rank 1's own business, and the first rank writes the events
        told = (run / "events.jsonl").read_text()
        assert "rank 1: Tried to allocate" in told
        assert "tokens_per_microbatch 60 -> 30" in told
        assert "tokens_per_microbatch 30 -> 15" in told


@pytest.mark.parametrize("shard", ["full", "none"])
def test_collectives_by_way_of_the_host_change_nothing(finished: Path, shard: str):
    """As for ranks that share a card; here the tensors are on the host already."""
    run = finished / f"staged-{shard}"
    assert written(run) == written(finished / "straight")
    assert furthest(weights(run), weights(finished / "straight")) < 1e-9


def test_five_kills_of_one_of_two_ranks_lose_no_prompt(tmp_path: Path):
    program = [sys.executable, str(TESTS / "trainer" / "kill_runs.py"), str(tmp_path), "5"]
    done = subprocess.run(program, env={**environment(), "RANKS": "2"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [run["is_same"] for run in runs] == [True] * 5
    assert sum(run["code"] == -signal.SIGKILL for run in runs) >= 4
    assert {run["resumed_by"] for run in runs} == {1, 2}


def test_a_rank_ten_times_slower_changes_nothing_but_the_time(root: Path):
    """Stopped and let go by turns: it has a tenth of the time the other one has."""
    plan: dict[str, Any] = {"name": "slow", "overrides": STEPS}
    process = torchrun(2, RANKS, str(root), json.dumps([plan]))
    while process.poll() is None and not (root / "slow" / "config.toml").exists():
        time.sleep(0.1)
    slow = next(
        pid for pid in children(process.pid) if b"ranks.py" in command_of(pid) and environment_of(pid, "RANK=1")
    )
    n_pauses = 0
    while process.poll() is None:
        for number, seconds in ((signal.SIGSTOP, 0.45), (signal.SIGCONT, 0.05)):
            with suppress(ProcessLookupError):
                os.kill(slow, number)
            time.sleep(seconds)
        n_pauses += 1
    assert end_of(process)[0] == 0
    assert n_pauses > 3
    for line, expected in zip(lines(root / "slow"), lines(root / "straight"), strict=True):
        assert line == pytest.approx(expected, abs=1e-9)
    assert written(root / "slow") == written(root / "straight")
    assert furthest(weights(root / "slow"), weights(root / "straight")) < 1e-9


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def environment_of(pid: int, variable: str) -> bool:
    return variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


# Whole, 297 kB of state are the first rank's to write; in slices, 149 kB are the second one's.
@pytest.mark.parametrize(("shard", "rank", "limit"), [("none", 0, 200_000), ("full", 1, 100_000)])
def test_a_full_disk_stops_the_run_by_name_and_the_older_checkpoint_is_intact(
    root: Path, shard: str, rank: int, limit: int
):
    """No file of one rank may grow beyond a limit any more, which a checkpoint needs."""
    run = root / f"disk-{shard}"
    sets = [part for key in [*STEPS, f"cluster.shard={shard}"] for part in ("--set", key)]
    process = torchrun(2, *command_line(root, *sets, "--out", str(run)))
    while process.poll() is None and not (run / "checkpoints" / "step-000000").exists():  # without moments: small
        time.sleep(0.02)
    full = next(
        pid for pid in children(process.pid) if b"dapo" in command_of(pid) and environment_of(pid, f"RANK={rank}")
    )
    resource.prlimit(full, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    code, _, err = end_of(process)
    assert code != 0
    assert re.search(rf"DiskError: {run}/checkpoints/step-00000[12]: cannot be written: .*[Ff]ile too large", err)
    assert err.count(f"resume from the newest checkpoint: dapo resume {run}") == 1
    assert "DiskError" in err.split("Traceback")[0]  # torchrun's own, about a process that ended badly
    newest, skipped = newest_intact(run / "checkpoints")
    assert newest is not None
    assert not skipped
    assert not list((run / "checkpoints").glob(".*"))  # half of a checkpoint would keep the disk full
    goes_on_exactly(root, run.name)


def test_on_the_same_ranks_a_sharded_run_goes_on_bit_for_bit(finished: Path):
    assert furthest(weights(finished / "half"), weights(finished / "sharded")) == 0
    assert lines(finished / "half") == lines(finished / "sharded")
    assert [line["kind"] for line in lines(finished / "half", "events.jsonl")].count("resume") == 1


def command_line(root: Path, *arguments: str) -> list[str]:
    path, keys = recipe_file(root / "llama-float64")
    sets = [part for key in [*keys, "cluster.backend=torchrun"] for part in ("--set", key)]
    return ["-m", "dapo", "train", str(path), *sets, *arguments]


def test_bad_input_is_said_once_without_a_traceback_of_ours(root: Path):
    code, out, err = end_of(torchrun(2, *command_line(root, "--out", str(root / "straight"))))
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
    code, out, _ = end_of(process)
    assert code == 0
    done = len(lines(run))
    assert f"Stopped after step {done} of 10000. Resume: dapo resume {run}" in out
    assert (run / "checkpoints" / f"step-{done:06d}" / "MANIFEST.json").is_file()
