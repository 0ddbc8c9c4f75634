"""examples/slurm with the environment Slurm sets: the signal ahead of the time limit, the requeue, the second start."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import TESTS, children, environment
from test_torchrun import lines
from toy import recipe_file

pytestmark = pytest.mark.distributed
SCRIPTS = TESTS.parent / "examples" / "slurm"

# What the script asks of Slurm, played by two programs on the path.
SRUN = """#!/bin/bash
while :; do case "$1" in -w) node=$2; shift 2;; --*) shift;; *) break;; esac; done
case "$node" in 127.0.0.3) set -- "$@" --node-ip-address "$node";; esac  # its hostname would say so
SLURM_NODEID=0 exec "$@"
"""
SCONTROL = """#!/bin/sh
case "$1" in show) printf '%b' "$NODES";; requeue) echo "$2" >> "$REQUEUED";; esac
"""


def as_slurm(folder: Path, restarts: int, nodes: tuple[str, ...] = ("127.0.0.1",)) -> dict[str, str]:
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
        "NODES": "".join(f"{node}\\n" for node in nodes),
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_GPUS_ON_NODE": str(2 // len(nodes)),
        "SLURM_RESTART_COUNT": str(restarts),
    }


def start(script: str, folder: Path, run: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    path, keys = recipe_file(folder)
    sets = [part for key in [*keys, "train.steps=10000"] for part in ("--set", key)]
    return subprocess.Popen(
        ["bash", str(SCRIPTS / script), str(path), str(run), *sets],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=TESTS.parent,
    )


def assert_requeued_and_resumed(
    script: str, folder: Path, signal_it: Callable[[int], None], environment: Callable[[int], dict[str, str]]
) -> None:
    """A step is done when the signal comes; the second start does one step more."""
    run = folder / "run"
    job = start(script, folder, run, environment(0))
    while job.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.2)
    family = children(job.pid)
    signal_it(job.pid)
    out, _ = job.communicate(timeout=1800)
    assert job.returncode == 0, out[-3000:]
    done = len(lines(run))
    assert (run / "checkpoints" / f"step-{done:06d}" / "MANIFEST.json").is_file()
    assert (folder / "requeued").read_text() == "4711\n"

    config = run / "config.toml"
    config.write_text(re.sub(r"(?m)^steps = 10000$", f"steps = {done + 1}", config.read_text()))
    again = start(script, folder, run, environment(1))
    out, _ = again.communicate(timeout=1800)
    assert again.returncode == 0, out[-3000:]
    assert [line["step"] for line in lines(run)] == list(range(1, done + 2))
    assert (folder / "requeued").read_text() == "4711\n"  # finished: not again
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()], "a process was left behind"


def test_ahead_of_the_time_limit_a_checkpoint_is_written_and_the_requeued_job_goes_on(tmp_path: Path):
    def signal_step(job: int) -> None:
        for pid in children(job):  # Slurm signals every process of the step: torchrun, ranks, verifiers; not the script
            if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGUSR1)

    assert_requeued_and_resumed("torchrun.sbatch", tmp_path, signal_step, lambda restarts: as_slurm(tmp_path, restarts))


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_the_same_on_a_ray_cluster_of_the_jobs_own(tmp_path_factory: pytest.TempPathFactory):
    """Two nodes of one rank each; Slurm signals the script alone (B:)."""
    folder = tmp_path_factory.mktemp("s")  # sockets below it have short names only

    def environment(restarts: int) -> dict[str, str]:
        slurm = as_slurm(folder, restarts, nodes=("127.0.0.2", "127.0.0.3"))
        ray = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(folder), "HEAD_IP": "127.0.0.2"}
        return {**slurm, **ray, "RAY_START_ARGS": "--num-cpus 1 --object-store-memory 100000000"}

    def signal_script(job: int) -> None:
        os.kill(job, signal.SIGUSR1)

    assert_requeued_and_resumed("ray.sbatch", folder, signal_script, environment)


@pytest.mark.parametrize("script", ["torchrun.sbatch", "ray.sbatch"])
def test_without_its_arguments_it_says_how_it_is_used(tmp_path: Path, script: str):
    done = subprocess.run(
        ["bash", str(SCRIPTS / script)], env=as_slurm(tmp_path, 0), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: sbatch {script} RECIPE RUN")
