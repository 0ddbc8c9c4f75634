"""Runs on a real Ray cluster on this machine's loopback, head and worker node as processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from launch import TESTS, children, environment
from ranks import one_process
from test_torchrun import furthest, lines, weights, written
from toy import recipe_file

HEAD = "127.0.0.2:6399"
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]


def ray_environment() -> dict[str, str]:
    """Loopback only, and no statistics sent home."""
    paths = [environment()["PYTHONPATH"], os.environ.get("RAY_PYTHONPATH", "")]
    return {
        **environment(),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": HEAD,
    }


def ray_node(folder: Path, ip: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A node with room for one rank. Ray takes 127.0.0.1 for the outer address, others of 127/8 as they are."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1", "--num-gpus", "0"]
    command += ["--node-ip-address", ip, "--object-store-memory", "100000000", "--disable-usage-stats"]
    path = folder / f"{ip}.log"
    with path.open("wb") as log:
        node = subprocess.Popen([*command, *arguments], env=ray_environment(), stdout=log, stderr=log)
    while node.poll() is None and "Ray runtime started" not in path.read_text():
        time.sleep(0.2)
    assert node.poll() is None, path.read_text()[-2000:]
    return node


def end(node: subprocess.Popen[bytes]) -> None:
    """As when the power goes: the node and everything on it."""
    for pid in [*children(node.pid), node.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait(30)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[subprocess.Popen[bytes]]]:
    folder = tmp_path_factory.mktemp("ray")
    head = ["--head", "--port", HEAD.split(":")[1], "--include-dashboard", "false", "--temp-dir", str(folder / "t")]
    started = [ray_node(folder, "127.0.0.2", *head)]
    started.append(ray_node(folder, "127.0.0.3", "--address", HEAD))
    yield started
    for node in reversed(started):
        end(node)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        one_process(folder, [{"name": "straight", "overrides": ["train.steps=6"]}])
    return folder / "llama-float64"


def command(root: Path, run: Path, *overrides: str) -> list[str]:
    path, keys = recipe_file(root)
    sets = [part for key in [*keys, "cluster.backend=ray", "cluster.gpus=2", *overrides] for part in ("--set", key)]
    return [sys.executable, "-m", "dapo", "train", str(path), *sets, "--out", str(run)]


def is_rank(pid: int) -> bool:
    return b"-u\0-m\0dapo\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("victim", ["rank", "node"])
def test_a_rank_or_a_node_that_is_killed_brings_the_run_back_by_itself(
    nodes: list[subprocess.Popen[bytes]], root: Path, tmp_path: Path, victim: str
):
    run, straight = root / victim, root.parent / "straight"
    driver = subprocess.Popen(
        command(root, run, "train.steps=6"), env=ray_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, cwd=TESTS.parent,
    )  # fmt: skip
    while driver.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.05)
    on_worker = [pid for pid in children(nodes[1].pid) if is_rank(pid)]
    assert len(on_worker) == 1
    if victim == "rank":
        os.kill(on_worker[0], signal.SIGKILL)
    else:
        end(nodes.pop())
        nodes.append(ray_node(tmp_path, "127.0.0.4", "--address", HEAD))
    out, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, out[-3000:]
    assert "was ended by SIGKILL (log: " in out
    assert "Starting again from the newest checkpoint" in out
    assert [line["step"] for line in lines(run)] == list(range(1, 7))
    assert written(run) == written(straight)
    assert furthest(weights(run), weights(straight)) < 1e-9
    events = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert events.count("resume") == 1
    assert not [pid for node in nodes for pid in children(node.pid) if is_rank(pid)]


def test_bad_input_is_not_tried_again(nodes: list[subprocess.Popen[bytes]], root: Path):  # noqa: ARG001
    done = subprocess.run(
        command(root, root / "bad", "data.train=nothing:here"), env=ray_environment(), capture_output=True, text=True,
        check=False, cwd=TESTS.parent, timeout=200,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nothing" in done.stdout + done.stderr
    assert "ended with exit code 2 (log: " in done.stderr
    assert "Starting again" not in done.stdout
