"""`dapo explain`: what a recipe will do, before anything starts; or how two configs differ."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dapo.cli.explain.cluster import cluster_of, print_cluster, write_plot
from dapo.cli.explain.difference import difference, print_difference
from dapo.cli.explain.precision import precision_of, print_precision
from dapo.cli.explain.tables import in_words, print_table
from dapo.cli.options.common import Set
from dapo.config import Config, Resolved
from dapo.config.advice import warnings_of
from dapo.config.load import flatten, load_recipe_or_run, suggest
from dapo.config.machine import CARDS_GIB, GIB, gpu_memory_gib, system_memory_gib
from dapo.config.model_shapes import shape_of, why_no_shape
from dapo.config.schema import TrainConfig
from dapo.config.sources import eval_sources, is_mixture, shares, train_sources
from dapo.errors import ConfigError
from dapo.planning.cluster import SHEET
from dapo.planning.plan import concurrency_of, memory_of, parts_of, work_of


def command(
    recipe: Annotated[
        str, typer.Argument(help="A shipped recipe (quickstart, gsm8k-1.5b-24gb, …), a TOML file or a run's folder.")
    ],
    other: Annotated[
        str | None, typer.Argument(help="A second recipe or run, or a preset: prints the difference only.")
    ] = None,
    set_: Set = None,
    gpu: Annotated[str | None, typer.Option(help="Plan for this GPU type, e.g. h100; default: this machine.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Plan for this many GPUs; default: cluster.gpus.")] = None,
    mean_tokens: Annotated[
        int | None, typer.Option(min=1, help="With --gpu: mean response length; default: a fifth of the limit.")
    ] = None,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="With --gpu: also plan 1 to 1,024 GPUs (takes minutes).")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="With --scaling: plot it as an SVG file.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="On a GPU: compare engine and trainer in bfloat16 and float16.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a recipe will do, in numbers; or how two configs differ.

    \b
    dapo explain quickstart
    dapo explain runs/first quickstart        # what a run changed
    dapo explain gsm8k-1.5b-24gb --set sampling.responses_per_prompt=16 --gpu rtx4090
    dapo explain dapo-qwen2.5-32b dapo        # where the released script and the paper differ
    dapo explain dapo-qwen2.5-32b --gpus 128 --gpu h100
    dapo explain dapo-qwen2.5-32b --gpus 128 --gpu h100 --scaling --plot scaling.svg
    dapo explain my-recipe.toml --measure     # bfloat16 or float16, on the recipe's own model
    """
    if other is not None:
        for name, is_given in (("--plot", plot is not None), ("--measure", measure)):
            if is_given:
                raise ConfigError(
                    f"{name}: has no effect when two recipes are compared.", remedy="Leave out one of them."
                )
        print_difference(difference(recipe, other, set_ or []), recipe, other, as_json)
        return
    if plot is not None and not scaling:
        raise ConfigError("--plot: has no effect here; it plots the result of --scaling.", remedy="Add --scaling.")
    resolved = load_recipe_or_run(recipe, set_ or [])
    plan = plan_of(resolved, gpu, gpus)
    if gpu is not None and gpu.lower() in SHEET and gpus is not None:
        plan["cluster"] = cluster_of(resolved.config, gpu.lower(), gpus, mean_tokens, scaling)
    elif mean_tokens is not None or scaling:
        raise ConfigError(
            "--mean-tokens, --scaling: have no effect here; they belong to the plan for a cluster.",
            remedy=f"Name it: --gpus N --gpu {'|'.join(SHEET)}.",
        )
    if measure:
        plan["precision"] = precision_of(resolved.config)
    if plot is not None:
        write_plot(plot, resolved.name, plan["cluster"])
    if as_json:
        typer.echo(json.dumps(plan, ensure_ascii=False, indent=2))
    else:
        print_plan(resolved, plan)


def plan_of(resolved: Resolved, gpu: str | None, gpus: int | None) -> dict[str, Any]:
    """Everything `explain` knows about one recipe, as plain data."""
    config = resolved.config
    device, device_gib = device_for(gpu)
    device_gib = min(device_gib, config.model.gpu_memory_gib or device_gib)
    shape = shape_of(config.model.path, config.model.revision)
    memory = None
    if shape is not None:
        n_gpus = gpus or config.cluster.gpus
        estimate = memory_of(config, shape, is_cuda=device != "cpu", gpus=n_gpus)
        at_once = concurrency_of(config, estimate, device_gib=device_gib, gpus=n_gpus)
        memory = {
            "device": device,
            "device_gib": round(device_gib, 1),
            "gpus": n_gpus,
            "parameters": estimate.parameters,
            "parts_gib": {part: round(size / GIB, 2) for part, size in estimate.parts.items()},
            "fixed_gib": round(estimate.fixed / GIB, 2),
            "kv_mib_per_1000_tokens": round(estimate.kv_bytes_per_token * 1000 / 2**20, 2),
            "full_length_responses_at_once": at_once.at_full_length,
            "allowed_responses_at_once": at_once.allowed,
            "replicas": at_once.replicas,
        }
    return {
        "name": resolved.name,
        "preset": config.preset,
        "is_paper_algorithm": config.is_paper_algorithm,
        "work": dataclasses.asdict(work_of(config)),
        "parts": dict(parts_of(config)),
        "warnings": warnings_of(config),
        "memory": memory,
        "unused": dict(resolved.unused),
        "config": flatten(config.model_dump(mode="json")),
        "origin": dict(resolved.origin),
    }


def device_for(gpu: str | None) -> tuple[str, float]:
    """(name, memory in GiB) of the GPU asked for, or of this machine's largest, or of the CPU."""
    if gpu is not None and gpu.lower() != "cpu":
        if gpu.lower() not in CARDS_GIB:
            raise ConfigError(f"--gpu {gpu}: unknown GPU.", remedy=suggest(gpu.lower(), [*CARDS_GIB, "cpu"]))
        return gpu.lower(), CARDS_GIB[gpu.lower()]
    found = gpu_memory_gib() if gpu is None else []
    return ("this machine's GPU", max(found)) if found else ("cpu", system_memory_gib())


def print_plan(resolved: Resolved, plan: dict[str, Any]) -> None:
    config, work = resolved.config, plan["work"]
    console = Console(emoji=False, highlight=False, soft_wrap=False)
    label = "" if plan["is_paper_algorithm"] else "  [bold]not the paper's algorithm[/bold]"
    console.print(f"[bold]{escape(resolved.name)}[/bold]  preset {escape(config.preset)}{label}\n")
    lines = [
        (
            "per step",
            f"{config.sampling.prompts_per_step:,} prompts x {config.sampling.responses_per_prompt} responses = "
            f"{work['responses_per_step']:,} responses, at most {work['max_response_tokens_per_step']:,} tokens",
        ),
        (
            "updates per step",
            f"{work['updates_per_step']:,}, of {work['prompts_per_update']:g} prompts each"
            + (f", in {config.train.epochs_per_step} epochs" if config.train.epochs_per_step > 1 else ""),
        ),
        (
            "whole run",
            f"{work['steps']:,} steps, {work['updates']:,} updates, {work['responses']:,} responses trained on, "
            f"at most {work['max_trained_tokens']:,} tokens",
        ),
        ("learning rate", learning_rate_in_words(config.train)),
        ("evaluation", evaluation_in_words(config)),
        *(mixture_in_words(config) if is_mixture(config) else ()),
    ]
    print_table(console, None, lines)
    print_table(console, "Algorithm", list(plan["parts"].items()))
    for warning in plan["warnings"]:
        console.print(f"[bold]Warning:[/bold] {escape(warning)}\n")
    print_memory(console, config, plan["memory"])
    print_precision(console, plan.get("precision"))
    print_cluster(console, plan.get("cluster"))
    if plan["unused"]:
        print_table(console, "Unused (switched off)", [(k, f"needs {need}") for k, need in plan["unused"].items()])
    settings = Table(
        "key", "value", "from", box=None, title="Resolved config", title_justify="left", padding=(0, 2, 0, 0)
    )
    for key, value in plan["config"].items():
        settings.add_row(escape(key), escape(in_words(value)), plan["origin"].get(key, "default"))
    console.print(settings)


def print_memory(console: Console, config: Config, memory: dict[str, Any] | None) -> None:
    if memory is None:
        console.print(f"Memory: {escape(why_no_shape(config.model.path, config.model.revision))}\n")
        return
    rows = [(part, f"{size:,.2f} GiB") for part, size in memory["parts_gib"].items()]
    rows.append(("total", f"{memory['fixed_gib']:,.2f} of {memory['device_gib']:g} GiB"))
    rows.append(("KV cache", f"{memory['kv_mib_per_1000_tokens']:,.2f} MiB per 1,000 tokens"))
    rows += at_once_in_words(config, memory)
    each = f" on each of {memory['gpus']}" if memory["gpus"] > 1 else ""
    unit, size = ("B", 1e9) if memory["parameters"] >= 1e8 else ("M", 1e6)
    title = f"Memory, estimated{each} ({memory['device']}, {memory['parameters'] / size:,.3g} {unit} parameters)"
    print_table(console, title, rows, escaped=False)


def at_once_in_words(config: Config, memory: dict[str, Any]) -> list[tuple[str, str]]:
    """Which limit binds the number of responses generated concurrently: the setting, or memory."""
    fits, allowed, replicas = (
        memory[key] for key in ("full_length_responses_at_once", "allowed_responses_at_once", "replicas")
    )
    if not fits:
        return [("concurrent responses", "[bold]does not fit[/bold]")]
    limit = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    shared = f" / {replicas:,} replicas = {allowed:,} each" if replicas > 1 else ""
    setting = f"rollout.max_concurrent_sequences = {config.rollout.max_concurrent_sequences:,}{shared}"
    if fits >= allowed:
        verdict = f"{allowed:,}: {setting}; memory is enough for {fits:,} of full length ({limit:,} tokens)"
    else:
        verdict = (
            f"{fits:,} to {allowed:,}: memory is enough for {fits:,} of full length ({limit:,} tokens), for more while "
            f"they are shorter, up to {setting}"
        )
    per_step = config.responses_per_step
    rounds = -(-per_step // min(per_step, allowed * replicas))
    step = f"{per_step:,}, in {rounds} rounds or more" if rounds > 1 else f"{per_step:,}"
    drafts = config.rollout.draft_tokens, config.rollout.draft_below_rows
    tail = [("drafts", f"{drafts[0]} tokens per pass, while at most {drafts[1]} responses run")] if drafts[0] else []
    if config.rollout.exact:
        tail.append(("log-probs", "the trainer's are the engine's to the last bit, which takes more time"))
    if config.rollout.quantization != "none":
        tail.append(("matrix products", f"{config.rollout.quantization.upper()} while responses are generated"))
    return [("concurrent responses", verdict), ("responses per step", step), *tail]


def learning_rate_in_words(train: TrainConfig) -> str:
    after = "constant" if train.lr_decay == "none" else f"{train.lr_decay} decay towards 0 at step {train.steps:,}"
    return f"{train.lr:g} after {train.warmup_steps} steps of warm-up, then {after}"


def mixture_in_words(config: Config) -> list[tuple[str, str]]:
    """A line per source: its share of the prompts submitted, where it is from, its verifier."""
    sources = train_sources(config)
    of, per_step = shares(sources), config.sampling.prompts_per_step
    return [
        (
            f"source {source.name}",
            f"{of[source.name]:.1%} of prompts submitted, about {of[source.name] * per_step:.1f} in {per_step:,}: "
            f"{source.path}, template {source.template}"
            + (", with a system prompt" if source.system_prompt else "")
            + f", verifier {source.verifier}",
        )
        for source in sources
    ]


def evaluation_in_words(config: Config) -> str:
    if not config.data.eval or not config.eval.every_steps:
        return "none"
    sets = ", ".join(source.name for source in eval_sources(config))
    return f"{sets}: avg@{config.eval.k} before step 1 and every {config.eval.every_steps} steps"
