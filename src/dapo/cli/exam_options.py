"""Options of the verbs that let a model answer a problem set, and their progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

Model = Annotated[str, typer.Option(help="Hugging Face folder, hub name, run folder, or embedded.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
MaxResponseTokens = Annotated[int, typer.Option(min=2, help="Limit of a response.")]
MaxPromptTokens = Annotated[int, typer.Option(min=1, help="Longer prompts are dropped and counted.")]
Template = Annotated[str, typer.Option(help="Prompt template: dapo, boxed, gsm8k, few-shot or raw.")]
Chat = Annotated[bool, typer.Option(help="Use the tokenizer's chat template.")]
Verifier = Annotated[str, typer.Option(help="How answers are judged.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sampling noise.")]
Concurrent = Annotated[int, typer.Option(min=1, help="Responses written at the same time.")]
Engine = Annotated[str, typer.Option(help="Who writes: local, or vllm where that is installed.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """On standard error, and gone at the end."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("responses", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
