"""A real Ray cluster on this machine's loopback: nodes as processes of their own, which can be killed."""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from launch import children, environment

HEAD = "127.0.0.2:6399"


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
    """A node with room for two ranks. Ray takes 127.0.0.1 for the outer address, others of 127/8 as they are."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "2", "--num-gpus", "0"]
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


def head_node(folder: Path) -> subprocess.Popen[bytes]:
    port = HEAD.split(":")[1]
    short = tempfile.mkdtemp(prefix="ray-")  # the name of a socket has at most 107 bytes, and pytest's folders are long
    atexit.register(shutil.rmtree, short, ignore_errors=True)
    head = ["--head", "--port", port, "--include-dashboard", "false", "--temp-dir", short]
    return ray_node(folder, "127.0.0.2", *head)
