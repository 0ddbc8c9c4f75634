"""`dapo export --push` with the real huggingface_hub against a stand-in server: what is pushed can be pulled again."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, Hub, hub
from toy import recipe

from dapo.trainer.loop import train
from dapo.trainer.start import start_run


@pytest.fixture
def server() -> Iterator[Hub]:
    with hub() as server:
        yield server


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    keys = ["train.steps=1", "eval.every_steps=1", "eval.k=1", "data.eval=['toy:problems']"]
    started = start_run(recipe(folder, *keys, dtype="float32"), folder / "run")
    train(started)
    started.close()
    return folder / "run"


def command(server: Hub, home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: huggingface_hub reads where the hub is when it is imported."""
    own = {"HF_ENDPOINT": server.address, "HF_TOKEN": TOKEN, "HF_HOME": str(home / "hub"), "HF_HUB_DISABLE_XET": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | own | variables
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)


PULL = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("me/first")
AutoTokenizer.from_pretrained("me/first")
model.save_pretrained(sys.argv[1])
"""


@pytest.mark.slow
def test_a_model_is_pushed_and_pulled(run: Path, server: Hub, tmp_path: Path):
    words = ["-m", "dapo", "export", str(run), "--out", str(tmp_path / "out"), "--push", "me/first", "--json"]
    done = command(server, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pushed"] == f"{server.address}/me/first"
    files = server.files["me/first"]
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} | (
        {".gitattributes": files[".gitattributes"]} if ".gitattributes" in files else {}
    )
    assert len(server.uploaded) == 1, "the weights went by Git LFS"
    assert server.private["me/first"]
    assert server.commits == ["Model exported by dapo"]
    card = files["README.md"].decode()
    for said in ("license: ", "## Scores", "avg@1", "Trained on `toy:problems`", "Base model: "):
        assert said in card
    pulled = command(server, tmp_path, "-c", PULL, str(tmp_path / "pulled"))
    assert pulled.returncode == 0, pulled.stderr
    assert (tmp_path / "pulled" / "model.safetensors").read_bytes() == files["model.safetensors"]


@pytest.mark.slow
def test_a_push_that_fails_says_so_and_keeps_the_folder(run: Path, server: Hub, tmp_path: Path):
    words = ["-m", "dapo", "export", str(run), "--push", "me/first", "--out"]
    refused = command(server, tmp_path, *words, str(tmp_path / "out"), HF_TOKEN="hf_wrong")
    assert refused.returncode == 2
    assert "--push me/first: not uploaded" in refused.stderr
    assert "hf auth login" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()
    away = command(server, tmp_path, *words, str(tmp_path / "away"), HF_ENDPOINT="http://127.0.0.1:9")
    assert away.returncode == 2
    assert "Check the network" in away.stderr
    assert server.files == {}
