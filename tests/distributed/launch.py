"""Starts programs under torchrun on this machine's loopback, and finds their processes."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def environment() -> dict[str, str]:
    paths = [str(TESTS.parent / "src"), str(TESTS), str(TESTS / "trainer"), str(TESTS / "distributed")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def torchrun(n: int, *arguments: str) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node n ...` under way, on a port of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", *arguments]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=TESTS.parent
    )


def children(pid: int) -> list[int]:
    """Processes that this one started, and theirs."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            child = int(stat.parent.name)
            found += [child, *children(child)]
    return found
