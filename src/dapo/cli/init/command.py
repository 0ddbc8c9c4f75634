"""`dapo init`: asks for model, data, card and goal, checks the data, and writes a recipe with a comment per line."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dapo.cli.data import Field, KeepNear, parse_fields, show
from dapo.cli.init.recipe import GOALS, Answers, Setting, settings_of, toml_of, with_choices
from dapo.cli.running.loading import loading
from dapo.commands import dapo_command, visible
from dapo.config import load_recipe
from dapo.config.hub import model_file
from dapo.config.machine import gpu_memory_gib
from dapo.config.model_shapes import BUNDLED, config_of, positions_of, shape_of
from dapo.config.own_verifier import GYM_PREFIX, own_verifier
from dapo.data.answer_types import answer_type
from dapo.data.check import Report, check
from dapo.data.contamination import SHARE
from dapo.data.inventory import Inventory, judge, take_inventory
from dapo.data.names import KNOWN
from dapo.data.prepare.clean import prepare
from dapo.data.problems import load_problems
from dapo.data.whole_file import refuse_existing
from dapo.errors import ConfigError
from dapo.files import replace_file
from dapo.planning.fit import card_gib, fit, refuse

if TYPE_CHECKING:
    from dapo.config import Config

LEAST_HELD, MOST_HELD = 20, 200  # problems of a set of one's own that are kept for evaluation: a tenth, within these
PROBE_RESPONSES = 8  # per problem of a probe
TOO_HARD, TOO_EASY = 0.02, 0.95  # pass rates of a probe
FEW_MIXED = 0.3  # groups of 8 that are mixed, below which groups of 16 are taken


def command(
    out: Annotated[Path, typer.Argument(help="The recipe to write; must be new.")] = Path("my-recipe.toml"),
    model: Annotated[str | None, typer.Option(help="A model folder, a name on the hub, or bundled.")] = None,
    data: Annotated[
        str | None, typer.Option(help="A file (CSV, JSONL, parquet), a known name (gsm8k, …), org/name or gym:TASK.")
    ] = None,
    card: Annotated[
        str | None, typer.Option(metavar="24gb|auto|cpu", help="GPU memory, a GPU's name, auto, or cpu.")
    ] = None,
    goal: Annotated[str | None, typer.Option(metavar="|".join(GOALS), help="A short first run, or a long one.")] = None,
    eval_: Annotated[
        str | None,
        typer.Option("--eval", metavar="DATA", help="Evaluation problems; default: a tenth is held out, at most 200."),
    ] = None,
    field: Field = None,
    keep_near: KeepNear = False,
    probe: Annotated[
        int, typer.Option(min=0, metavar="N", help="Measure how hard N problems are for the model; loads it.")
    ] = 0,
) -> None:
    """Write a first recipe for a model and data of your own, and the commands to run it.

    Asks for what is not given, if it is started in a terminal.

    \b
    dapo init
    dapo init mine.toml --model Qwen/Qwen2.5-1.5B-Instruct --data my.csv --card 24gb --goal try
    dapo init toy.toml --model bundled --data dapo.quickstart.task:train_problems --card cpu --probe 32
    """
    if out.suffix != ".toml":
        raise ConfigError(f"{out}: a recipe is a TOML file.", remedy=f"Name it {out.with_suffix('.toml')}.")
    refuse_existing(out)
    model = model or ask("Model (folder, hub name, bundled)", "--model", None)
    data = data or ask("Data (file, known name like gsm8k, org/name)", "--data", None)
    card = card or ask("GPU memory (24gb, auto, cpu)", "--card", "auto" if gpu_memory_gib() else "cpu")
    goal = goal or ask(f"Goal ({'; '.join(f'{name}: {what}' for name, what in GOALS.items())})", "--goal", "try")
    if goal not in GOALS:
        raise ConfigError(f"--goal {goal}: no such goal.", remedy=f"Use {' or '.join(GOALS)}.")
    if keep_near and eval_:
        raise ConfigError(
            f"--keep-near-duplicates: has no effect with --eval {eval_}: nothing is held out.",
            remedy="Leave one of them out.",
        )
    device_gib = None if card == "cpu" else card_gib(card, option="--card")

    fields = parse_fields(field) or {}
    report, verifier = checked(data, fields)
    show(report)
    answers = Answers(
        model=model,
        shape=shape_of(model),
        train=data,
        eval=(eval_,) if eval_ else (),
        fields=fields,
        verifier=verifier,
        goal=goal,
        n_problems=report.usable,
        prompt_tokens=prompt_limit(report, model),
        context=positions_of(config_of(model) or {}),
        has_chat_template=has_chat_template(model),
        on_cpu=device_gib is None,
    )
    fitted(answers, card, device_gib)  # refuses before anything is written
    if probe:
        answers = probed(answers, probe)
    if not eval_:
        answers = with_evaluation(answers, out, near=not keep_near)
    title = f"{visible(model)} on {visible(data)}. Every key: docs/keys.md, or dapo explain {visible(str(out))}."
    replace_file(out, toml_of(fitted(answers, card, device_gib), title))
    load_recipe(str(out), [])
    say_next(out, answers)


def ask(question: str, option: str, default: str | None) -> str:
    """From a terminal; elsewhere the default, or the option that is missing."""
    if is_terminal():
        answer: str = typer.prompt(question, default=default)
        return answer
    if default is None:
        raise ConfigError(
            f"{option}: missing, and there is no terminal to ask in.", remedy=f"Add {option}; see dapo init --help."
        )
    return default


def is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


# ------------------------------------------------------------------ data


def checked(data: str, fields: dict[str, str]) -> tuple[Report, str]:
    """What is in the file, and the verifier that can read its answers: its own, math, choice, or exact."""
    own = own_verifier(data)
    inventory = take_inventory([data], fields=fields or None, verifier=own or "math")
    verifier = own or verifier_for(inventory)
    if own is None and verifier != "math":
        judge(inventory.entries, verifier)
    return check(data, verifier=verifier, inventory=inventory), verifier


def verifier_for(inventory: Inventory) -> str:
    """By the answers of a set that math has judged: choice for letters, exact where math cannot read many of them.

    Rows without an answer are dropped whatever the verifier, and say nothing about the others.
    """
    given = [one for entry in inventory.entries for one in entry.references if one.text]
    n = sum(len(one.rows) for one in given)
    if sum(len(one.rows) for one in given if answer_type(one.text) == "choice") > n / 2:
        return "choice"
    return "exact" if sum(len(one.rows) for one in given if one.error) > n / 5 else "math"


def with_evaluation(answers: Answers, out: Path, *, near: bool = True) -> Answers:
    """Problems that are not trained on: a known test set, a gym's others, or a tenth of one's own, written aside.

    `near`: what equals one of that tenth up to numbers and names is not trained on either.
    """
    data, usable = answers.train, answers.n_problems
    known = KNOWN.get(data)
    if known is not None:
        return replace(answers, eval=(f"{data}:{known.eval}" if known.eval != known.train else "aime24",))
    if data.startswith(GYM_PREFIX):
        return replace(answers, eval=(f"{data}{'&' if '?' in data else '?'}size={MOST_HELD}",))
    n_held = min(MOST_HELD, usable // 10)
    if n_held < LEAST_HELD:
        typer.echo(f"No evaluation: {usable:,} problems are too few to hold some out. Name some with --eval.")
        return answers
    train = out.with_name(f"{out.stem}.train.jsonl")
    share = SHARE if near else 1.0  # a long template has most of its word sequences in common, whatever the numbers
    prepared = prepare(
        data, train, fields=answers.fields or None, verifier=answers.verifier, share=share, near=near, n_held=n_held,
        again=True,
    )  # fmt: skip
    n_left = len(prepared.problems)
    typer.echo(f"{train}: {n_left:,} problems to train on; {prepared.held_out}: {n_held:,} held out for evaluation.")
    return replace(answers, train=str(train), eval=(str(prepared.held_out),), fields={}, n_problems=n_left)


def prompt_limit(report: Report, model: str) -> int:
    """Room for 99 % of the prompts: about three characters a token, and the words around the question."""
    if model == BUNDLED:
        return 32
    wanted, limit = report.question_chars.p99 / 3 + 100, 256
    while limit < wanted:
        limit *= 2
    return limit


# ------------------------------------------------------------------ model


def has_chat_template(model: str) -> bool:
    """By its files; by its name where they are not here."""
    folder = Path(model)
    if (folder / "chat_template.jinja").is_file() or model_file(model, "chat_template.jinja") is not None:
        return True
    file = model_file(model, "tokenizer_config.json")
    if file is None:
        return any(mark in model.lower() for mark in ("instruct", "chat", "-it"))
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def fitted(answers: Answers, card: str, device_gib: float | None) -> list[Setting]:
    """The recipe's lines, with what makes it fit the card; the learning rate follows if that is an adapter."""
    lines = settings_of(answers)
    if device_gib is None or answers.shape is None:
        return lines
    found = fit(resolved(lines), answers.shape, device_gib)
    refuse(found, answers.model, card, device_gib, answers.shape, (), option="--card")
    is_adapter = any(one.key == "model.lora.rank" for one in found.choices)
    return with_choices(settings_of(replace(answers, is_adapter=is_adapter)), found.choices)


def resolved(lines: list[Setting]) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(toml_of(lines, "to be fitted"), encoding="utf-8")
        return load_recipe(str(path), []).config


def probed(answers: Answers, n: int) -> Answers:
    """How hard some problems are for the model; groups of 16 where groups of 8 would rarely be mixed."""
    from dapo.data.prepare.clean import write_problems

    with loading():
        from dapo.evaluation import probe
        from dapo.evaluation.offline import OfflineEval, run_offline_eval

    keys = {one.key: one.value for one in settings_of(answers)}
    problems = load_problems(answers.train, fields=answers.fields or None, verifier=answers.verifier).problems[:n]
    folder = Path(tempfile.mkdtemp())
    try:
        write_problems(folder / "probe.jsonl", problems, ".jsonl")
        offline = OfflineEval(
            model=answers.model, data=str(folder / "probe.jsonl"), use="train", k=PROBE_RESPONSES,
            temperature=1.0, top_p=1.0, max_response_tokens=keys["limits.max_response_tokens"],
            max_prompt_tokens=answers.prompt_tokens, template=keys["data.template"],
            chat=answers.has_chat_template, verifier=answers.verifier, seed=0, concurrent=256,
            device="cpu" if answers.on_cpu else "auto",
        )  # fmt: skip
        result = run_offline_eval(offline)
    finally:
        shutil.rmtree(folder)
    figures = probe.summary(probe.difficulties(result.problems, result.answers, k=PROBE_RESPONSES))
    rate, mixed = figures["pass_rate"], figures["mixed"]
    typer.echo(
        f"Probe of {len(problems):,} problems: pass rate {rate:.0%}, {figures['truncated']:.0%} truncated; of groups "
        f"of 8 responses {mixed['8']:.0%} would be mixed, of 16 {mixed['16']:.0%}."
    )
    if rate < TOO_HARD:
        typer.echo(
            "  Too hard: nearly all groups are all wrong and teach nothing. Easier problems, or a stronger model."
        )
    elif rate > TOO_EASY:
        typer.echo("  Too easy: there is little left to learn. Harder problems.")
    G = 16 if mixed["8"] < FEW_MIXED and mixed["16"] > mixed["8"] else 8
    return replace(
        answers, responses_per_prompt=G, why_responses=f"G; by a probe {mixed[str(G)]:.0%} of such groups are mixed"
    )


def say_next(out: Path, answers: Answers) -> None:
    run = Path("runs") / out.stem
    commands = [
        (dapo_command("explain", out), "what the run will do, and the memory it needs"),
        (dapo_command("train", out, "--out", run), "Ctrl-C saves; dapo resume continues"),
        (dapo_command("report", run), "curves, a diagnosis, and recorded responses token by token"),
    ]
    width = max(len(line) for line, _ in commands)
    typer.echo(f"\n{out}: a comment says why each line is there. Next:")
    for line, what in commands:
        typer.echo(f"  {line:<{width}}  # {what}")
    if answers.shape is None:
        typer.echo(f"  Memory was not estimated: the shape of {visible(answers.model)} is not known here.")
