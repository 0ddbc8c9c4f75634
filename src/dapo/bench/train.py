"""`dapo bench train`: a training pass of this project and of plain Hugging Face on the same workloads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from dapo.bench.setting import TrainSetting, choose_shape
from dapo.bench.timing import Result
from dapo.bench.train_dapo import dapo_side, exact_side, fsdp2_side, plain_side
from dapo.bench.train_hf import hf_bf16_side, hf_masters_side
from dapo.bench.train_workloads import TrainLoad, parse_load
from dapo.console import table_of, wide_console
from dapo.errors import ConfigError

CUDA_LOADS = "8x1024,2x4096c,1x16384c,lognormal:64:8192"
CPU_LOADS = "4x128,2x256c,lognormal:16:512"
SIDES: dict[str, Callable[[TrainSetting, TrainLoad], Result | None]] = {
    "dapo": dapo_side,
    "dapo-exact": exact_side,
    "dapo-plain": plain_side,
    "dapo-fsdp2": fsdp2_side,
    "hf-masters": hf_masters_side,
    "hf-bf16": hf_bf16_side,
}


def bench_train(
    shape: Annotated[str, typer.Option(help="Random weights of this size: 135m, 0.5b, qwen3-0.6b, 1.5b or 7b.")] = "",
    model: Annotated[str, typer.Option(help="A model folder instead.")] = "",
    loads: Annotated[
        str, typer.Option(help="ROWSxTOKENS (c: checkpointed) and lognormal:ROWS:CAP, with commas between.")
    ] = "",
    sides: Annotated[
        str, typer.Option(help="Of dapo, dapo-exact, dapo-plain, dapo-fsdp2, hf-masters and hf-bf16.")
    ] = "",
    preset: Annotated[str, typer.Option(help="Presets whose update is compared, such as ppo,grpo.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Updates that are timed, after two that are not.")] = 4,
    moments: Annotated[str, typer.Option(help="AdamW's moments of this project: float32, int8 or host.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="The figures as one JSON object.")] = False,
) -> None:
    """Forward, backward and AdamW: tokens per second and peak memory, compared with Hugging Face with SDPA.

    Works as pasted:  dapo bench train --shape 135m
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = choose_shape(shape or ("1.5b" if device == "cuda" else "135m"), model)
    wanted = sides or ("dapo,dapo-plain,hf-masters,hf-bf16" if device == "cuda" else "dapo,hf-masters")
    unknown = [name for name in wanted.split(",") if name not in SIDES]
    if unknown:
        raise ConfigError(f"--sides {sides}: no side {unknown[0]}.", remedy=f"Choose one of {', '.join(SIDES)}.")
    if moments not in ("float32", "int8", "host"):
        raise ConfigError(f"--moments {moments}: unknown.", remedy="Use float32, int8 or host.")
    setting = TrainSetting(chosen, model, device, repeats, moments)
    if preset:
        from dapo.bench.presets import compare_presets, show_presets

        figures = compare_presets(setting, preset.split(","))
        typer.echo(json.dumps(figures)) if as_json else show_presets(figures)
        return
    parsed = [parse_load(text) for text in (loads or (CUDA_LOADS if device == "cuda" else CPU_LOADS)).split(",")]
    figures = {"setting": setting.describe(), "loads": [measure(setting, load, wanted.split(",")) for load in parsed]}
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        show(figures)


def measure(setting: TrainSetting, load: TrainLoad, sides: Sequence[str]) -> dict[str, Any]:
    """Every side on one load, one after the other, each on a model of its own."""
    from dapo.models.random_model import training_flops

    flops = training_flops(setting.shape, list(load.lengths))
    limit = setting.describe()["limit_flops"]
    rows: dict[str, Any] = {}
    for name in sides:
        result = SIDES[name](setting, load)
        if result is None:
            rows[name] = None
            continue
        rows[name] = {
            "ms": 1e3 * result.seconds,
            "tokens_per_s": load.tokens / result.seconds,
            "peak_gib": result.peak_gib,
            "fraction_of_limit": flops / result.seconds / limit if limit else None,
            "settings": result.settings,
        }
    plain, sharded = rows.get("dapo"), rows.get("dapo-fsdp2")
    if plain and sharded:
        sharded["time_over_dapo"] = sharded["ms"] / plain["ms"]
    for name in ("hf-masters", "hf-bf16"):
        theirs = rows.get(name)
        for row in rows.values():
            if theirs and row:
                row[f"speed_over_{name}"] = row["tokens_per_s"] / theirs["tokens_per_s"]
                row[f"memory_of_{name}"] = row["peak_gib"] / theirs["peak_gib"] if theirs["peak_gib"] else None
    return {"load": load.name, "tokens": load.tokens, "longest": max(load.lengths), "sides": rows}


def show(figures: dict[str, Any]) -> None:
    setting = figures["setting"]
    console = wide_console()
    versions = ", ".join(f"{name} {version}" for name, version in setting["versions"].items())
    console.print(
        f"{setting['parameters'] / 1e6:,.0f} M parameters ({setting['model']}), {setting['dtype']}, {setting['device']}"
    )
    names = ("load", "side", "ms", "tokens/s", "GiB", "of limit", "speed", "memory", "settings")
    table = table_of(*names, figures=slice(2, 8))
    for load in figures["loads"]:
        for name, row in load["sides"].items():
            if row is None:
                table.add_row(load["load"], name, "out of memory")
                continue
            fraction, memory = row["fraction_of_limit"], row.get("memory_of_hf-masters")
            table.add_row(
                load["load"],
                name,
                f"{row['ms']:,.0f}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['peak_gib']:.1f}",
                "" if fraction is None else f"{fraction:.0%}",
                f"{row['speed_over_hf-masters']:.2f}x" if "speed_over_hf-masters" in row else "",
                "" if memory is None else f"{memory:.0%}",
                row["settings"],
            )
    console.print(table)
    for load in figures["loads"]:
        if over := (load["sides"].get("dapo-fsdp2") or {}).get("time_over_dapo"):
            console.print(
                f"{load['load']}: an update by FSDP2 on one rank takes {over:.3f} times the plain path's time."
            )
    console.print(f"speed and memory: over and of hf-masters, which has the same optimizer precision. {versions}")
