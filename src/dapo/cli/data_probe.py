"""`dapo data probe`: pass rate and length per problem under a model, and how many groups will be mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dapo.cli.options import examination as exam
from dapo.cli.options.common import Trust
from dapo.cli.running.loading import loading
from dapo.config.own_verifier import own_verifier
from dapo.console import Pipe
from dapo.data.inputs import check_set
from dapo.errors import DataError

if TYPE_CHECKING:
    from dapo.evaluation.probe import Difficulty

SHOWN = 20  # problems in the table; --json and --out have all


def probe_command(
    file: Annotated[str, typer.Argument(help="A file, a known name (gsm8k, aime24, …), org/name or pkg.mod:function.")],
    model: exam.Model,
    k: Annotated[int, typer.Option(min=1, max=10**6, help="Responses per problem.")] = 8,
    temperature: exam.Temperature = 1.0,
    max_response_tokens: exam.MaxResponseTokens = None,
    max_prompt_tokens: exam.MaxPromptTokens = None,
    template: exam.Template = None,
    chat: exam.Chat = None,
    verifier: exam.Verifier = None,
    environment: exam.Environment = None,
    max_turns: exam.MaxTurns = None,
    trust: Trust = False,
    seed: exam.Seed = 0,
    concurrent: exam.Concurrent = 256,
    device: exam.Device = "auto",
    engine: exam.Engine = "local",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="One line per problem. FILE.responses.jsonl next to it makes the probe resumable.",
        ),
    ] = None,
    select: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="LOW HIGH", help="Keep problems with a pass rate in this range."),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Where --select writes what it keeps.")
    ] = None,
    as_json: exam.AsJson = False,
) -> None:
    """Measure pass rate, length and truncation per problem under a model, sampled as in training.

    \b
    dapo data probe dapo.quickstart.task:eval_problems --model bundled
    dapo data probe train.jsonl --model M --out probe.jsonl --select 0.1 0.9 --write medium.jsonl
    The --out file also seeds predictive selection: --set sampling.posteriors=probe.jsonl
    """
    check_selection(select, write)
    journal = check_out(out)
    verifier = verifier or own_verifier(file)
    check_set(file, verifier, use="train")

    from dapo.data.prepare.clean import write_problems
    from dapo.data.whole_file import write_whole
    from dapo.files import replace_file

    with loading():
        from dapo.evaluation import probe
        from dapo.evaluation.offline import OfflineEval, run_offline_eval

    offline = OfflineEval(
        model=model, data=file, use="train", k=k, temperature=temperature, top_p=1.0,
        seed=seed, concurrent=concurrent, device=device, engine=engine,
        **exam.way_of(
            model, max_response_tokens, max_prompt_tokens, template, chat, verifier,
            data=file, environment=environment, max_turns=max_turns, trust=trust,
        ),
    )  # fmt: skip
    with exam.progress_bar() as on_progress:
        result = run_offline_eval(offline, journal=journal, on_progress=on_progress)
    table = probe.difficulties(result.problems, result.answers, k=k)
    figures: dict[str, Any] = {"set": file, "model": model, "k": k, "dropped_prompts": result.n_dropped}
    figures |= probe.summary(table)
    lines = [one.as_json() for one in table]
    if out is not None:
        replace_file(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    if select is not None and write is not None:
        kept = probe.select(result.problems, table, *select)
        write_whole(write, lambda path: write_problems(path, kept, write.suffix.lower()))
        figures |= {"selected": len(kept), "written": str(write)}
    if as_json:
        typer.echo(json.dumps(figures | {"per_problem": lines}, ensure_ascii=False, indent=1))
    else:
        show(figures, table)


def check_selection(select: tuple[float, float] | None, write: Path | None) -> None:
    """--select needs --write and vice versa; an output that cannot be written fails before the model is loaded."""
    from dapo.data.whole_file import refuse_existing

    if (select is None) != (write is None):
        given, missing = ("--select", "--write FILE.jsonl") if write is None else ("--write", "--select LOW HIGH")
        raise DataError(f"{given}: has no effect alone.", remedy=f"Add {missing}.")
    if select is None or write is None:
        return
    low, high = select
    if not 0 <= low <= high <= 1:
        raise DataError(
            f"--select {low:g} {high:g}: not 0 <= LOW <= HIGH <= 1.", remedy="For example: --select 0.1 0.9"
        )
    if write.suffix.lower() not in (".jsonl", ".parquet"):
        raise DataError(f"--write {write}: neither .jsonl nor .parquet.", remedy="Name a .jsonl file.")
    refuse_existing(write)


def check_out(out: Path | None) -> Path | None:
    """The journal that belongs to --out. A file that no probe of ours left there is not overwritten."""
    if out is None:
        return None
    journal = out.with_name(f"{out.stem}.responses.jsonl")
    if out.exists() and not journal.exists():
        raise DataError(f"--out {out}: exists already.", remedy="Name another file, or remove it first.")
    return journal


def show(figures: dict[str, Any], table: list[Difficulty]) -> None:
    console = Pipe(highlight=False, soft_wrap=True)
    console.print(
        f"{figures['set']}: {figures['problems']:,} problems x {figures['k']} responses; pass rate "
        f"{figures['pass_rate']:.3f}, mean length {figures['mean_tokens']:.0f} tokens, truncated "
        f"{100 * figures['truncated']:.1f} %"
        + (f"; {figures['dropped_prompts']:,} prompts over the limit dropped" if figures["dropped_prompts"] else ""),
    )
    if "mean_value" in figures:
        console.print(
            f"graded rewards: mean value {figures['mean_value']:.3f}; a response counts as passed where its value is "
            "above its problem's mean, and a group as mixed where values differ"
        )
    rates = Table("pass rate", "problems", "fraction", box=None, padding=(0, 2, 0, 0))
    for row in figures["histogram"]:
        name = f"{row['from']:g}" if row["from"] == row["to"] else f"{row['from']:g} – {row['to']:g}"
        fraction = row["problems"] / figures["problems"]
        rates.add_row(name, f"{row['problems']:,}", f"{100 * fraction:5.1f} %  {'█' * round(30 * fraction)}")
    console.print(rates)
    expected = "   ".join(f"G = {G}: {100 * fraction:.1f} %" for G, fraction in figures["mixed"].items())
    console.print(f"groups expected to be mixed (neither all correct nor all wrong): {expected}")
    problems = Table("id", "pass rate", "tokens", "truncated", "question", box=None, padding=(0, 2, 0, 0))
    for one in table[:SHOWN]:
        question = " ".join(one.question.split())
        problems.add_row(
            one.id[:24], f"{one.pass_rate:.2f}", f"{one.mean_tokens:.0f}", f"{one.truncated:.2f}", question[:60]
        )
    console.print(problems)
    if len(table) > SHOWN:
        console.print(f"… and {len(table) - SHOWN:,} more: --json and --out list them all")
    if "selected" in figures:
        console.print(f"{figures['written']}: {figures['selected']:,} problems selected")
