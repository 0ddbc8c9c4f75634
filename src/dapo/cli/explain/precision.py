"""`dapo explain --measure`: the gap between engine and trainer under bfloat16 and float16, on this machine's GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dapo.config import Config
from dapo.errors import ConfigError


def precision_of(config: Config) -> dict[str, Any]:
    """Both types measured, and which to take."""
    import torch

    from dapo.learner.precision import measure_precisions, recommended
    from dapo.models.device import choose_device

    if config.model.device == "cpu" or choose_device("auto") != "cuda":
        raise ConfigError(
            "--measure: needs a GPU: bfloat16 and float16 are compared by sampling and scoring with the model.",
            remedy="Run it on the machine that will train; a CPU trains in float32, where the gap is rounding alone.",
        )
    gaps = measure_precisions(config, (torch.bfloat16, torch.float16), "cuda")
    return {"gaps": [asdict(gap) for gap in gaps], "recommended": recommended(*gaps)}


def print_precision(console: Console, precision: dict[str, Any] | None) -> None:
    if precision is None:
        return
    table = Table(
        "type", "tokens", "mean gap", "largest", "KL", "faults",
        box=None, title="Engine against trainer, nats per token", title_justify="left", padding=(0, 2, 0, 0),
    )  # fmt: skip
    for gap in precision["gaps"]:
        numbers = (f"{gap[name]:.2g}" for name in ("mean", "largest", "kl"))
        table.add_row(gap["dtype"], f"{gap['tokens']:,}", *numbers, str(gap["faults"]))
    console.print(table)
    console.print(f"Recommended: {escape(precision['recommended'])}\n")
