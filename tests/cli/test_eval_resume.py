"""`dapo eval` killed in the middle goes on without repeating a finished response."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dapo.models.load import save_policy
from tiny_models import tiny_policy

DATA = (
    Path(os.environ.get("DAPO_DATA", Path(__file__).parents[3] / "shared" / "data")) / "aime2024" / "aime-2024.parquet"
)


def responses(path: Path) -> list[tuple[str, int]]:
    """(problem, index) of the whole lines, the first one (settings) left out."""
    found = []
    for line in path.read_text().split("\n")[1:-1]:
        record = json.loads(line)
        found.append((record["problem_id"], record["response_index"]))
    return found


@pytest.mark.skipif(not DATA.exists(), reason=f"no AIME 2024 file at {DATA}")
def test_aime_x_32_killed_and_resumed_repeats_nothing(tmp_path: Path):
    save_policy(tiny_policy("llama", max_position_embeddings=4096), tmp_path / "model")
    out = tmp_path / "answers.jsonl"
    command = [
        sys.executable, "-m", "dapo", "eval", "--model", str(tmp_path / "model"), "--data", str(DATA), "--k", "32",
        "--template", "raw", "--no-chat", "--max-response-tokens", "40", "--concurrent", "16", "--device", "cpu",
        "--out", str(out), "--json",
    ]  # fmt: skip
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not out.exists() or out.read_text().count("\n") < 200):
        assert child.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    before = responses(out)
    assert 100 < len(before) < 960

    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    after = responses(out)
    assert after[: len(before)] == before  # what was there stays, in its place
    assert len(after) == len(set(after)) == 30 * 32
    line = json.loads(done.stdout)
    assert (line["problems"], line["k"]) == (30, 32)
