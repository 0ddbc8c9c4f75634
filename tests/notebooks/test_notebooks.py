"""Notebooks in a real kernel: the two that we ship, rewards and environments of cells, and the interrupt button."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.notebooks

ROOT = Path(__file__).parents[2]
SMALL = [
    "sampling.prompts_per_step=4",
    "sampling.responses_per_prompt=4",
    "limits.max_response_tokens=32",
    "shaping.overlong_buffer_tokens=8",
    "eval.every_steps=0",
    "data.eval=[]",
]
PROBLEMS = (
    'problems = [dapo.Problem(f"{a}+{b}", f"{a} + {b} = ?", str(a + b)) for a in range(2, 8) for b in range(2, 8)]'
)


@pytest.fixture(autouse=True)
def from_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel imports these sources, and records the runs it starts in a folder of the test's."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


def executed(notebook: Any, folder: Path) -> Any:
    """The notebook with its outputs; a cell that fails fails the test. The kernel is reached by files, not by ports."""
    from jupyter_client import AsyncKernelManager
    from nbclient import NotebookClient

    manager = AsyncKernelManager(transport="ipc", ip=str(folder / "kernel"))
    client = NotebookClient(notebook, km=manager, timeout=1800, resources={"metadata": {"path": str(folder)}})
    asyncio.run(client.async_execute())
    return notebook


def of_cells(*sources: str) -> Any:
    from nbformat.v4 import new_code_cell, new_notebook

    return new_notebook(cells=[new_code_cell(source) for source in sources])


def outputs(cell: Any, kind: str) -> str:
    """What a cell shows in that form."""
    return "".join(one["data"].get(kind, "") for one in cell.outputs if "data" in one)


def printed(cell: Any) -> str:
    return "".join(one.text for one in cell.outputs if one.output_type == "stream" and one.name == "stdout")


@pytest.mark.parametrize("name", ["first-run", "own-data"])
def test_the_notebooks_run(name: str, tmp_path: Path):
    from nbformat import read

    notebook = read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code), "outputs are not committed"
    parameters = next(cell for cell in code if "parameters" in cell.metadata.get("tags", ()))
    parameters.source += "\nSTEPS = 2"
    executed(notebook, tmp_path)
    train, shown, report = (by_source(code, text) for text in ("dapo.train(", "result", "result.report()"))
    live = outputs(train, "text/html")
    assert "step 2 of 2 · finished" in live
    assert live.count("<svg") == 4
    assert "avg@" in outputs(shown, "text/html")
    assert "finished, step 2 of 2" in outputs(shown, "text/plain")
    assert outputs(report, "text/html").startswith('<iframe sandbox="allow-scripts"')
    if name == "own-data":
        assert "def last_number" in printed(code[-1])


def by_source(cells: list[Any], text: str) -> Any:
    """The first cell that is this text, or else has it."""
    return next((cell for cell in cells if cell.source == text), None) or next(c for c in cells if text in c.source)


def test_a_reward_of_a_cell_that_hangs_is_killed(tmp_path: Path):
    notebook = executed(
        of_cells(
            f"import dapo\n{PROBLEMS}\ndef is_one_over(text):\n    return len(text) % 3 == 1",
            "def moody(response, answer, meta):\n    while is_one_over(response): pass\n    return len(response) / 100",
            f'result = dapo.train("quickstart", out="run", problems=problems, reward=moody, '
            f"overrides={[*SMALL, 'train.steps=1', 'rewards.cpu_seconds=0.3']}, show=False)\n"
            'print(result.metrics["verdict/timeout"])',
        ),
        tmp_path,
    )
    assert 0 < float(printed(notebook.cells[-1])) < 1
    assert outputs(notebook.cells[-1], "text/html") == ""
    config = (tmp_path / "run" / "config.toml").read_text()
    assert f'verifier = "{tmp_path.resolve()}/run/reward.py:moody"' in config


GAME = """
from dapo.environments.protocol import Turn

class Twice:
    stop = ("=",)
    def start(self, problem, seed):
        self.answer, self.said = problem.answer, []
    def respond(self, said):
        self.said.append(said)
        if len(self.said) < 2:
            return Turn(" ", called=True)
        return Turn(score=dapo.Score(len(self.said[1]) / 10))
"""

STOP = """
import os, signal

class Button(dapo.Observer):
    def on_step(self, metrics):
        os.kill(os.getpid(), signal.SIGINT)  # what the notebook's interrupt button sends
"""


def test_an_environment_of_a_cell_and_an_interrupt_that_keeps_a_checkpoint(tmp_path: Path):
    keys = [*SMALL, "train.steps=3", "limits.max_turns=3"]
    notebook = executed(
        of_cells(
            f"import dapo\n{PROBLEMS}",
            GAME,
            STOP,
            f'result = dapo.train("quickstart", out="run", problems=problems, environment=Twice, overrides={keys}, '
            "callbacks=[Button()])",
            "print(result.step, result.is_finished, result.model.is_dir())",
            "import subprocess, sys\n"
            'done = subprocess.run([sys.executable, "-m", "dapo", "resume", "run"], capture_output=True, text=True)\n'
            "print(done.returncode, done.stderr)",
        ),
        tmp_path,
    )
    assert printed(notebook.cells[4]) == "1 False True\n"
    assert "stopped, a checkpoint is kept" in outputs(notebook.cells[3], "text/html")
    assert "dapo resume" in outputs(notebook.cells[3], "text/html")
    assert printed(notebook.cells[5]).startswith("0 "), printed(notebook.cells[5])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["episode/tool_calls"] > 0 for line in lines)


def test_an_error_of_ours_is_a_message_without_a_traceback(tmp_path: Path):
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError) as raised:
        executed(of_cells('import dapo\ndapo.train("quickstart", out="run", reward=lambda r, a, m: 1.0)'), tmp_path)
    assert "reward = <lambda>: is a lambda" in str(raised.value)
    assert "Traceback" not in str(raised.value)
    assert not (tmp_path / "run").exists()
