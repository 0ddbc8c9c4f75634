"""Runs that hang on purpose: `dapo doctor` names the cause, and at train.max_wait_s the run ends and can go on."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import TESTS, children, environment, torchrun
from toy import recipe_file

from command_line import dapo
from dapo.checkpoints.load import newest_intact

pytestmark = pytest.mark.slow
LIMIT_S = 12
STEPS = 3


def words(folder: Path, *keys: str) -> list[str]:
    """`-m dapo train` of the toy task into folder/run."""
    path, more = recipe_file(folder)
    wanted = [*more, f"train.steps={STEPS}", f"train.max_wait_s={LIMIT_S}", *keys]
    sets = [word for key in wanted for word in ("--set", key)]
    return ["-m", "dapo", "train", str(path), *sets, "--out", str(folder / "run")]


def start(arguments: list[str], **more: object) -> subprocess.Popen[bytes]:
    env = {**environment(), "TOY_SLOW_WHILE": str(more.pop("mark", ""))}
    outputs: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen([sys.executable, *arguments], env=env, cwd=TESTS.parent, **outputs)  # type: ignore[call-overload]


def named(run: Path, process: subprocess.Popen[bytes] | subprocess.Popen[str], wanted: str) -> str:
    """What the doctor says while the run is held up, once it says that."""
    while process.poll() is None:
        if wanted in (told := dapo("doctor", str(run)).stdout):
            return told
        time.sleep(0.2)
    raise AssertionError(f"the run ended before the doctor said {wanted!r}")


def wait_for(process: subprocess.Popen[bytes] | subprocess.Popen[str], is_there: Callable[[], bool]) -> None:
    while process.poll() is None and not is_there():
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()


def resumes(run: Path, **more: object) -> None:
    """From an intact checkpoint, to the end, with a ledger that balances."""
    newest, skipped = newest_intact(run / "checkpoints")
    assert newest is not None
    assert not skipped
    process = start(["-m", "dapo", "resume", str(run), "--set", "cluster.backend=none"], **more)
    out, err = process.communicate()
    assert process.returncode == 0, err.decode()
    assert f"Done: {STEPS} steps" in out.decode()
    ledger = dapo("ledger", str(run), "--json")
    assert ledger.returncode == 0, ledger.stderr
    assert json.loads(ledger.stdout)["balanced"]


def test_a_verifier_that_never_answers(tmp_path: Path):
    mark = tmp_path / "mark"
    mark.touch()
    keys = ["rewards.verifier=toy:sleeps_while_marked", "rewards.cpu_seconds=3000"]
    process = start(words(tmp_path, *keys), mark=mark)
    told = named(tmp_path / "run", process, "sleeps_while_marked\n")  # in the stack of its worker
    assert "verdicts by toy:sleeps_while_marked, since" in told
    assert "verdicts on problem toy-" in told
    assert "toy.py" in told
    out, err = process.communicate()
    assert process.returncode == 1, out
    assert b"verdicts by toy:sleeps_while_marked; train.max_wait_s = 12." in err
    assert b"in sleeps_while_marked" in err
    assert b"Traceback" not in err
    mark.unlink()
    resumes(tmp_path / "run")


def test_a_full_pipe(tmp_path: Path):
    """Nobody reads the run's output, and the pipe has room for nothing more."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    process = start(words(tmp_path), stdout=writer)
    run = tmp_path / "run"
    wait_for(process, (run / "checkpoints" / "step-000000").exists)
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x")
    except BlockingIOError:
        os.set_blocking(writer, True)
    assert "standard output: whoever reads it does not, since" in named(run, process, "standard output")
    _, err = process.communicate()
    os.close(reader)
    os.close(writer)
    assert process.returncode == 1
    assert b"for standard output: whoever reads it does not; train.max_wait_s = 12." in err
    assert b"in say" in err
    assert b"Traceback" not in err
    resumes(run)


def test_a_file_system_that_blocks(tmp_path: Path):
    """A file of the run is a pipe that nobody writes to: whoever opens it never returns."""
    run = tmp_path / "run"
    keys = ['data.eval=["toy:problems"]', "eval.every_steps=1", "eval.k=1", "train.steps=3"]
    process = start(words(tmp_path, *keys))
    wait_for(process, (run / "eval.jsonl").exists)
    wait_for(process, lambda: b"\n" in (run / "eval.jsonl").read_bytes())
    kept = (run / "eval.jsonl").read_bytes()
    os.mkfifo(run / "fifo")
    (run / "fifo").replace(run / "eval.jsonl")
    assert f"waits for file {run / 'eval.jsonl'}, since" in named(run, process, "eval.jsonl, since")
    _, err = process.communicate()
    assert process.returncode == 1
    assert f"for file {run / 'eval.jsonl'}; train.max_wait_s = 12.".encode() in err
    assert b"in read_lines" in err
    assert b"Traceback" not in err
    (run / "eval.jsonl").unlink()
    (run / "eval.jsonl").write_bytes(kept)
    resumes(run)


def test_a_rank_that_is_stopped(tmp_path: Path):
    run = tmp_path / "run"
    process = torchrun(2, *words(tmp_path, "cluster.backend=torchrun", "train.steps=1000", "train.max_wait_s=40"))
    wait_for(process, lambda: (run / "metrics.jsonl").exists() and (run / "heartbeat" / "rank-1.json").exists())
    ranks = {
        int(variable.removeprefix(b"RANK=")): pid
        for pid in children(process.pid)
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if variable.startswith(b"RANK=") and b"-m\0dapo\0train" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }
    os.kill(ranks[1], signal.SIGSTOP)
    told = named(run, process, "is stopped by a signal")
    assert f"rank 1 (process {ranks[1]} on" in told
    while Path(f"/proc/{ranks[0]}").exists():  # it ends by itself
        time.sleep(0.1)
    os.kill(ranks[1], signal.SIGKILL)  # as torchrun does 30 s after a SIGTERM, which a stopped process does not hear
    _, err = process.communicate()
    assert process.returncode != 0
    assert "rank 0 of 2 has waited" in err
    assert f"rank 1 (process {ranks[1]} on" in err
    assert "is stopped by a signal" in err
    assert "lost contact" not in err
    size = (run / "metrics.jsonl").stat().st_size
    process = start(
        ["-m", "dapo", "resume", str(run), "--set", "cluster.backend=none", "--set", "train.max_wait_s=600"]
    )
    wait_for(process, lambda: (run / "metrics.jsonl").stat().st_size > size)  # a step later
    process.send_signal(signal.SIGUSR1)
    out, err_bytes = process.communicate()
    assert process.returncode == 0, err_bytes
    assert b"Stopped after step" in out
