"""examples/slurm with the environment Slurm sets: the signal ahead of the time limit, the requeue, the second start."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launch import TESTS, children, environment
from test_torchrun import lines
from toy import recipe_file

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
SCRIPT = TESTS.parent / "examples" / "slurm" / "torchrun.sbatch"

# What the script asks of Slurm, played by two programs on the path.
SRUN = '#!/bin/sh\n[ "$1" = --kill-on-bad-exit=1 ] && shift\nSLURM_NODEID=0 exec "$@"\n'
SCONTROL = '#!/bin/sh\ncase "$1" in show) echo 127.0.0.1;; requeue) echo "$2" >> "$REQUEUED";; esac\n'


def as_slurm(folder: Path, restarts: int) -> dict[str, str]:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        **environment(),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": os.sys.executable,
        "REQUEUED": str(folder / "requeued"),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[001-001]",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_RESTART_COUNT": str(restarts),
    }


def start(folder: Path, run: Path, restarts: int) -> subprocess.Popen[str]:
    path, keys = recipe_file(folder)
    sets = [part for key in [*keys, "train.steps=10000"] for part in ("--set", key)]
    return subprocess.Popen(
        ["bash", str(SCRIPT), str(path), str(run), *sets],
        env=as_slurm(folder, restarts),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=TESTS.parent,
    )


def test_ahead_of_the_time_limit_a_checkpoint_is_written_and_the_requeued_job_goes_on(tmp_path: Path):
    run = tmp_path / "run"
    job = start(tmp_path, run, 0)
    while job.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.2)
    for pid in children(job.pid):  # Slurm signals every process of the step: torchrun, ranks, verifiers; not the script
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"python" in command:
            os.kill(pid, signal.SIGUSR1)
    out, _ = job.communicate(timeout=120)
    assert job.returncode == 0, out[-3000:]
    done = len(lines(run))
    assert (run / "checkpoints" / f"step-{done:06d}" / "MANIFEST.json").is_file()
    assert (tmp_path / "requeued").read_text() == "4711\n"

    config = run / "config.toml"
    config.write_text(re.sub(r"(?m)^steps = 10000$", f"steps = {done + 1}", config.read_text()))
    again = start(tmp_path, run, 1)
    out, _ = again.communicate(timeout=200)
    assert again.returncode == 0, out[-3000:]
    assert [line["step"] for line in lines(run)] == list(range(1, done + 2))
    assert (tmp_path / "requeued").read_text() == "4711\n"  # finished: not again


def test_without_its_arguments_it_says_how_it_is_used(tmp_path: Path):
    done = subprocess.run(["bash", str(SCRIPT)], env=as_slurm(tmp_path, 0), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sbatch torchrun.sbatch RECIPE RUN")
