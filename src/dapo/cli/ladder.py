"""`dapo ladder`: the paper's ablation ladder on any recipe; every arm is an ordinary run; one table, one plot."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dapo.cli.options.common import Trust
from dapo.errors import ConfigError

if TYPE_CHECKING:
    from dapo.ablation.arms import Arm
    from dapo.ablation.plan import Job
    from dapo.ablation.run import LadderOutcome

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
# Two tiny steps of every arm: a smoke test, not a result.
SMOKE = (
    "train.steps=2", "train.updates_per_step=2", "sampling.prompts_per_step=4", "sampling.responses_per_prompt=4",
    "eval.every_steps=2", "eval.k=1", "checkpoint.every_steps=0",
)  # fmt: skip


def command(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe or a TOML file.")] = "ladder",
    arms: Annotated[
        str, typer.Option(help="ladder (naive GRPO to DAPO), all, or comma-separated names: naive,clip-higher,dapo.")
    ] = "ladder",
    seeds: Annotated[
        str | None, typer.Option(help="Comma-separated seeds of every arm. [0,1,2; with --smoke: 0]")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Budget of every arm: steps=N, tokens=N (generated) or minutes=N. Default: the recipe's."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Concurrent runs. Default: one per core, each with one thread; one on a GPU."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder; the same command again resumes it. Default: runs/ladder-RECIPE.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[ARM:]KEY=VALUE",
            help="Override a key in every arm (train.lr=1e-4) or in one (naive:train.lr=5e-5).",
        ),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Smoke test: two tiny steps of every arm.")] = False,
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Start no runs; only show the table of the finished ones.")
    ] = False,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Run the ablation from naive GRPO to DAPO with several seeds; each arm adds one technique.

    Every arm is an ordinary run, DIR/ARM/seed-0 and so on. Ctrl-C stops at checkpoints; the same command resumes.

    \b
    dapo ladder --smoke
    dapo ladder --seeds 0,1,2 --out runs/ladder
    dapo ladder quickstart --arms dapo,dapo-fast --budget tokens=500000
    """
    from dapo.ablation.arms import choose_arms
    from dapo.ablation.plan import State, parse_budget, parse_seeds, plan_jobs, split_set
    from dapo.ablation.run import claimed, default_jobs, run_jobs
    from dapo.ablation.summary import machine_of, settings_of
    from dapo.ablation.terminal import show, view
    from dapo.ablation.write import write_all
    from dapo.data.inputs import check_inputs
    from dapo.trainer.trust import refuse_strangers_recipe

    if smoke and budget is not None:
        raise ConfigError(f"--budget {budget}: --smoke has its own.", remedy="Leave out one of them.")
    chosen, own = choose_arms(arms), parse_budget(budget)
    extra = [*(SMOKE if smoke else ()), *(set_ or [])]
    folder = out or default_folder(recipe, is_smoke=smoke)
    wanted = parse_seeds(seeds if seeds is not None else "0" if smoke else "0,1,2")
    refuse_own_keys(set_ or [], own.kind)
    for_all = [text for text in set_ or [] if not split_set(text)[0]]
    refuse_strangers_recipe(recipe, for_all, trust=trust or table_only)
    planned = plan_jobs(recipe, chosen, wanted, own, extra, folder, is_table_only=table_only)
    done = done_so_far(planned, folder) if table_only else None
    if done is None:
        check_inputs(planned[0].config)
    with claimed(folder) as lock:
        machine = machine_of(folder, is_running=done is None and any(job.state is not State.DONE for job in planned))
        if done is not None:
            outcome = done
        else:
            with view(planned, is_quiet=as_json) as progress:
                at_once = jobs or default_jobs(planned[0].config)
                outcome = run_jobs(planned, recipe, at_once=at_once, lock=lock, progress=progress)
        if outcome.is_stopped:
            typer.echo(
                f"Stopped. {len(outcome.done)} of {len(planned)} runs are done. Resume with the same command.", err=True
            )
            raise typer.Exit(EXIT_INTERRUPTED)
        config = planned[0].config
        spent = str(own) if own.kind else f"steps={config.train.steps}"
        settings = settings_of(recipe, planned, seeds=wanted, budget=spent, command=typed_command(), extra=extra)
        summary = summary_of(chosen, outcome, settings, machine)
        written = write_all(summary, folder)
    if as_json:
        typer.echo(json.dumps(summary, ensure_ascii=False, allow_nan=False))
    else:
        show(summary, written)
    if outcome.failed:
        for name, text in outcome.failed.items():
            typer.echo(f"{name} failed:\n{text}", err=True)
        raise typer.Exit(EXIT_FAILED)


def done_so_far(planned: Sequence[Job], folder: Path) -> LadderOutcome:
    from dapo.ablation.plan import State
    from dapo.ablation.run import LadderOutcome

    done = [job for job in planned if job.state is State.DONE]
    if not done:
        raise ConfigError(
            f"--table-only: no run under {folder} has finished.", remedy="Leave out --table-only to run them."
        )
    return LadderOutcome(done=done)


def summary_of(
    chosen: Sequence[Arm], outcome: LadderOutcome, settings: dict[str, Any], machine: dict[str, Any]
) -> dict[str, Any]:
    from dapo.ablation.measure import measure
    from dapo.ablation.summary import summarise

    done = sorted(outcome.done, key=lambda job: job.seed)
    runs = {arm.name: [measure(job) for job in done if job.arm == arm] for arm in chosen}
    return summarise(chosen, runs, settings=settings, machine=machine, failed=outcome.failed)


def default_folder(recipe: str, *, is_smoke: bool) -> Path:
    """The same for the same recipe, so that the same command resumes; a smoke test is always new."""
    name = f"ladder-smoke-{time.strftime('%Y%m%d-%H%M%S')}" if is_smoke else f"ladder-{Path(recipe).stem}"
    return Path("runs") / name


def refuse_own_keys(sets: list[str], budget: str) -> None:
    """Keys that the ladder itself sets."""
    from dapo.ablation.plan import split_set

    for text in sets:
        key = split_set(text)[1].partition("=")[0].strip()
        if key in ("train.seed", "preset") or (budget and key == "train.steps"):
            option = {"train.seed": "--seeds", "preset": "--arms"}.get(key, "--budget")
            raise ConfigError(f"--set {text}: the ladder sets {key} itself.", remedy=f"Use {option}.")


def typed_command() -> str:
    """The command that made the runs: without the options that only print the table."""
    return shlex.join(["dapo", *(argument for argument in sys.argv[1:] if argument not in ("--table-only", "--json"))])
