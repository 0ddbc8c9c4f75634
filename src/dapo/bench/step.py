"""`dapo bench step`: a whole DAPO step (rollout, verification, update) and TRL's GRPOTrainer on the same work."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dapo.bench.setting import device_name
from dapo.bench.step_plan import CPU, CUDA, StepPlan, check, save_models
from dapo.bench.step_sides import Row, our_settings, our_steps, peer_steps, seconds_of
from dapo.console import table_of, wide_console
from dapo.errors import ConfigError

SIDES = ("dapo", "trl", "trl-vllm")


def bench_step(
    sides: Annotated[str, typer.Option(help="Of dapo, trl, trl-vllm; default: what is here.")] = "",
    prompts: Annotated[int, typer.Option(min=0, help="Groups per step; 0: 8 on a CPU, 32 on a GPU.")] = 0,
    responses: Annotated[int, typer.Option(min=0, help="Responses of a group; 0: 8 or 16.")] = 0,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens of every response; 0: 64 or 512.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Steps, the first of which is not counted; 0: 8 or 4.")] = 0,
    hidden: Annotated[int, typer.Option(min=0, help="Width of the random Llama; 0: 128 or 576.")] = 0,
    layers: Annotated[int, typer.Option(min=0, help="Its layers; 0: 4 or 30.")] = 0,
    micro: Annotated[int, typer.Option(min=0, help="Rows of TRL's micro-batches; 0: 64.")] = 0,
    peer_python: Annotated[str, typer.Option(help="Interpreter that has TRL, if this one has not.")] = sys.executable,
    peer_minutes: Annotated[float, typer.Option(min=0, help="After this long TRL counts as not running.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions, the sides in turn.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as one JSON object.")] = False,
) -> None:
    """A whole step of training: seconds and CPU seconds, compared with TRL in its own process.

    Works as pasted:  dapo bench step --sides dapo --steps 3
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {"prompts": prompts, "responses": responses, "tokens": tokens, "steps": steps}
    given |= {"hidden": hidden, "layers": layers, "micro": micro}
    sizes: dict[str, Any] = (CUDA if device == "cuda" else CPU) | {name: n for name, n in given.items() if n}
    sizes["micro"] = min(sizes["micro"], sizes["prompts"] * sizes["responses"])
    plan = StepPlan(**sizes, device=device, threads=torch.get_num_threads())
    check(plan)
    wanted = sides.split(",") if sides else ["dapo", "trl", *(["trl-vllm"] if device == "cuda" else [])]
    unknown = [name for name in wanted if name not in SIDES]
    if unknown:
        raise ConfigError(f"--sides {sides}: no side {unknown[0]}.", remedy=f"Choose one of {', '.join(SIDES)}.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        n_parameters = save_models(plan, folder)
        measured: dict[str, list[Row]] = {side: [] for side in wanted}
        for _ in range(rounds):
            for side in wanted:
                measured[side].append(measure(side, plan, folder, peer_python, peer_minutes))
    rows = {side: together(of_side) for side, of_side in measured.items()}
    ours = rows.get("dapo")
    for row in rows.values():
        if ours is not None and row is not ours and "seconds" in row:
            row["ours_is_faster"] = row["seconds"] / ours["seconds"]
            row["ours_is_faster_cpu"] = row["cpu_seconds"] / ours["cpu_seconds"]
    figures = {"plan": asdict(plan), "parameters": n_parameters, "device": device_name(device), "rounds": rounds}
    figures["sides"] = rows
    typer.echo(json.dumps(figures)) if as_json else show(figures)


def measure(side: str, plan: StepPlan, folder: Path, peer_python: str, peer_minutes: float) -> Row:
    """One round of a side: the seconds of its steps, or what it says in place of them."""
    if side == "dapo":
        shutil.rmtree(folder / "run", ignore_errors=True)
        marks, parts = our_steps(plan, folder)
        return seconds_of(marks) | {"parts": parts, "settings": our_settings(plan)}
    return peer_steps(replace(plan, use_vllm=side == "trl-vllm"), folder, peer_python, peer_minutes)


def together(rounds: list[Row]) -> Row:
    """Medians over the steps of all rounds; a round that did not run stands for all."""
    failed = next((row for row in rounds if "wall" not in row), None)
    if failed is not None:
        return failed
    row = {name: value for name, value in rounds[0].items() if name not in ("wall", "cpu")}
    row["seconds"], row["cpu_seconds"] = (
        statistics.median(s for each in rounds for s in each[name]) for name in ("wall", "cpu")
    )
    row["cpu_seconds_by_round"] = [round(statistics.median(each["cpu"]), 4) for each in rounds]
    return row


def show(figures: dict[str, Any]) -> None:
    console = wide_console()
    plan = figures["plan"]
    console.print(
        f"{figures['parameters'] / 1e6:,.2f} M parameters, {plan['prompts']} prompts x {plan['responses']} responses "
        f"x {plan['tokens']} tokens, {figures['device']}, {plan['threads']} threads; "
        f"medians of {figures['rounds']} x {plan['steps'] - 1} steps"
    )
    names = ("side", "s per step", "CPU s per step", "ours is faster", "by CPU s", "settings")
    table = table_of(*names, figures=slice(1, 5))
    for name, row in figures["sides"].items():
        if "seconds" not in row:
            table.add_row(name, "", "", "", "", row["settings"])
            continue
        ratios = [f"{row[key]:.2f}x" if key in row else "" for key in ("ours_is_faster", "ours_is_faster_cpu")]
        table.add_row(name, f"{row['seconds']:.3f}", f"{row['cpu_seconds']:.3f}", *ratios, row["settings"])
    console.print(table)
    parts = figures["sides"].get("dapo", {}).get("parts")
    if parts:
        console.print("dapo: " + ", ".join(f"{name.removeprefix('timing.')} {s:.3f}" for name, s in parts.items()))
