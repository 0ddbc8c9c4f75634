"""`dapo bench parity`: one GRPO config in TRL's form, trained by TRL and by us; do both do the same?"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.console import table_of, wide_console
from dapo.errors import ConfigError

if TYPE_CHECKING:
    from dapo.bench.parity.replay import Gap

SHIPPED = Path(__file__).with_name("trl_grpo.yaml")


def bench_parity(
    out: Annotated[
        Path | None, typer.Option(help="Train both for real into this folder; an unfinished run resumes.")
    ] = None,
    config: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            show_default=False,
            help="The GRPO config in TRL's form, YAML or JSON; default: the shipped one.",
        ),
    ] = SHIPPED,
    model: Annotated[str, typer.Option(help="With --out: model folder, in place of the config's.")] = "",
    train: Annotated[str, typer.Option(help="With --out: training problems, in place of the config's.")] = "",
    eval_set: Annotated[str, typer.Option("--eval", help="With --out: held-out problems of the curves.")] = "",
    steps: Annotated[int, typer.Option(min=0, help="With --out: steps; 0: the config's.")] = 0,
    every: Annotated[int, typer.Option(min=1, help="With --out: evaluate every so many steps.")] = 10,
    seeds: Annotated[str, typer.Option(help="With --out: train so often.")] = "0,1",
    sides: Annotated[str, typer.Option(help="With --out: who trains in this call, of dapo, trl.")] = "dapo,trl",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A key of ours that TRL has none for.")
    ] = None,
    peer_overrides: Annotated[
        list[str] | None, typer.Option("--peer-set", metavar="KEY=VALUE", help="A key of TRL's, for both sides.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="With --out: stop after so long, to resume later; 0: never.")
    ] = 0,
    peer_vllm: Annotated[bool, typer.Option("--peer-vllm", help="With --out: TRL generates with vLLM.")] = False,
    peer_python: Annotated[str, typer.Option(help="Interpreter that has TRL, if this one has not.")] = sys.executable,
    peer_minutes: Annotated[float, typer.Option(min=0, help="After so long the peer counts as not running.")] = 15.0,
    as_json: Annotated[bool, typer.Option("--json", help="The figures as one JSON object.")] = False,
) -> None:
    """One GRPO config in TRL's form, trained by TRL and by us: do both do the same?

    Without --out: the same recorded rollouts through TRL's GRPOTrainer and through our update, in float32 on a tiny
    model. Losses must agree within 1e-5, gradients within 1e-4 of their norm; where the definitions differ, the table
    says how. Exits with code 1 where it is not so.

    With --out: whole runs on the same model, data, order and seeds, both evaluated by us on the same problems; curves,
    paired intervals and seconds go into OUT/parity.json. Sides, seeds and minutes may be spread over several calls.

    \b
    dapo bench parity --peer-python PATH
    dapo bench parity --out parity --model DIR --train a.jsonl --eval b.jsonl --sides dapo --minutes 9
    """
    if out is not None:
        changes = peer_keys(peer_overrides or [], model=model, steps=steps)
        sets = [f"data.train={json.dumps(train)}"] * bool(train) + [f"data.eval={json.dumps([eval_set])}"] * bool(
            eval_set
        )
        figures = run_both(
            out, config, changes, sets + (overrides or []),
            every=every, seeds=seeds, sides=sides, minutes=minutes, use_vllm=peer_vllm, python=peer_python,
        )  # fmt: skip
        show_runs(figures, out) if not as_json else typer.echo(json.dumps(figures))
        return
    given = {"--model": model, "--train": train, "--eval": eval_set, "--steps": steps, "--set": overrides}
    idle = [name for name, value in (given | {"--peer-set": peer_overrides, "--minutes": minutes}).items() if value]
    if idle:
        raise ConfigError(f"{idle[0]}: has no effect on recorded rollouts.", remedy="Add --out FOLDER to train.")
    from dapo.bench.parity.replay import compare, replay

    with tempfile.TemporaryDirectory() as name:
        replayed = replay(Path(name), read_config(config), peer_python, peer_minutes)
        gaps = [compare(folder, case, replayed.steps) for folder, case in replayed.cases.items()]
    if as_json:
        typer.echo(json.dumps({"peer": replayed.versions, "cases": [figures_of(gap) for gap in gaps]}))
    else:
        show(gaps, replayed.versions)
    if not all(gap.is_as_told for gap in gaps):
        raise typer.Exit(1)


def read_config(file: Path) -> dict[str, Any]:
    """TRL's keys; `dapo import-config` reads more kinds of files, but TRL itself does not."""
    import yaml

    try:
        keys = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        keys = None
    if not isinstance(keys, dict):
        raise ConfigError(f"--config {file}: is neither YAML nor JSON with TRL's keys.", remedy=f"See {SHIPPED}.")
    return keys


def figures_of(gap: Gap) -> dict[str, Any]:
    case = gap.case
    return {
        "case": case.name, "keys": case.keys, "differs": case.why, "loss": gap.loss, "gradient": gap.gradient,
        "move": gap.move, "updates": gap.updates, "clipped": gap.clipped, "ok": gap.is_as_told,
    }  # fmt: skip


def show(gaps: list[Gap], versions: str) -> None:
    from dapo.bench.parity.cases import PROMPTS, RESPONSES, STEPS
    from dapo.bench.parity.replay import GRADIENT, LOSS, MOVE

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
    console.print(f"Not as expected: {', '.join(wrong)}" if wrong else f"All {len(gaps)} cases as expected.")


def verdict(gap: Gap) -> str:
    if not gap.is_as_told:
        return "WRONG"
    return {"": "agrees", "rows": "agrees by its factor", "tokens": "agrees by its factor", "other": "differs"}[
        gap.case.differs
    ]


# ------------------------------------------------------------------ whole runs


def peer_keys(overrides: list[str], *, model: str, steps: int) -> dict[str, Any]:
    """Changes of TRL's config, as its own YAML would read them."""
    import yaml

    changes: dict[str, Any] = {}
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(f"--peer-set {text} is not KEY=VALUE.")
        changes[key] = yaml.safe_load(value)
    given = {"model_name_or_path": model, "max_steps": steps}
    return changes | {key: value for key, value in given.items() if value}


def run_both(
    out: Path, config: Path, changes: dict[str, Any], ours: list[str], *, every: int, seeds: str, sides: str,
    minutes: float, use_vllm: bool, python: str,
) -> dict[str, Any]:  # fmt: skip
    """Run what is asked for and missing; compare what both sides have finished."""
    from dapo.bench.parity.runs import SIDES, ParityPlan, check_plan, compared, is_finished, run_all
    from dapo.files import replace_file

    wanted = sides.split(",")
    unknown = [name for name in wanted if name not in SIDES]
    if unknown:
        raise ConfigError(f"--sides {sides}: no side {unknown[0]}.", remedy=f"Choose one of {', '.join(SIDES)}.")
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {seeds}: not numbers.", remedy="Write --seeds 0,1.") from None
    plan = ParityPlan(out, read_config(config) | changes, tuple(ours), every, use_vllm, python, minutes)
    check_plan(plan, plan.config(numbers[0]))
    run_all(plan, wanted, numbers)
    done = [seed for seed in numbers if all(is_finished(plan, side, seed) for side in SIDES)]
    missing = [f"{side}, seed {seed}" for seed in numbers for side in SIDES if not is_finished(plan, side, seed)]
    figures = (compared(plan, done) if done else {}) | {"missing": missing}
    replace_file(out / "parity.json", json.dumps(figures, indent=1))
    return figures


def show_runs(figures: dict[str, Any], out: Path) -> None:
    console = wide_console()
    if "points" in figures:
        console.print(f"{figures['problems']} problems, seeds {', '.join(map(str, figures['seeds']))}")
        table = table_of("step", "dapo", "TRL", "difference", "95 % interval", figures=slice(1, 5))
        for point in figures["points"]:
            change = point["difference"]
            interval = f"{change['low']:+.4f} to {change['high']:+.4f}"
            table.add_row(
                str(point["step"]), f"{point['dapo']:.4f}", f"{point['trl']:.4f}", f"{change['value']:+.4f}", interval
            )
        console.print(table)
        whole, pace = figures["difference"], figures["s_a_step"]
        apart = ", ".join(map(str, figures["apart_at"]))
        console.print(
            "The curves coincide within their paired intervals." if figures["coincide"] else f"Apart at step {apart}."
        )
        console.print(
            f"All evaluations after the first: {whole['value']:+.4f} ({whole['low']:+.4f} to {whole['high']:+.4f}). "
            f"Seconds per step, median: dapo {pace['dapo']:.2f}, TRL {pace['trl']:.2f}"
        )
    for name in figures["missing"]:
        console.print(f"Not finished: {name}. Repeat the command to resume.")
    console.print(f"Written to {out / 'parity.json'}")
