"""`dapo explain RECIPE --gpus N --gpu KIND`: layouts that fit a cluster, and the cost of a step in the chosen one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dapo.cli.explain.tables import print_table
from dapo.config import Config
from dapo.config.model_shapes import shape_of
from dapo.errors import ConfigError
from dapo.planning.cluster import MEAN_FRACTION, Layout, choose, layouts_of, rates_of

SCALING_COLUMNS = {
    "gpus": "GPUs",
    "shard": "shard",
    "tensor_parallel": "TP",
    "slots": "responses per replica",
    "rollout_s": "rollouts, s",
    "idle_share_of_rollout": "idle in rollouts",
    "training_s": "updates, s",
    "gpu_seconds_per_step": "GPU-seconds",
}
CARDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def cluster_of(config: Config, card: str, gpus: int, mean_tokens: int | None, scaling: bool) -> dict[str, Any] | None:
    """Layouts that fit, the step by phase in the chosen one, and the run's GPU-hours; None for an unknown shape."""
    from dapo.planning.scaling import largest_scale, step_time

    shape = shape_of(config.model.path, config.model.revision)
    if shape is None:
        return None
    mean = float(mean_tokens or MEAN_FRACTION * config.limits.max_response_tokens)
    layouts = layouts_of(config, shape, card=card, gpus=gpus, mean_tokens=mean)
    plan: dict[str, Any] = {
        "gpu": card,
        "gpus": gpus,
        "mean_response_tokens": mean,
        "layouts": [layout_in_words(layout) for layout in layouts],
        "chosen": None,
    }
    chosen = choose(layouts, config)
    if chosen is None:
        return plan
    rates = rates_of(config, shape, chosen, card=card, gpus=gpus, mean_tokens=mean)
    scale = largest_scale(config, gpus // chosen.tensor_parallel)
    time = step_time(config, chosen, rates, gpus=gpus, mean_tokens=mean, scale=scale)
    plan["chosen"] = {
        **layout_in_words(chosen),
        "rollout_s": round(time.rollout_s, 1),
        "training_s": round(time.training_s, 1),
        "step_s": round(time.step_s, 1),
        "rollout_share": round(time.rollout_fraction, 3),
        "idle_share_of_rollout": round(time.idle_fraction, 3),
        "wasted_share_of_tokens": round(time.wasted_fraction, 3),
        "hours": round(time.hours(config.train.steps), 1),
        "gpu_hours": round(time.gpu_hours(gpus, config.train.steps)),
        "steps": config.train.steps,
        "replicas": gpus // chosen.tensor_parallel,
        "max_concurrent_sequences": config.rollout.max_concurrent_sequences,
        "simulated_at_one_of": scale,
    }
    if scaling:
        plan["scaling"] = scaling_table(config, card, mean)
    return plan


def scaling_table(config: Config, card: str, mean: float) -> list[dict[str, Any]]:
    """The same step on more and more GPUs, each with its own best layout, at the full batch size."""
    from dapo.planning.scaling import step_time

    shape = shape_of(config.model.path, config.model.revision)
    assert shape is not None, "a plan was made for it"
    rows = []
    for gpus in CARDS:
        chosen = choose(layouts_of(config, shape, card=card, gpus=gpus, mean_tokens=mean), config)
        if chosen is None:
            continue
        rates = rates_of(config, shape, chosen, card=card, gpus=gpus, mean_tokens=mean)
        time = step_time(config, chosen, rates, gpus=gpus, mean_tokens=mean)
        rows.append(
            {
                "gpus": gpus,
                "shard": chosen.shard,
                "tensor_parallel": chosen.tensor_parallel,
                "slots": chosen.slots,
                "rollout_s": round(time.rollout_s, 1),
                "idle_share_of_rollout": round(time.idle_fraction, 3),
                "training_s": round(time.training_s, 1),
                "gpu_seconds_per_step": round(gpus * time.step_s),
            }
        )
    return rows


def layout_in_words(layout: Layout) -> dict[str, Any]:
    return {
        "shard": layout.shard,
        "tensor_parallel": layout.tensor_parallel,
        "fixed_gib": round(sum(layout.parts_gib.values()), 1),
        "parts_gib": {name: round(size, 2) for name, size in layout.parts_gib.items()},
        "slots": layout.slots,
    }


def print_cluster(console: Console, plan: dict[str, Any] | None) -> None:
    if plan is None:
        return
    title = (
        f"{plan['gpus']} x {plan['gpu']}, by the cost model of docs/scaling.md (an estimate; responses of "
        f"{plan['mean_response_tokens']:,.0f} tokens on average, half of the groups mixed)"
    )
    layouts = Table(
        "cluster.shard", "tensor parallel", "GiB per GPU", "responses per replica",
        box=None, title=title, title_justify="left", padding=(0, 2, 0, 0),
    )  # fmt: skip
    for layout in plan["layouts"]:
        slots = f"{layout['slots']:,}" if layout["slots"] else "does not fit"
        layouts.add_row(layout["shard"], str(layout["tensor_parallel"]), f"{layout['fixed_gib']:,}", slots)
    console.print(layouts)
    console.print()
    chosen = plan["chosen"]
    if chosen is None:
        console.print("No layout fits. Use more or larger GPUs, LoRA (model.lora.rank), or train.moments = host.\n")
        return
    rows = [
        ("layout", f"cluster.shard = {chosen['shard']}, tensor parallel {chosen['tensor_parallel']}"),
        ("rollouts", f"{chosen['rollout_s']:,.0f} s, {100 * chosen['rollout_share']:.0f} % of the step"),
        ("updates", f"{chosen['training_s']:,.0f} s"),
        ("idle rollout time", f"{100 * chosen['idle_share_of_rollout']:.0f} % (waiting for the longest responses)"),
        ("wasted tokens", f"{100 * chosen['wasted_share_of_tokens']:.0f} % (not trained on)"),
        ("concurrent responses", at_once_in_words(chosen)),
        (
            "whole run",
            f"{chosen['hours']:,} hours of wall-clock time ({chosen['steps']:,} steps of {chosen['step_s']:,.0f} s) on "
            f"{plan['gpus']} GPUs = {chosen['gpu_hours']:,} GPU-hours, without evaluation",
        ),
    ]
    scale = chosen["simulated_at_one_of"]
    print_table(
        console, "One step in this layout" + (f" (simulated at 1/{scale} of its size)" if scale > 1 else ""), rows
    )
    if plan.get("scaling"):
        title = "The same step on more GPUs (simulated at full size; TP: tensor parallel)"
        table = Table(box=None, title=title, title_justify="left", padding=(0, 2, 0, 0))
        for name, column in SCALING_COLUMNS.items():
            table.add_column(column, justify="left" if name == "shard" else "right")
        for row in plan["scaling"]:
            table.add_row(*(scaling_cell(name, row[name]) for name in SCALING_COLUMNS))
        console.print(table)


def scaling_cell(name: str, value: Any) -> str:
    if name == "shard":
        return str(value)
    return f"{100 * value:.0f} %" if name == "idle_share_of_rollout" else f"{value:,}"


def at_once_in_words(chosen: dict[str, Any]) -> str:
    """The concurrency assumed for the step, and whether the recipe's own limit allows it."""
    slots, replicas, limit = chosen["slots"], chosen["replicas"], chosen["max_concurrent_sequences"]
    total, allowed = slots * replicas, -(-limit // replicas)
    counted, setting = (
        f"{slots:,} per replica x {replicas:,} = {total:,}",
        f"rollout.max_concurrent_sequences = {limit:,}",
    )
    if slots == allowed:
        return f"{counted}, limited by {setting}; memory would allow more"
    counted += ", limited by memory at the mean length"
    if slots < allowed:
        return f"{counted}; {setting} allows more"
    return f"{counted}. {setting} allows {allowed:,} per replica: set it to {total:,}, or a step takes longer"


def write_plot(path: Path, recipe: str, cluster: dict[str, Any] | None) -> None:
    from dapo.cli.explain.scaling_plot import draw
    from dapo.files import replace_file

    rows = (cluster or {}).get("scaling")
    if not cluster or not rows:
        raise ConfigError(f"--plot {path}: the run fits no number of these GPUs.", remedy="Name a larger GPU.")
    replace_file(path, draw(rows, f"One step of {recipe} on {cluster['gpu']}, by the cost model"))
