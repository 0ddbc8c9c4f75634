"""`make bench` and `make bench-gpu`: their commands exist, and what they measured is written with its command."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import ROOT
from test_blocks import parse

spec = importlib.util.spec_from_file_location("bench", ROOT / "tools/bench.py")
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)


@pytest.mark.parametrize("command", sorted({*bench.CPU, *bench.GPU, *bench.SMALL}))
def test_every_command_parses(command: str):
    assert parse([*command.split(), "--json"])["as_json"]


@pytest.mark.slow
def test_the_figures_are_written_with_their_commands(tmp_path: Path):
    command = [sys.executable, "tools/bench.py", "cpu", "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert [found["command"] for found in record["benchmarks"]] == [f"dapo {command}" for command in bench.SMALL]
    assert all(found["figures"] for found in record["benchmarks"])
    assert record["versions"].keys() >= {"dapo", "torch", "python"}
    assert "| figure | value |" in done.stdout


@pytest.mark.slow
def test_a_benchmark_that_fails_says_why():
    found = bench.measured("bench step --sides dapo --tokens 16")
    assert "overlong buffer" in found["failed"]
    assert "failed: " in bench.as_markdown(found)


def test_the_comparison_with_verl_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spec = importlib.util.spec_from_file_location("verl_functions", ROOT / "tools/verl_functions.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit, match="2"):
        module.load_verl(tmp_path)
    assert f"{tmp_path}: no verl checkout" in capsys.readouterr().err
