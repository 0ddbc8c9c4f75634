"""vLLM on the ranks of a real Ray cluster: one engine per rank, or one model on two ranks; beside Hugging Face."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from cluster import end, head_node, ray_environment
from launch import TESTS, children
from toy import recipe_file
from transformers import AutoModelForCausalLM

from dapo.models.load import save_policy
from tiny_models import tiny_policy

pytestmark = [pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    head = head_node(tmp_path_factory.mktemp("ray"))
    yield head
    end(head)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("dapo-*") if path.is_file()}


def hugging_face_logp(folder: Path, prompt: list[int], tokens: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1)[range(len(tokens)), tokens].numpy()


@pytest.mark.parametrize(("ranks", "together", "family"), [(1, 1, "llama-tied"), (2, 1, "llama"), (2, 2, "llama-tied")])
def test_steps_of_dapo_on_ray(node: subprocess.Popen[bytes], tmp_path: Path, ranks: int, together: int, family: str):
    """vLLM's attention on a CPU knows heads of 32 and more; a seat more than two engines share evenly."""
    save_policy(tiny_policy(family, seed=1, hidden_size=128, initializer_range=0.1), tmp_path / "model")
    path, keys = recipe_file(tmp_path, dtype="float32")
    keys += ["rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=0.05", "rollout.max_concurrent_sequences=7"]
    keys += [
        "cluster.backend=ray",
        f"cluster.gpus={ranks}",
        f"rollout.tensor_parallel={together}",
        "train.steps=2",
        "checkpoint.keep=3",
    ]
    run = tmp_path / "run"
    sets = [part for key in keys for part in ("--set", key)]
    shared_before = shared_memory()
    done = subprocess.run(
        [sys.executable, "-m", "dapo", "train", str(path), *sets, "--out", str(run)],
        env=ray_environment(), capture_output=True, text=True, check=False, cwd=TESTS.parent, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert shared_memory() <= shared_before  # the name of what the ranks share is taken back
    assert not [pid for pid in children(node.pid) if b"-u\0-m\0dapo\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for step in (1, 2):  # the second one's tokens come from weights that were updated
        rows = pq.read_table(run / "rollouts" / f"step-{step:06d}.parquet").to_pylist()
        assert len(rows) == 16
        assert {version for row in rows for version in row["version"]} == {2 * (step - 1)}
        folder = run / "checkpoints" / f"step-{step - 1:06d}" / "model"
        for row in rows:
            expected = hugging_face_logp(folder, row["prompt_tokens"], row["tokens"])
            assert np.abs(np.array(row["logp"]) - expected).max() < 1e-4
