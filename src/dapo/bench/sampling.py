"""`dapo bench sampling`: strategies of dynamic sampling side by side, on a virtual clock or on the local engine."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.bench.setting import machine_name, versions_of
from dapo.console import table_of, wide_console
from dapo.errors import ConfigError

if TYPE_CHECKING:
    from dapo.bench.strategies import Load, Outcome

ENGINES = ("virtual", "local")


def bench_sampling(
    engine: Annotated[
        str, typer.Option(help="virtual: given lengths on a virtual clock. local: the real engine on a CPU.")
    ] = "virtual",
    prompts_per_step: Annotated[int | None, typer.Option(min=1, help="Groups a step needs. [64; local: 32]")] = None,
    responses: Annotated[int | None, typer.Option(min=2, help="Responses per prompt. [16; local: 8]")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Responses written at a time. [1024; local: 128]")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to average over. [16; local: 8]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths, pass rates and verdicts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as one JSON object.")] = False,
) -> None:
    """Time to sample a step's groups and waste by cause, with half of the problems never mixed: the real sampling code.

    Works as pasted:  dapo bench sampling
    """
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine}: no such engine.", remedy=f"Use {' or '.join(ENGINES)}.")
    given = {
        "prompts_per_step": prompts_per_step, "responses_per_prompt": responses, "max_concurrent": concurrency,
        "steps": steps, "seed": seed,
    }  # fmt: skip
    changes = {name: value for name, value in given.items() if value is not None}
    load, outcomes, ticks = run(engine, changes)
    figures = figures_of(engine, load, outcomes) | {"tick_cpu_s": ticks}
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        show(figures)


def run(engine: str, changes: dict[str, Any]) -> tuple[Load, dict[str, Outcome], dict[int, float]]:
    """The load, each strategy's outcome, and on a real engine a decode step's CPU seconds by responses in flight."""
    import torch

    from dapo.bench.strategies import Load, compare

    if engine == "virtual":
        load = replace(Load(), **changes)
        return load, compare(load), {}
    from dapo.bench.strategies_measured import SMALL, compare_measured, tick_cost

    torch.set_num_threads(1)  # small matrices: more threads only disturb the clock
    load = replace(SMALL, **changes)
    return load, compare_measured(load), tick_cost(load)


def figures_of(engine: str, load: Load, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Every strategy's means per step, with its ratios to rounds of one and of three times a step's prompts."""
    one, three = outcomes["rounds x 1"], outcomes["rounds x 3"]
    rows = {}
    for name, outcome in outcomes.items():
        unused = outcome.wasted_tokens["surplus"] + outcome.wasted_tokens["aborted"]
        rows[name] = asdict(outcome) | {
            "ratio_to_rounds_x1": outcome.seconds / one.seconds,
            "ratio_to_rounds_x3": outcome.seconds / three.seconds,
            "cpu_ratio_to_rounds_x1": outcome.cpu_seconds / one.cpu_seconds,
            "cpu_ratio_to_rounds_x3": outcome.cpu_seconds / three.cpu_seconds,
            "surplus_and_aborted_tokens": unused,
        }
    return {
        "engine": engine,
        "load": asdict(load),
        "strategies": rows,
        "versions": versions_of("dapo", "torch", "transformers"),
        "machine": machine_name(),
    }


def show(figures: dict[str, Any]) -> None:
    load, is_local = figures["load"], figures["engine"] == "local"
    console = wide_console()
    console.print(
        f"{load['prompts_per_step']} mixed groups x {load['responses_per_prompt']} responses per step, "
        f"{load['max_concurrent']} at a time, half of the problems never mixed; "
        f"means of {load['steps']} steps, {'local engine' if is_local else 'virtual clock'}"
    )
    columns = ["strategy", "s per step", "of x 1", "of x 3"]
    columns += ["CPU s", "of x 1", "of x 3"] if is_local else []
    columns += ["tokens", "all correct", "all wrong", "surplus", "aborted", "stale", "prompts"]
    table = table_of(*columns, figures=slice(1, None))
    for name, row in figures["strategies"].items():
        wasted = row["wasted_tokens"]
        cells = [name, f"{row['seconds']:.2f}", f"{row['ratio_to_rounds_x1']:.2f}", f"{row['ratio_to_rounds_x3']:.2f}"]
        if is_local:
            cells += [f"{row['cpu_seconds']:.2f}"]
            cells += [f"{row['cpu_ratio_to_rounds_x1']:.2f}", f"{row['cpu_ratio_to_rounds_x3']:.2f}"]
        cells.append(f"{row['generated_tokens']:,.0f}")
        cells += [f"{wasted[cause]:,.0f}" for cause in ("all_correct", "all_wrong", "surplus", "aborted", "stale")]
        table.add_row(*cells, f"{row['prompts_tried']:.0f}")
    console.print(table)
    for n, seconds in figures["tick_cpu_s"].items():
        console.print(f"a tick with {n} responses in flight: {1000 * seconds:.2f} ms of CPU time")
    console.print("dapo-fast is not the paper's algorithm: it takes groups as they end, across updates.")
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    console.print(f"{figures['machine']}; {versions}")
