"""`dapo eval`: avg@k, pass@k, maj@k of a model or a run on a problem set, resumable response by response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dapo.cli.options import examination as exam
from dapo.cli.options.common import Trust
from dapo.cli.running.loading import loading
from dapo.config.own_verifier import own_verifier
from dapo.console import Pipe
from dapo.data.inputs import check_set


def command(
    model: exam.Model,
    data: Annotated[
        str, typer.Option(help="Problem set: file, known name (aime24, gsm8k, …), gym:TASK or pkg.mod:function.")
    ],
    k: Annotated[int, typer.Option(min=1, max=10**6, help="Responses per problem.")] = 32,
    temperature: exam.Temperature = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; the papers evaluate at 0.7.")] = 0.7,
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
    out: Annotated[Path | None, typer.Option(help="JSONL of all responses; appends to an existing file.")] = None,
    as_json: exam.AsJson = False,
) -> None:
    """Score a model on a problem set: avg@k, pass@k, maj@k with 95 % bootstrap intervals over problems.

    \b
    dapo eval --model bundled --data dapo.quickstart.task:eval_problems --k 8
    dapo eval --model runs/first --data aime24 --k 32 --out aime.jsonl
    """
    verifier = verifier or own_verifier(data)
    check_set(data, verifier, use="eval")

    with loading():
        from dapo.evaluation.offline import OfflineEval, run_offline_eval
        from dapo.evaluation.runner import summarise

    offline = OfflineEval(
        model=model, data=data, use="eval", k=k, temperature=temperature, top_p=top_p,
        seed=seed, concurrent=concurrent, device=device, engine=engine,
        **exam.way_of(
            model, max_response_tokens, max_prompt_tokens, template, chat, verifier,
            data=data, environment=environment, max_turns=max_turns, trust=trust,
        ),
    )  # fmt: skip
    with exam.progress_bar() as on_progress:
        result = run_offline_eval(offline, journal=out, on_progress=on_progress)
    line = summarise(data, result.problems, result.answers, k=k) | {"dropped_prompts": result.n_dropped}
    if as_json:
        typer.echo(json.dumps(line, ensure_ascii=False, indent=2))
    else:
        print_table(line)


def print_table(line: dict[str, Any]) -> None:
    table = Table("score", "value", "95 % interval", box=None, padding=(0, 2, 0, 0))
    for score in ("avg@k", "pass@k", "maj@k"):
        name = score.replace("k", str(line["k"]))
        if line[score] is None:
            table.add_row(name, "n/a", "the verifier extracts no answer to vote with")
        else:
            low, high = line[f"{score}_interval"]
            table.add_row(name, f"{line[score]:.4f}", f"{low:.4f} – {high:.4f}")
    for source, value in line.get("by_source", {}).items():
        table.add_row(f"avg on {source}", f"{value:.4f}", "")
    console = Pipe(highlight=False)
    console.print(table)
    console.print(
        f"\n{line['problems']} problems x {line['k']}; unparseable {100 * line['unparseable']:.1f} %, "
        f"truncated {100 * line['truncated']:.1f} %, mean length {line['mean_tokens']:.0f} tokens"
        + (f"; {line['faults']} responses aborted by the engine (non-finite logits)" if line.get("faults") else "")
        + (f"; {line['dropped_prompts']} prompts over the limit dropped" if line["dropped_prompts"] else "")
    )
    if "mean_value" in line:
        console.print(
            f"graded rewards: mean value {line['mean_value']:.4f}; the scores above count what the verifier calls "
            "correct"
        )
