"""`dapo data`: check a problem set, clean it, and measure how hard it is for a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dapo.chat_client import ChatServer
from dapo.cli.data_probe import probe_command
from dapo.commands import dapo_command, set_options
from dapo.config.own_verifier import own_verifier
from dapo.console import Pipe
from dapo.data.check import Report, check
from dapo.data.contamination import SHARE, looked_for
from dapo.data.gym.source import tasks
from dapo.data.prepare.clean import Prepared, prepare
from dapo.data.prompts import TEMPLATES, PromptFormat, Tokenizer
from dapo.errors import DataError

SHOWN = 5  # examples of a defect in the table; --json has all

command = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
command.command("probe")(probe_command)

Field = Annotated[
    list[str] | None,
    typer.Option("--field", metavar="NAME=COLUMN", help="Map a column (config: data.fields), e.g. answer=meta.label."),
]
Against = Annotated[
    list[str] | None,
    typer.Option("--against", metavar="FILE_OR_NAME", help="An evaluation set to compare with; repeatable."),
]
Verifier = Annotated[
    str | None,
    typer.Option(
        help="The verifier that must be able to parse every reference answer; default: the set's own, else math.",
        show_default=False,
    ),
]
Share = Annotated[
    float,
    typer.Option(
        "--ngram-overlap",
        min=0.05,
        max=1.0,
        help="Fraction of an evaluation problem's 13-grams that counts as contamination.",
    ),
]
KeepNear = Annotated[
    bool,
    typer.Option(
        "--keep-near-duplicates",
        help="Keep problems that differ from an evaluation problem by numbers and names only.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@command.command("check")
def check_command(
    file: Annotated[
        str, typer.Argument(help="A file, a known name (gsm8k, …), org/name, gym:TASK or pkg.mod:function.")
    ],
    field: Field = None,
    against: Against = None,
    share: Share = SHARE,
    verifier: Verifier = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A model folder; its tokenizer counts the prompt tokens.")
    ] = None,
    template: Annotated[str, typer.Option(help=f"Prompt template for the count: {', '.join(TEMPLATES)}.")] = "dapo",
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Count the prompts over this limit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a problem set for duplicates, conflicting answers, unparseable references and contamination.

    Example: dapo data check train.jsonl --against aime24 --against gsm8k:test
    """
    if max_prompt_tokens is not None and tokenizer is None:
        raise DataError("--max-prompt-tokens: tokens cannot be counted.", remedy="Add --tokenizer MODEL_FOLDER.")
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    prompt = PromptFormat(template, chat=bool(loaded and loaded.chat_template))
    report = check(
        file, fields=parse_fields(field), verifier=verifier or own_verifier(file) or "math", against=against or (),
        share=share, tokenizer=loaded,
        prompt=prompt, max_prompt_tokens=max_prompt_tokens,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(report.as_json(), ensure_ascii=False, indent=1))
        return
    show(report)
    if own_verifier(file):  # nobody has seen such a set as a file
        show_examples(report)


@command.command("gym")
def gym_command(as_json: AsJson = False) -> None:
    """List the procedural tasks of reasoning-gym, each with a right answer and its parameters.

    Example: dapo data gym, then dapo data check gym:countdown?min_numbers=3
    """
    found = tasks()
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False, indent=1))
        return
    table = Table("task", "an answer", "parameters and their defaults", box=None, padding=(0, 2, 0, 0))
    for one in found:
        table.add_row(one["task"], brief(one["answer"])[:40], one["parameters"])
    Pipe(highlight=False).print(table)


@command.command("prepare")
def prepare_command(
    file: Annotated[list[str], typer.Argument(help="Files or names; several are merged into one set.")],
    out: Annotated[Path, typer.Option("--out", help="The cleaned set: .jsonl or .parquet. Never overwritten.")],
    field: Field = None,
    against: Against = None,
    share: Share = SHARE,
    verifier: Verifier = None,
    n_held: Annotated[
        int, typer.Option("--hold-out", min=0, help="Hold out this many problems for evaluation: OUT.held-out.jsonl.")
    ] = 0,
    keep_near: KeepNear = False,
    integer_answers: Annotated[
        bool,
        typer.Option(
            "--integer-answers", help="Rewrite problems to ask for one integer; drop those that cannot be rewritten."
        ),
    ] = False,
    llm: Annotated[
        str | None, typer.Option(metavar="URL", help="With --integer-answers: an OpenAI-compatible server.")
    ] = None,
    model: Annotated[str, typer.Option(help="The model's name at that server.")] = "",
    llm_timeout_s: Annotated[float, typer.Option(min=1.0, help="Timeout of one request, in seconds.")] = 300.0,
    llm_tries: Annotated[int, typer.Option(min=1, help="Attempts per problem when the server fails.")] = 3,
    llm_workers: Annotated[int, typer.Option(min=1, max=256, help="Concurrent requests.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Write a cleaned problem set; OUT.manifest.json lists what was dropped and why.

    Example: dapo data prepare dapo-math-17k --against aime24 --out train.jsonl

    Your own file, with problems held out for evaluation: dapo data prepare my.jsonl --hold-out 200 --out train.jsonl
    """
    if llm is not None and not integer_answers:
        raise DataError(f"--llm {llm}: has no effect without --integer-answers.", remedy="Add --integer-answers.")
    if keep_near and not n_held and not against:
        raise DataError(
            "--keep-near-duplicates: has no effect without --hold-out or --against.",
            remedy="Add one of them, or leave it out.",
        )
    server = ChatServer(llm, model, timeout_s=llm_timeout_s, tries=llm_tries) if llm is not None else None
    prepared = prepare(
        file, out, fields=parse_fields(field), verifier=verifier or common_verifier(file), against=against or (),
        share=share, near=not keep_near, n_held=n_held, integer_answers=integer_answers, server=server,
        n_workers=llm_workers,
    )  # fmt: skip
    typer.echo(json.dumps(summary(prepared), ensure_ascii=False)) if as_json else show_prepared(
        prepared, looked_for(share=share, near=not keep_near)
    )


def common_verifier(sources: list[str]) -> str:
    """The verifier that every set brings, else math."""
    brought = {own_verifier(source) or "math" for source in sources}
    return brought.pop() if len(brought) == 1 else "math"


def parse_fields(pairs: list[str] | None) -> dict[str, str] | None:
    """`["question=prompt"]` as a mapping."""
    if not pairs:
        return None
    split = [pair.partition("=") for pair in pairs]
    for pair, (name, _, column) in zip(pairs, split, strict=True):
        if not name or not column:
            raise DataError(f"--field {pair}: not NAME=COLUMN.", remedy="Write it as --field question=prompt.")
    return {name: column for name, _, column in split}


def load_tokenizer(folder: Path) -> Tokenizer:
    """From a local folder only: nothing is downloaded, and no code in the folder is run."""
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise DataError(f"--tokenizer {folder}: no such folder.", remedy="Name a model folder with tokenizer.json.")
    try:
        loaded: Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"--tokenizer {folder}: cannot be loaded: {str(error).splitlines()[0]}", remedy="It needs a tokenizer.json."
        ) from None
    return loaded


def show(report: Report) -> None:
    """The report as a table, then examples of each defect."""
    table = Table(title=f"{report.file} ({report.schema})", title_justify="left", show_header=False)
    for name, value in lines(report):
        table.add_row(name, value)
    console = Pipe()
    console.print(table)
    for heading, examples in defects(report):
        console.print(f"\n{heading}")
        for example in examples[:SHOWN]:
            console.print(f"  {example}", highlight=False)
        if len(examples) > SHOWN:
            console.print(f"  … and {len(examples) - SHOWN:,} more: --json lists them all")


def show_examples(report: Report) -> None:
    """The first problems as they are asked, with their references."""
    console = Pipe()
    for number, example in enumerate(report.examples, start=1):
        console.print(f"\nExample {number}", highlight=False)
        console.print(example.question.rstrip(), highlight=False)
        console.print(f"Answer: {example.answer or '(any that fits)'}", highlight=False)


def lines(report: Report) -> list[tuple[str, str]]:
    once = (
        f" = {report.rows_once:,} x {report.copies}: repeated copies of one file, counted once below"
        if report.copies > 1
        else ""
    )
    spread = ", ".join(f"{n:,} x {times}" for times, n in report.times.items())
    chars = report.question_chars
    rows = [
        ("rows", f"{report.rows:,}{once}"),
        ("distinct problems", f"{report.distinct:,} (after normalizing white space and case; {spread})"),
        ("duplicate rows", f"{report.duplicate_rows:,}"),
        ("conflicting answers", f"{len(report.conflicts):,} problems"),
        ("rows without reference", f"{len(report.no_reference):,}"),
        ("unparseable references", f"{len(report.unparseable):,} rows"),
        ("usable problems", f"{report.usable:,}"),
        ("answers", ", ".join(f"{kind} {n:,}" for kind, n in report.answer_types.items())),
        (
            "question characters",
            f"{chars.min:,} to {chars.max:,}, median {chars.median:,}, 99 % under {chars.p99 + 1:,}",
        ),
    ]
    if report.prompt_tokens is not None:
        tokens = report.prompt_tokens
        rows.append(
            (
                "prompt tokens",
                f"{tokens.min:,} to {tokens.max:,}, median {tokens.median:,}, 99 % under {tokens.p99 + 1:,}",
            )
        )
    if report.over_limit is not None:
        rows.append(("prompts over the limit", f"{report.over_limit:,} (dropped, never truncated)"))
    rows += [(f"{what} removed", f"{n:,} rows") for what, n in report.removed.items()]
    for one in report.contamination:
        kinds = {"exact": "exact", "loose": "loose", "13-gram": "n-gram", "near-duplicate": "near-duplicate"}
        found = ", ".join(f"{shown} {one.count(how):,}" for shown, how in kinds.items())
        hit = f"{one.n_hit:,} of its {one.n_evaluation:,} problems; largest 13-gram overlap {one.max_share:.2f}"
        rows.append((f"shared with {Path(one.name).name}", f"{found}: {hit}"))
    return rows


def defects(report: Report) -> list[tuple[str, list[str]]]:
    """Examples by heading; only headings that have any."""
    conflicts = [
        f"{' / '.join(f'{answer} (row {rows[0]})' for answer, rows in one.answers.items())}: {brief(one.question)}"
        for one in report.conflicts
    ]
    found = [
        ("Conflicting answers", conflicts),
        ("Rows without reference", [f"row {row}" for row in report.no_reference]),
        ("Unparseable references", [f"row {bad.row}: {brief(bad.answer)}: {bad.why}" for bad in report.unparseable]),
        (
            "Read as lists of two numbers (if the comma is a decimal comma, write a point)",
            [f"row {one.row}: {brief(one.answer)}" for one in report.decimal_commas],
        ),
    ]
    for one in report.contamination:
        shared = [f"{overlap.how} {overlap.share:.2f}: {brief(overlap.question)}" for overlap in one.found]
        found.append((f"Shared with {one.name}", shared))
    return [(heading, examples) for heading, examples in found if examples]


def brief(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 90 else f"{flat[:89]}…"


def summary(prepared: Prepared) -> dict[str, Any]:
    problems = prepared.problems
    return {
        "out": str(prepared.out),
        "manifest": str(prepared.manifest),
        "problems": len(problems),
        "sha256": problems.sha256,
        "dropped": problems.dropped,
        "restated": prepared.n_restated,
        "held_out": str(prepared.held_out) if prepared.held_out else None,
        "like_held_out": prepared.n_like_held,
    }


def show_prepared(prepared: Prepared, resemblance: str) -> None:
    """What was written; `resemblance` says how problems were compared with the held-out ones."""
    problems = prepared.problems
    typer.echo(f"{prepared.out}: {len(problems):,} problems; {prepared.manifest.name} lists what was dropped and why.")
    for note in problems.notes:
        if not note.startswith("dropped"):
            typer.echo(f"  {note}")
    for why, n in problems.dropped.items():
        typer.echo(f"  dropped {n:,}: {why}")
    if prepared.n_restated:
        typer.echo(f"  rewrote {prepared.n_restated:,} to ask for an integer")
    if prepared.held_out:
        typer.echo(
            f"{prepared.held_out}: {prepared.n_held:,} problems held out; {prepared.n_like_held:,} others resemble one "
            f"of them and were dropped."
        )
        typer.echo(f"  Compared by: {resemblance}.")
        evaluation = json.dumps([str(prepared.held_out)], ensure_ascii=False)
        keys = {"data.train": prepared.out, "data.eval": evaluation}
        typer.echo(f"Train: {dapo_command('train', 'RECIPE', *set_options(keys))}")
