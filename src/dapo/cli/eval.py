"""`dapo eval`: avg@k, pass@k, maj@k of a model or a run on a problem set, resumable response by response."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dapo.config.model_shapes import model_location
from dapo.errors import ConfigError, DataError
from dapo.types import Verdict


def command(
    model: Annotated[str, typer.Option(help="Hugging Face folder, hub name, run folder, or embedded.")],
    data: Annotated[str, typer.Option(help="Problem set: file, known name (aime24, gsm8k, …) or pkg.mod:function.")],
    k: Annotated[int, typer.Option(min=1, help="Responses per problem.")] = 32,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; the papers evaluate at 0.7.")] = 0.7,
    max_response_tokens: Annotated[int, typer.Option(min=2, help="Limit of a response.")] = 2048,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are dropped and counted.")] = 2048,
    template: Annotated[str, typer.Option(help="Prompt template: dapo, boxed, gsm8k, few-shot or raw.")] = "dapo",
    chat: Annotated[bool, typer.Option(help="Use the tokenizer's chat template.")] = True,
    verifier: Annotated[str, typer.Option(help="How answers are judged.")] = "math",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling noise.")] = 0,
    concurrent: Annotated[int, typer.Option(min=1, help="Responses written at the same time.")] = 256,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="JSONL of all responses; an existing one is gone on with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score a model on a problem set: avg@k, pass@k, maj@k with 95 % bootstrap intervals over problems.

    \b
    dapo eval --model embedded --data dapo.quickstart.task:eval_problems --k 8 --template raw --no-chat
    dapo eval --model runs/first --data aime24 --k 32 --out aime.jsonl
    """
    from dapo.data.problems import load_problems
    from dapo.data.prompts import PromptFormat, encode_problems
    from dapo.evaluation.runner import Answered, evaluate, summarise
    from dapo.models.load import load_policy
    from dapo.rewards import VerifierPool
    from dapo.rollout.engine import SamplingParams
    from dapo.rollout.local.engine import LocalEngine
    from dapo.trainer.run import choose_device, choose_dtype

    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p}: must lie above 0 and at most 1.")
    where = choose_device(device)
    policy = load_policy(model_of(model), dtype=choose_dtype("auto", where), device=where)
    problems = load_problems(data, verifier=verifier, use="eval")
    encoded, drops = encode_problems(
        problems, PromptFormat(template, chat), policy.tokenizer, max_prompt_tokens=max_prompt_tokens
    )
    settings = {
        "model": model, "data": problems.sha256, "k": k, "temperature": temperature, "top_p": top_p,
        "max_response_tokens": max_response_tokens, "template": template, "chat": chat, "seed": seed,
        "verifier": verifier,
    }  # fmt: skip
    known = read_answers(out, settings) if out is not None else {}
    engine = LocalEngine(
        policy,
        sampling=SamplingParams(temperature=temperature, top_p=top_p),
        max_concurrent=concurrent,
        max_tokens=max_prompt_tokens + max_response_tokens,
    )
    file = open_answers(out, settings) if out is not None else None
    kept = [item.problem for item in encoded]
    with VerifierPool(verifier) as judge, Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("responses", total=len(kept) * k, completed=len(known))

        def on_answer(answer: Answered, done: int, _all: int) -> None:
            progress.update(task, completed=done)
            if file is not None:
                file.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
                file.flush()

        answers = evaluate(
            engine,
            judge,
            kept,
            [item.tokens for item in encoded],
            k=k,
            max_new_tokens=max_response_tokens,
            seed=seed,
            known=known,
            on_answer=on_answer,
        )
    line = summarise(data, kept, answers, k=k) | {"dropped_prompts": len(drops)}
    if as_json:
        typer.echo(json.dumps(line, ensure_ascii=False, indent=2))
    else:
        print_table(line)


def model_of(model: str) -> str:
    """A run stands for its newest intact checkpoint's model."""
    folder = Path(model)
    if (folder / "config.toml").is_file():
        from dapo.checkpoints.load import newest_checkpoint

        checkpoint, _ = newest_checkpoint(folder / "checkpoints")
        if checkpoint is None:
            raise ConfigError(f"--model {model}: this run has no intact checkpoint.", remedy="Name a model folder.")
        return str(checkpoint.model_folder)
    return model_location(model)


def read_answers(path: Path, settings: dict[str, Any]) -> dict[tuple[str, int], Any]:
    """Responses an interrupted evaluation has already judged; another evaluation's file is refused."""
    from dapo.evaluation.runner import Answered
    from dapo.tracking.files import read_lines

    lines = list(read_lines(path))
    if not lines:
        return {}
    if lines[0].get("settings") != settings:
        raise DataError(f"--out {path}: holds another evaluation's responses.", remedy="Name a new file.")
    answers = [Answered(**{**line, "verdict": Verdict(line["verdict"])}) for line in lines[1:]]
    return {(answer.problem_id, answer.response_index): answer for answer in answers}


def open_answers(path: Path, settings: dict[str, Any]) -> Any:
    """The file to append to: whole lines only, its first one the settings."""
    from dapo.tracking.files import read_lines, replace_file

    lines = list(read_lines(path)) or [{"settings": settings}]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path.open("a", encoding="utf-8")


def print_table(line: dict[str, Any]) -> None:
    table = Table("score", "value", "95 % interval", box=None, padding=(0, 2, 0, 0))
    for score in ("avg@k", "pass@k", "maj@k"):
        low, high = line[f"{score}_interval"]
        table.add_row(score.replace("k", str(line["k"])), f"{line[score]:.4f}", f"{low:.4f} – {high:.4f}")
    for source, value in line.get("by_source", {}).items():
        table.add_row(f"avg on {source}", f"{value:.4f}", "")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"\n{line['problems']} problems x {line['k']}; unparseable {100 * line['unparseable']:.1f} %, "
        f"truncated {100 * line['truncated']:.1f} %, mean length {line['mean_tokens']:.0f} tokens"
        + (f"; {line['dropped_prompts']} prompts over the limit dropped" if line["dropped_prompts"] else "")
    )
