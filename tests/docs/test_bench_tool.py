"""`make bench` and `make bench-gpu`: commands that exist, in time, their output kept, compared with a run before."""

import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blocks import ROOT
from test_blocks import parse

spec = importlib.util.spec_from_file_location("bench", ROOT / "tools/bench.py")
bench = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = bench  # its dataclass looks there
spec.loader.exec_module(bench)


@pytest.mark.parametrize("command", sorted({*bench.CPU, *bench.GPU, *bench.SMALL}))
def test_every_command_parses(command: str):
    assert parse([*command.split(), "--json"])["as_json"]


@pytest.mark.slow
def test_the_figures_are_written_with_their_commands(tmp_path: Path):
    command = [sys.executable, "tools/bench.py", "cpu", "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert [found["command"] for found in record["benchmarks"]] == [f"dapo {command}" for command in bench.SMALL]
    assert all(found["figures"] for found in record["benchmarks"])
    assert record["versions"].keys() >= {"dapo", "torch", "python"}
    assert "| figure | value |" in done.stdout
    assert sorted(path.name for path in (tmp_path / "bench-cpu").iterdir())[0] == "01-bench-verify-sample-2.err.txt"
    assert len(list((tmp_path / "bench-cpu").glob("*.out.txt"))) == len(bench.SMALL)


@pytest.mark.slow
def test_a_benchmark_that_fails_says_why(tmp_path: Path):
    found = bench.measured("bench step --sides dapo --tokens 16", 60, tmp_path / "01")
    assert "overlong buffer" in found["failed"]
    assert "failed: " in bench.as_markdown(found)
    assert "overlong buffer" in (tmp_path / "01.err.txt").read_text()


# ------------------------------------------------------------------ time


def test_no_benchmark_starts_without_time_and_none_gets_more_than_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = {"left": 100.0}
    given = {}

    def measured(command: str, limit_s: float, raw: Path) -> dict[str, object]:
        given[command] = limit_s, raw.name
        clock["left"] -= limit_s
        return {"command": f"dapo {command}"}

    monkeypatch.setattr(bench, "measured", measured)
    limits = {"bench one": 30, "bench two --a b,c": 60 - bench.TOO_SHORT_S, "bench three": 90, "bench four": 1}
    found = list(bench.measured_in_turn(limits, tmp_path, lambda: clock["left"]))
    assert given == {
        "bench one": (30, "01-bench-one"),
        "bench two --a b,c": (40, "02-bench-two-a-b-c"),
        "bench three": (30, "03-bench-three"),
    }
    assert found[-1] == {"command": "dapo bench four", "not_run": "no time left"}
    assert "not run: no time left" in bench.as_markdown(found[-1])


def test_the_gpus_list_fits_ten_minutes_and_no_benchmark_takes_a_third_of_them():
    assert bench.GPU_MINUTES < 10
    assert max(bench.GPU.values()) <= 60 * bench.GPU_MINUTES / 3


def test_a_benchmark_whose_time_is_up_is_ended_with_what_it_started_and_its_output_stays(tmp_path: Path):
    out, err, child = tmp_path / "out", tmp_path / "err", f"600.{time.time_ns()}"
    assert bench.run_limited(["sh", "-c", f"sleep {child} & echo so far; wait"], 1, out, err) is None
    assert out.read_text() in ("so far\n", "")  # a busy machine may not have come to it
    until = time.monotonic() + 1800  # a killed process takes a moment to go
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(child)


def is_running(argument: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument in path.read_text():
                return True
    return False


def test_exit_status_and_output_of_one_that_ends(tmp_path: Path):
    out, err = tmp_path / "out", tmp_path / "err"
    command = [sys.executable, "-c", "import sys; print('said'); sys.exit('complained')"]
    assert bench.run_limited(command, 60, out, err) == 1
    assert (out.read_text(), err.read_text()) == ("said\n", "complained\n")


# ------------------------------------------------------------------ before and after


def record(*benchmarks: tuple[str, object], gpu: str = "NVIDIA H200") -> dict:
    found = [{"command": command, "took_s": 1.0, "figures": figures} for command, figures in benchmarks]
    return {"date": "2026-11-18", "gpu": gpu, "versions": {"torch": "2.11"}, "benchmarks": found}


def rollout(*rows: tuple[str, str, float]) -> dict:
    return {
        "setting": {"parameters": 5},
        "results": [
            {"engine": engine, "load": load, "slots": 8, "tokens": 80, "seconds": 80 / speed, "tokens_per_s": speed}
            for engine, load, speed in rows
        ],
    }


def test_figures_are_named_by_what_was_measured_not_by_their_place():
    once = record(
        ("dapo bench rollout --shape 7b --engines local,vllm", rollout(("vllm", "few", 5), ("local", "few", 9)))
    )
    again = record(
        (
            "dapo bench rollout --shape 7b --engines local --load few,fixed",
            rollout(("local", "fixed", 4), ("local", "few", 8)),
        )
    )
    name = "rollout --shape 7b · results · local few 8 · tokens_per_s"
    assert bench.figures_of(once)[name] == 9
    (change,) = bench.changes_between(bench.figures_of(once), bench.figures_of(again))
    assert change == bench.Change(name, "higher", 9, 8)
    other = record(("dapo bench rollout --shape 7b --draft 4", rollout(("local", "few", 7))))
    assert not bench.changes_between(bench.figures_of(once), bench.figures_of(other)), "another subject"


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("tokens_per_s", "higher"),
        ("speed_over_hf-masters", "higher"),
        ("ours_is_faster", "higher"),
        ("seconds", "lower"),
        ("cpu_seconds", "lower"),
        ("ms", "lower"),
        ("update_ms", "lower"),
        ("timing.sampling_s", "lower"),
        ("peak_gib", "lower"),
        ("time_over_dapo", "lower"),
        ("tokens", None),
        ("slots", None),
        ("items", None),
        ("parameters", None),
    ],
)
def test_which_way_is_better(name: str, direction: str | None):
    assert bench.better(name) == direction


@pytest.mark.parametrize(
    ("better", "after", "is_worse"),
    [
        ("higher", 97.1, False),
        ("higher", 96.9, True),
        ("higher", 200, False),
        ("lower", 102.9, False),
        ("lower", 103.1, True),
    ],
)
def test_worse_is_more_than_three_percent_the_wrong_way(better: str, after: float, is_worse: bool):
    assert bench.Change("figure", better, 100, after).is_worse == is_worse


def test_the_table_marks_what_is_worse_and_says_where_both_are_from():
    def train(ms: float, gib: float) -> tuple[str, object]:
        return "dapo bench train", {"sides": {"dapo": {"ms": ms, "peak_gib": gib, "settings": "bf16"}, "hf": None}}

    table = bench.comparison(record(train(100, 27.3)), record(train(90, 30.0), ("dapo bench new", {"ms": 3})), "a", "b")
    assert "| train · sides · dapo · ms | lower | 100 | 90 | 0.900 |" in table
    assert "| train · sides · dapo · peak_gib | lower | 27.3 | 30 | **1.099, worse** |" in table
    assert "1 of 2 figures are worse by more than 3%" in table
    assert "Before: 2026-11-18, NVIDIA H200, torch 2.11." in table
    assert "Not the same machine" not in table
    assert "Not the same machine" in bench.comparison(record(train(1, 1), gpu="none"), record(train(1, 1)), "a", "b")


def test_what_cannot_be_compared_is_left_out():
    failed = {
        "benchmarks": [{"command": "dapo bench step", "failed": "why"}, {"command": "dapo bench x", "not_run": "y"}]
    }
    assert bench.figures_of(failed) == {}
    before, after = record(("dapo bench x", {"ms": 0, "is_s": True})), record(("dapo bench x", {"ms": 5, "is_s": True}))
    assert bench.changes_between(bench.figures_of(before), bench.figures_of(after)) == []


def compare(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["bench.py", "compare", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        bench.main()
    return end.value.code


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "old.json: No such file or directory."),
        (lambda path: path.write_text("{"), "old.json: not JSON."),
        (lambda path: path.write_bytes(b"\xff"), "old.json: not JSON."),
        (lambda path: path.write_text("[]"), "old.json: no record of this tool"),
        (lambda path: path.write_text('{"benchmarks": [{}]}'), "old.json: no record of this tool"),
        (lambda path: path.write_text('{"benchmarks": []}'), "have no figure in common."),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], object],
    message: str,
):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for path in (old, new):
        path.write_text(json.dumps(record(("dapo bench x", {"ms": 5}))))
    spoil(old)
    assert compare(monkeypatch, old, new) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.count("\n") == 1


def test_two_files_make_a_table_on_the_screen_and_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    old, new, table = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "table.md"
    old.write_text(json.dumps(record(("dapo bench x", {"ms": 5}))))
    new.write_text(json.dumps(record(("dapo bench x", {"ms": 4}))))
    assert compare(monkeypatch, old, new, "--out", table) == 0
    assert table.read_text() == capsys.readouterr().out
    assert "| x · ms | lower | 5 | 4 | 0.800 |" in table.read_text()


def test_a_run_is_written_after_every_benchmark_and_compared_with_the_one_that_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    seen = []

    def measured(command: str, _limit_s: float, _raw: Path) -> dict[str, object]:
        path = tmp_path / "bench-gpu.json"
        seen.append(len(json.loads(path.read_text())["benchmarks"]))
        if command == "bench b":
            return {"command": f"dapo {command}", "took_s": 1, "failed": "broken"}
        return {"command": f"dapo {command}", "took_s": 1, "figures": {"ms": 4.0}}

    (tmp_path / "bench-gpu.json").write_text(json.dumps(record(*[("dapo bench a", {"ms": 5})] * 7)))
    monkeypatch.setattr(bench, "measured", measured)
    monkeypatch.setattr(bench, "GPU", {"bench a": 60, "bench b": 60, "bench c": 60})
    monkeypatch.setattr(bench, "machine", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(sys, "argv", ["bench.py", "gpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert end.value.code == 1, "one failed"
    assert seen == [7, 1, 2]
    assert "| a · ms | lower | 5 | 4 | 0.800 |" in (tmp_path / "bench-gpu.md").read_text()
    assert "0.800" in capsys.readouterr().out


def test_the_comparison_with_verl_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spec = importlib.util.spec_from_file_location("verl_functions", ROOT / "tools/verl_functions.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    with pytest.raises(SystemExit, match="2"):
        module.load_verl(tmp_path)
    assert f"{tmp_path}: no verl checkout" in capsys.readouterr().err
