"""`dapo play`: one episode of a model at the terminal, turn by turn; or play its part yourself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from dapo.cli.options import examination as exam
from dapo.cli.options.common import Trust
from dapo.cli.running.loading import loading
from dapo.commands import visible
from dapo.config.own_verifier import own_verifier
from dapo.config.sources import Source, environment_key, in_schema, is_mixture, train_sources
from dapo.console import Pipe
from dapo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dapo.config.schema import Config
    from dapo.evaluation.play import Played, Spoken
    from dapo.types import Problem

STYLES = {"prompt": "bold", "model": "bold green", "you": "bold green", "environment": "bold cyan"}


def command(
    model: Annotated[
        str, typer.Argument(help="Run folder, Hugging Face folder, hub name, or bundled (the toy model).")
    ] = "bundled",
    environment: exam.Environment = None,
    data: Annotated[
        str | None, typer.Option(help="Problem set; default: what the run trains on.", show_default=False)
    ] = None,
    problem: Annotated[
        str | None, typer.Option(help="Id of the problem; default: one by the seed.", show_default=False)
    ] = None,
    seed: exam.Seed = 0,
    temperature: exam.Temperature = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1, as in training, is none.")] = 1.0,
    you: Annotated[bool, typer.Option("--you", help="Type the model's turns yourself; no model is loaded.")] = False,
    max_turns: exam.MaxTurns = None,
    max_response_tokens: exam.MaxResponseTokens = None,
    max_prompt_tokens: exam.MaxPromptTokens = None,
    template: exam.Template = None,
    chat: exam.Chat = None,
    verifier: exam.Verifier = None,
    trust: Trust = False,
    device: exam.Device = "auto",
    engine: exam.Engine = "local",
    as_json: exam.AsJson = False,
) -> None:
    """See one episode turn by turn: what the model says, what the environment answers, and the score.

    \b
    dapo play runs/first --seed 3
    dapo play bundled --environment calculator
    dapo play --you --environment my_game:Game

    With --you a line is a turn. One that ends with a backslash goes on, as does an open code fence.
    """

    def is_used(key: str) -> bool:
        typed = {"verifier": verifier, "environment": environment}.get(in_schema(key).rpartition(".")[2], data)
        return typed is None and key != "rewards.parts" and not key.startswith("data.eval")

    config = exam.trained_with(model, is_used=is_used, trust=trust)
    source = None if data is not None else source_of(config, model, problem)
    said_by = None
    if source is None:
        verifier = verifier or own_verifier(data or "")
    else:
        problem = problem.removeprefix(f"{source.name}/") if problem is not None else None
        verifier, template = verifier or source.verifier, template or source.template
        if environment is None and config is not None:
            environment, said_by = source.environment or "none", environment_key(source, config)
    way = exam.way_of(
        model, max_response_tokens, max_prompt_tokens, template, chat, verifier,
        environment=environment, max_turns=max_turns, trust=trust,
    )  # fmt: skip
    if said_by is not None:
        way["environment_key"] = said_by

    from dataclasses import replace

    from dapo.data.problems import load_problems

    with loading():
        from dapo.data.prompts import PromptFormat
        from dapo.evaluation.offline import OfflineEval
        from dapo.evaluation.play import play, play_yourself

    where = source.path if source is not None else data or ""
    plan = OfflineEval(
        model=model, data=where, use="train", k=1, temperature=temperature, top_p=top_p, seed=seed, concurrent=1,
        device=device, engine=engine, **way,
    )  # fmt: skip
    fields = config.data.fields if config is not None and source is not None else None
    problems = load_problems(where, fields=fields or None, verifier=plan.verifier, use="train")
    asked = replace(chosen(list(problems), problem, seed, where), environment=plan.environment)
    shape = PromptFormat(plan.template, plan.chat, source.system_prompt if source is not None and plan.chat else "")
    console = Pipe(highlight=False, soft_wrap=True, stderr=as_json, quiet=as_json and not you)

    def listen(spoken: Spoken) -> None:
        if spoken.who != "you" or not sys.stdin.isatty():  # a terminal has shown what was typed
            show(console, spoken)

    if you:
        played = play_yourself(plan, asked, shape, listen, lambda: typed_turn(console))
    else:
        played = play(plan, asked, shape, listen)
    if as_json:
        typer.echo(json.dumps(as_object(played, asked, seed), ensure_ascii=False, indent=2))
    else:
        console.print(Text("end", style="bold"))
        console.print(f"  {visible(ending(played, asked))}")


def source_of(config: Config | None, model: str, problem: str | None) -> Source:
    """What a run trains on; of a mixture the source that a problem's id begins with, else the first."""
    if config is None:
        raise ConfigError(
            f"{model}: is a model and no run, so it has no problems of its own.",
            remedy="Name some: --data FILE, a known name (gsm8k, …), gym:TASK or pkg.mod:function.",
        )
    sources = train_sources(config)
    named = (problem or "").partition("/")[0]
    return next((source for source in sources if is_mixture(config) and source.name == named), sources[0])


def chosen(problems: list[Problem], wanted: str | None, seed: int, where: str) -> Problem:
    if wanted is None:
        return problems[seed % len(problems)]
    for problem in problems:
        if problem.id == wanted:
            return problem
    raise DataError(
        f"--problem {wanted}: {where} has no problem of that id.",
        remedy=f"One that it has: {problems[0].id}. Without --problem the seed chooses one of {len(problems):,}.",
    )


# ------------------------------------------------------------------ in and out of the terminal


def typed_turn(console: Pipe, read: Callable[[], str] = input) -> str | None:
    """A turn as it is typed, None at the end of the input."""
    if sys.stdin.isatty():
        console.print(Text("you", style=STYLES["you"]))
    lines: list[str] = []
    while True:
        try:
            line = read()
        except EOFError:
            return "\n".join(lines) or None
        goes_on = line.endswith("\\")
        lines.append(line.removesuffix("\\"))
        if not goes_on and sum(one.startswith("```") for one in lines) % 2 == 0:
            return "\n".join(lines)


def show(console: Pipe, spoken: Spoken) -> None:
    """Who, and below it what was said, as it is."""
    marks = [word for word, holds in (("tool call", spoken.called), ("failed", spoken.failed)) if holds]
    console.print(Text(" · ".join([spoken.who, *marks]), style=STYLES[spoken.who]))
    for line in spoken.text.strip("\n").split("\n"):
        console.print(f"  {visible(line)}")


def ending(played: Played, problem: Problem) -> str:
    if played.judgement is None:
        return "Given up: no verdict."
    judgement = played.judgement
    parts = [f"{judgement.verdict.value} by {played.judged_by}", f"reward {judgement.value:+g}"]
    if judgement.extracted is not None:
        parts.append(f"answer {judgement.extracted}")
    if problem.answer:
        parts.append(f"reference {problem.answer}")
    if judgement.message:
        parts.append(judgement.message)
    counted = counts(played) | ({} if played.n_tokens is None else {"tokens": played.n_tokens})
    return "; ".join([*parts, *(f"{name.replace('_', ' ')} {n}" for name, n in counted.items())])


def counts(played: Played) -> dict[str, int]:
    return {
        "turns": sum(spoken.who in ("model", "you") for spoken in played.spoken),
        "tool_calls": sum(spoken.called or spoken.failed for spoken in played.spoken),
        "failures": sum(spoken.failed for spoken in played.spoken),
    }


def as_object(played: Played, problem: Problem, seed: int) -> dict[str, Any]:
    judgement = played.judgement
    return {
        "problem": problem.id,
        "question": problem.question,
        "reference": problem.answer,
        "environment": problem.environment or None,
        "seed": seed,
        "spoken": [asdict(spoken) for spoken in played.spoken],
        "stop_reason": played.stop_reason,
        "verdict": None if judgement is None else judgement.verdict,
        "value": None if judgement is None else judgement.value,
        "extracted": None if judgement is None else judgement.extracted,
        "message": "" if judgement is None else judgement.message,
        "judged_by": played.judged_by or None,
        **counts(played),
        "tokens": played.n_tokens,
    }
