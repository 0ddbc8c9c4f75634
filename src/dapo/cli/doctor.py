"""`dapo doctor`: what is wrong with a run, with the remedy; or what this machine can run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.text import Text

from dapo.commands import visible as shown
from dapo.config.load import RECIPE_CARD_GB, nearest_recipe
from dapo.config.machine import GIB, gpu_memory_gib, system_memory_gib
from dapo.console import Pipe
from dapo.errors import DiskError
from dapo.models.kernels.build import library
from dapo.report.doctor.diagnose import insufficient_evidence, to_json, verdict
from dapo.report.doctor.findings import NOTE, SEVERE, Finding
from dapo.report.examined import examine_run
from dapo.report.load import RunRecord
from dapo.waiting.blame import Holder, holders, live
from dapo.waiting.heartbeat import read_heartbeats, within

T = TypeVar("T")
PATIENCE_S = 20.0  # with a run's folder
WORTH_TELLING_S = 3.0  # waits shorter than this are everyday ones
COLOURS = {SEVERE: "red", "warning": "yellow", NOTE: "dim"}
EXTRAS = {
    "peft": ("LoRA adapters", "pip install 'dapo[lora]'"),
    "vllm": ("the vLLM rollout engine", "pip install 'dapo[vllm]'"),
    "ray": ("clusters", "pip install 'dapo[ray]'"),
    "tensorboard": ("TensorBoard", "pip install 'dapo[tensorboard]'"),
    "wandb": ("Weights & Biases", "pip install 'dapo[wandb]'"),
    "trackio": ("trackio", "pip install 'dapo[trackio]'"),
}


def command(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Folder of a run; without it, this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Diagnose a run: what is wrong, and how to fix it. Without a run, show what this machine can run.

    \b
    dapo doctor runs/first
    dapo doctor
    """
    if folder is None:
        print_machine(machine(), as_json=as_json)
        return
    holding = held_up(folder)
    if not as_json:
        print_holders(holding)
    # A long run takes its time to be read; one that is held up may be so by the very files that are read here.
    examined = patiently(folder, lambda: examine_run(folder)) if holding else examine_run(folder)
    if as_json:
        answer = {
            "run": str(folder),
            "verdict": verdict(examined.findings, examined.run),
            "findings": to_json(examined.findings),
            "insufficient_evidence": insufficient_evidence(examined.run) or None,
            "waits": [asdict(holder) for holder in holding],
        }
        typer.echo(
            json.dumps(answer | {"missing": examined.run.missing + examined.missing})
        )  # ASCII: for a terminal too
        return
    print_findings(examined.run, examined.findings, examined.run.missing + examined.missing)


def held_up(folder: Path) -> list[Holder]:
    """Whom a run that is under way waits for; nobody where it is not, or where nobody has waited for long."""
    beats = live(patiently(folder, lambda: read_heartbeats(folder)))
    return [holder for holder in holders(beats) if holder.seconds >= WORTH_TELLING_S] if beats else []


def patiently(folder: Path, work: Callable[[], T]) -> T:
    """work(), or an error where the run's folder does not answer."""
    done = within(PATIENCE_S, lambda: [work()])
    if done is None:
        raise DiskError(
            f"{folder}: has not answered a read for {PATIENCE_S:.0f} s: its file system blocks, or a file in it is a "
            "pipe that nobody writes to.",
            remedy="Look at it with `mount`, `ls -l` and `cat /proc/PID/stack` of a process that hangs.",
        )
    return done[0]


def print_holders(holding: Sequence[Holder]) -> None:
    console = Pipe(highlight=False, soft_wrap=True)
    for holder in holding:
        console.print(Text(f"Now: {shown(holder.text)}", style="yellow"))
        for line in holder.stack:
            console.print(Text(f"       {shown(line)}", style="dim"))


def print_findings(run: RunRecord, findings: Sequence[Finding], missing: Sequence[str] = ()) -> None:
    console = Pipe(highlight=False, soft_wrap=True)
    console.print(Text(f"Doctor: {shown(verdict(findings, run))}"))
    for text in missing:
        console.print(Text(f"  missing  {shown(text)}", style="yellow"))
    for finding in findings:
        steps = f"  (steps {finding.steps[0]}–{finding.steps[1]})" if finding.steps else ""
        console.print(Text(f"  {finding.level:<8} {finding.title}{steps}", style=COLOURS[finding.level]))
        console.print(Text(f"           {shown(finding.detail)}"))
        console.print(Text(f"           Remedy: {shown(finding.remedy)}"))


def print_verdict(folder: Path) -> None:
    """The doctor's verdict at the end of a run; an error here never fails the run."""
    try:
        examined = examine_run(folder)
    except Exception as error:  # the run is finished and saved, whatever is wrong with this
        typer.echo(f"Doctor: could not read {folder}: {error}")
        return
    print_findings(examined.run, [f for f in examined.findings if f.level != NOTE])


# ------------------------------------------------------------------ this machine


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has."""

    python: str
    cores: int
    memory_gib: float
    disk_free_gib: float
    gpus_gib: list[float]
    torch: str | None
    torch_sees: str
    is_compiled: bool
    packages: dict[str, str | None]
    recipe: str
    recipe_next: str | None


def machine() -> Machine:
    gpus = gpu_memory_gib()
    larger = [name for name, needed in RECIPE_CARD_GB.items() if needed > max(gpus, default=0.0) * 1.1]
    return Machine(
        python=platform.python_version(),
        cores=os.cpu_count() or 1,
        memory_gib=round(system_memory_gib(), 1),
        disk_free_gib=round(shutil.disk_usage(".").free / GIB, 1),
        gpus_gib=[round(size, 1) for size in gpus],
        torch=version_of("torch"),
        torch_sees=what_torch_sees(),
        is_compiled=library() is not None,
        packages={name: version_of(name) for name in EXTRAS},
        recipe=nearest_recipe(),
        recipe_next=larger[0] if larger else None,
    )


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def what_torch_sees() -> str:
    try:
        import torch
    except ImportError as error:
        return f"cannot be imported: {error}"
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} CUDA device(s), {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
    return f"no CUDA device; {torch.get_num_threads()} CPU threads"


def advice(found: Machine) -> list[str]:
    """What is missing, and how to get it."""
    told = []
    if found.torch is None:
        told.append("torch is missing: pip install torch")
    elif found.gpus_gib and not found.torch_sees.startswith(tuple("123456789")):
        told.append("torch does not see the GPU: install a CUDA build of torch 2.11 to 2.13")
    if not found.gpus_gib:
        told.append("no NVIDIA GPU: the quickstart runs on the CPU; real models need a card of 8 GB or more")
    if not found.gpus_gib and not found.is_compiled:
        told.append("no C compiler, or DAPO_COMPILE=0: CPU steps run in plain torch, which is slower")
    if found.disk_free_gib < 5:
        told.append(f"only {found.disk_free_gib} GiB of disk free here: checkpoints of a 1.5 B model take about 20")
    told += [f"{EXTRAS[name][0]}: {EXTRAS[name][1]}" for name, version in found.packages.items() if version is None]
    return told


def print_machine(found: Machine, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(found) | {"advice": advice(found)}, ensure_ascii=False))
        return
    gpus = ", ".join(f"{size:.0f} GiB" for size in found.gpus_gib) or "none"
    rows: list[tuple[str, Any]] = [
        ("CPU", f"{found.cores} cores, {found.memory_gib} GiB memory, {found.disk_free_gib} GiB disk free here"),
        ("GPU", gpus),
        ("Python", found.python),
        ("torch", f"{found.torch or 'missing'}: {found.torch_sees}"),
        ("C compiler", "found: CPU kernels are compiled" if found.is_compiled else "none found"),
        *((name, version or "not installed") for name, version in found.packages.items()),
    ]
    for name, text in rows:
        typer.echo(f"  {name:<12} {text}")
    start = "dapo quickstart" if found.recipe == "quickstart" else f"dapo train {found.recipe}"
    typer.echo(f"\nFits this machine: {found.recipe} ({start}; details: dapo explain {found.recipe})")
    if found.recipe_next:
        typer.echo(f"Next larger: {found.recipe_next}, for a card of {RECIPE_CARD_GB[found.recipe_next]} GB")
    for text in advice(found):
        typer.echo(f"  - {text}")
