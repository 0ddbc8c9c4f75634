"""`dapo bench parity`: one GRPO config in TRL's form, trained by TRL and by us; do both do the same?"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.cli.console import table_of, wide_console

if TYPE_CHECKING:
    from dapo.cli.parity_replay import Gap

SHIPPED = Path(__file__).with_name("trl_grpo.yaml")


def bench_parity(
    peer_python: Annotated[str, typer.Option(help="Interpreter that has TRL, if this one has not.")] = sys.executable,
    peer_minutes: Annotated[float, typer.Option(min=0, help="After so long the peer counts as not running.")] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as one JSON object.")] = False,
) -> None:
    """The same recorded rollouts through TRL's GRPOTrainer and through our update, in float32 on a tiny model.

    One config in TRL's form is read by TRL and imported by us. Losses must agree within 1e-5, gradients within 1e-4 of
    their norm; where the definitions differ, the table says how. Exits with code 1 where it is not so.

    \b
    dapo bench parity --peer-python PATH
    """
    from dapo.cli.parity_replay import compare, replay

    with tempfile.TemporaryDirectory() as name:
        replayed = replay(Path(name), SHIPPED, peer_python, peer_minutes)
        gaps = [compare(folder, case, replayed.steps) for folder, case in replayed.cases.items()]
    if as_json:
        typer.echo(json.dumps({"peer": replayed.versions, "cases": [figures_of(gap) for gap in gaps]}))
    else:
        show(gaps, replayed.versions)
    if not all(gap.is_as_told for gap in gaps):
        raise typer.Exit(1)


def figures_of(gap: Gap) -> dict[str, Any]:
    case = gap.case
    return {
        "case": case.name, "keys": case.keys, "differs": case.why, "loss": gap.loss, "gradient": gap.gradient,
        "move": gap.move, "updates": gap.updates, "clipped": gap.clipped, "ok": gap.is_as_told,
    }  # fmt: skip


def show(gaps: list[Gap], versions: str) -> None:
    from dapo.cli.parity_cases import PROMPTS, RESPONSES, STEPS
    from dapo.cli.parity_replay import GRADIENT, LOSS, MOVE

    console = wide_console()
    console.print(
        f"{versions}; float32, {STEPS} steps of {PROMPTS} x {RESPONSES} recorded responses. Largest difference of an "
        f"update: loss (at most {LOSS:g} of the largest), gradient ({GRADIENT:g} of its norm), move of the weights "
        f"({MOVE:g} of the largest move)"
    )
    table = table_of("case", "loss", "gradient", "move", "clipped", "", "where the two differ", figures=slice(1, 5))
    for gap in gaps:
        move = "" if gap.move is None else f"{gap.move:.1e}"
        table.add_row(
            gap.case.name, f"{gap.loss:.1e}", f"{gap.gradient:.1e}", move, f"{100 * gap.clipped:.0f} %",
            verdict(gap), gap.case.why,
        )  # fmt: skip
    console.print(table)
    wrong = [gap.case.name for gap in gaps if not gap.is_as_told]
    console.print(f"Not as told: {', '.join(wrong)}" if wrong else f"All {len(gaps)} cases as told.")


def verdict(gap: Gap) -> str:
    if not gap.is_as_told:
        return "WRONG"
    return {"": "agrees", "rows": "agrees by its factor", "tokens": "agrees by its factor", "other": "differs"}[
        gap.case.differs
    ]
