"""`dapo selfcheck`: the equations and their invariances, checked on this machine in seconds."""

from __future__ import annotations

import json
import math
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dapo.errors import EngineError


def command(
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or mps.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check the equations and their invariances on this machine, in seconds. Exits with 1 if one fails.

    \b
    dapo selfcheck
    dapo selfcheck --device cuda
    """
    import torch

    from dapo.algorithms.selfcheck import run_checks

    require_device(device)
    start = time.perf_counter()
    checks = run_checks(device)
    seconds = time.perf_counter() - start
    failed = [check for check in checks if not check.holds]
    if as_json:
        rows = [
            {
                "equation": check.equation,
                "statement": check.statement,
                "holds": check.holds,
                "error": check.error if math.isfinite(check.error) else None,
                "tolerance": check.tolerance,
            }
            for check in checks
        ]
        answer = {"holds": not failed, "device": device, "torch": torch.__version__, "checks": rows}
        typer.echo(json.dumps(answer, ensure_ascii=False, indent=2))
        raise typer.Exit(bool(failed))

    console = Console(highlight=False)
    table = Table("equation", "statement", "error", "", box=None, padding=(0, 2, 0, 0))
    for check in checks:
        table.add_row(
            check.equation, check.statement, f"{check.error:.1e}", "ok" if check.holds else "[bold]FAILED[/bold]"
        )
    console.print(table)
    console.print(
        f"\n{len(checks) - len(failed)} of {len(checks)} hold on {device}, torch {torch.__version__}, {seconds:.1f} s."
    )
    raise typer.Exit(bool(failed))


def require_device(device: str) -> None:
    import torch

    available = ["cpu"]
    available += ["cuda"] if torch.cuda.is_available() else []
    available += ["mps"] if torch.backends.mps.is_available() else []
    if device not in available:
        raise EngineError(
            f"--device {device}: not available here.", remedy=f"This machine's torch has: {', '.join(available)}."
        )
