"""Runs on a real Ray cluster on this machine's loopback, head and worker node as processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cluster import HEAD, end, head_node, ray_environment, ray_node
from launch import TESTS, children, environment
from ranks import one_process
from test_torchrun import UNEVEN, furthest, gradient_gap, lines, weights, written
from toy import recipe_file

PLANS: dict[str, dict[str, Any]] = {
    "float64": {"overrides": UNEVEN},
    "float32": {"overrides": [*UNEVEN, "train.lr=1e-4"], "dtype": "float32"},
}
LAYOUTS = [("float64", "full"), ("float32", "full"), ("float32", "none")]
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[subprocess.Popen[bytes]]]:
    folder = tmp_path_factory.mktemp("ray")
    started = [head_node(folder)]
    started.append(ray_node(folder, "127.0.0.3", "--address", HEAD))
    yield started
    for node in reversed(started):
        end(node)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the runs of one process."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        one_process(folder, [{**plan, "name": name} for name, plan in PLANS.items()])
        one_process(folder, [{"name": "straight", "overrides": ["train.steps=6"]}])
    return folder / "llama-float64"


def test_four_ranks_compute_what_one_process_computes(nodes: list[subprocess.Popen[bytes]], root: Path):  # noqa: ARG001
    """Two nodes of two ranks each, sharded and not, group counts that nothing divides."""
    runs = root.parent
    plans = [
        {**PLANS[name], "name": f"{name}-{shard}", "overrides": [*PLANS[name]["overrides"], f"cluster.shard={shard}"]}
        for name, shard in LAYOUTS
    ]
    driver = Path(__file__).with_name("ray_driver.py")
    done = subprocess.run(
        [sys.executable, str(driver), "4", str(runs), json.dumps(plans)], env=ray_environment(), capture_output=True,
        text=True, check=False, cwd=TESTS.parent, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for name, shard in LAYOUTS:
        run, alone = runs / f"{name}-{shard}", runs / name
        assert written(run) == written(alone)
        if name == "float64":
            assert furthest(weights(run), weights(alone)) < 1e-9
        assert gradient_gap(run, alone, 3 * 2) < 1e-5


def command(root: Path, run: Path, *overrides: str) -> list[str]:
    path, keys = recipe_file(root)
    sets = [part for key in [*keys, "cluster.backend=ray", "cluster.gpus=4", *overrides] for part in ("--set", key)]
    return [sys.executable, "-m", "dapo", "train", str(path), *sets, "--out", str(run)]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments, env=ray_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=TESTS.parent
    )


def until_trained(driver: subprocess.Popen[str], run: Path) -> None:
    """A step is done and written down, the next one under way."""
    while driver.poll() is None and not (run / "checkpoints" / "step-000001").exists():
        time.sleep(0.05)


def is_rank(pid: int) -> bool:
    return b"-u\0-m\0dapo\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


def ranks_on(nodes: list[subprocess.Popen[bytes]]) -> list[int]:
    return [pid for node in nodes for pid in children(node.pid) if is_rank(pid)]


def is_as_if_nobody_had_disturbed_it(run: Path, straight: Path) -> None:
    """Every response of the undisturbed run was trained on, once, in its step; nothing else was."""
    assert [line["step"] for line in lines(run)] == list(range(1, 7))
    assert written(run) == written(straight)
    assert furthest(weights(run), weights(straight)) < 1e-9
    events = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert events.count("resume") == 1


@pytest.mark.parametrize("victim", ["rank", "node"])
def test_a_rank_or_a_node_that_is_killed_brings_the_run_back_by_itself(
    nodes: list[subprocess.Popen[bytes]], root: Path, tmp_path: Path, victim: str
):
    run = root / victim
    driver = start(command(root, run, "train.steps=6", "cluster.shard=full"))
    until_trained(driver, run)
    on_worker = ranks_on(nodes[1:])
    assert len(on_worker) == 2
    if victim == "rank":
        os.kill(on_worker[0], signal.SIGKILL)
    else:
        end(nodes.pop())
        nodes.append(ray_node(tmp_path, "127.0.0.4", "--address", HEAD))
    out, _ = driver.communicate(timeout=1800)
    assert driver.returncode == 0, out[-3000:]
    assert "was ended by SIGKILL (log: " in out
    assert "Starting again from the newest checkpoint" in out
    is_as_if_nobody_had_disturbed_it(run, root.parent / "straight")
    assert not ranks_on(nodes)


def test_a_driver_that_is_killed_leaves_no_process_behind_and_the_run_goes_on(
    nodes: list[subprocess.Popen[bytes]], root: Path
):
    run = root / "driver"
    driver = start(command(root, run, "train.steps=6", "cluster.gpus=2"))
    until_trained(driver, run)
    ranks = ranks_on(nodes)
    assert len(ranks) == 2
    family = [*ranks, *(child for pid in ranks for child in children(pid))]
    assert len(family) > 2  # verifiers too
    driver.kill()
    driver.communicate(timeout=1800)
    deadline = time.monotonic() + 1800
    while any(Path(f"/proc/{pid}").exists() for pid in family):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.2)
    again = start([sys.executable, "-m", "dapo", "resume", str(run)])
    out, _ = again.communicate(timeout=1800)
    assert again.returncode == 0, out[-3000:]
    assert "step    1" not in out  # what the first driver has shown is not shown again
    is_as_if_nobody_had_disturbed_it(run, root.parent / "straight")
    assert not ranks_on(nodes)


def test_bad_input_is_not_tried_again(nodes: list[subprocess.Popen[bytes]], root: Path):  # noqa: ARG001
    done = subprocess.run(
        command(root, root / "bad", "data.train=nothing:here"), env=ray_environment(), capture_output=True, text=True,
        check=False, cwd=TESTS.parent, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nothing" in done.stdout + done.stderr
    assert "ended with exit code 2 (log: " in done.stderr
    assert "Starting again" not in done.stdout
