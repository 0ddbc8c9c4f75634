"""Waiting for processes to end."""

import time
from pathlib import Path


def await_end(pids: list[int]) -> None:
    assert pids
    while any(is_running(pid) for pid in pids):  # pytest's own time limit ends this
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
