"""`dapo doctor` as a user meets it: a run, and this machine."""

import json
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_runs import metrics, write_run

from command_line import Answer, dapo
from dapo.cli.doctor import command
from dapo.config.load import recipe_names
from dapo.models.kernels.build import library
from dapo.waiting.heartbeat import Heartbeat, Waited, own_identity, write_heartbeat


def doctor(*arguments: str) -> Answer:
    return dapo("doctor", *arguments)


def test_a_run_with_a_fault_is_told_with_its_remedy(tmp_path: Path):
    folder = write_run(tmp_path / "run", metrics(length__truncated=0.4))
    answer = doctor(str(folder))
    assert answer.returncode == 0
    assert "Many responses are truncated" in answer.stdout
    assert "40.0%" in answer.stdout
    assert "Remedy: Raise limits.max_response_tokens" in answer.stdout
    told = json.loads(doctor(str(folder), "--json").stdout)
    assert [finding["name"] for finding in told["findings"]] == ["truncation"]
    assert told["insufficient_evidence"] is None


def test_a_young_run_is_told_to_be_young(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_run(tmp_path / "run", metrics(3, length__truncated=0.4), wanted=30)
    command(folder, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["insufficient_evidence"] == "3 steps, at least 6 needed"
    assert told["findings"] == []
    command(folder, as_json=False)
    assert capsys.readouterr().out.startswith("Doctor: Not enough steps to diagnose: 3 steps")


def test_this_machine():
    found = json.loads(doctor("--json").stdout)
    assert found["cores"] == os.cpu_count()
    assert found["torch"]
    assert found["recipe"] in recipe_names()
    for package, version in found["packages"].items():
        told = [line for line in found["advice"] if package in line.lower() or "pip install" in line]
        assert version is not None or told, package
    shown = doctor().stdout
    assert f"Fits this machine: {found['recipe']}" in shown
    assert ("CPU kernels are compiled" in shown) == found["is_compiled"]


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DAPO_COMPILE", "0")
    monkeypatch.setattr("dapo.cli.doctor.library", library.__wrapped__)  # asked anew, not remembered
    found = json.loads(doctor("--json").stdout)
    assert not found["is_compiled"]
    assert found["gpus_gib"] or any("DAPO_COMPILE=0" in line for line in found["advice"])


def test_a_run_that_is_held_up_is_told_first_by_name_and_stack(tmp_path: Path):
    folder = write_run(tmp_path / "run", metrics())
    stack = ["trainer/loop.py:30 in train", "files.py:27 in append_line"]
    waits = [Waited("callback Mine", 40.0), Waited("file \x1b[31mx", 40.0)]
    write_heartbeat(folder, Heartbeat(0, 1, **own_identity(), unix_s=time.time(), waits=waits, stack=stack))
    answer = doctor(str(folder))
    assert answer.returncode == 0
    first, *more = answer.stdout.splitlines()
    assert re.fullmatch(
        rf"Now: rank 0 \(process {os.getpid()} on .*\): waits for callback Mine > file ⟨U\+001B⟩\[31mx, since \d+ s",
        first,
    )
    assert [line.strip() for line in more[:2]] == stack
    told = json.loads(doctor(str(folder), "--json").stdout)["waits"]
    assert [(one["rank"], one["stack"]) for one in told] == [(0, stack)]


def test_short_waits_and_runs_that_have_ended_hold_nobody_up(tmp_path: Path):
    folder = write_run(tmp_path / "run", metrics())
    beat = Heartbeat(0, 1, **own_identity(), unix_s=time.time(), waits=[Waited("file x", 0.5)])
    for one in (beat, replace(beat, waits=[Waited("file x", 99.0)], pid=2**22 + 1)):
        write_heartbeat(folder, one)
        assert doctor(str(folder)).stdout.startswith("Doctor:")


def test_a_folder_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dapo.cli.doctor.PATIENCE_S", 0.05)
    monkeypatch.setattr("dapo.cli.doctor.read_heartbeats", lambda _folder: threading.Event().wait())
    answer = doctor(str(write_run(tmp_path / "run", metrics())))
    assert answer.returncode == 2
    assert "has not answered a read for" in answer.stderr
