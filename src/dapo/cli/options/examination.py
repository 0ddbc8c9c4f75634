"""Options of the commands that let a model answer a problem set, and their progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypedDict, cast

import typer
from rich.console import Console
from rich.progress import Progress

from dapo.cli.running.loading import loading
from dapo.config.schema import Config, LimitsConfig
from dapo.config.sources import environment_key, eval_sources, train_sources

DEFAULT_LIMIT = 2048

Model = Annotated[str, typer.Option(help="Hugging Face folder, hub name, run folder, or bundled (the toy model).")]
Temperature = Annotated[float, typer.Option(min=0, max=100, help="0 is greedy.")]
MaxResponseTokens = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Maximum response length; default: the run's, else 2048 or half of the model's context.",
        show_default=False,
    ),
]
MaxPromptTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Longer prompts are dropped; default: as for responses.", show_default=False),
]
Template = Annotated[
    str | None,
    typer.Option(
        help="dapo, boxed, answer-tags, gsm8k, few-shot or raw; default: the run's, else dapo.", show_default=False
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Use the tokenizer's chat template; default: as in the run, else yes.",
        show_default=False,
    ),
]
Verifier = Annotated[
    str | None,
    typer.Option(help="Verifier of the answers; default: the set's own, the run's, else math.", show_default=False),
]
Environment = Annotated[
    str | None,
    typer.Option(
        help="Answers the model's turns: python, calculator, guess, wordle, second-try or pkg.mod:Class; none: nobody. "
        "Default: the run's.",
        show_default=False,
    ),
]
MaxTurns = Annotated[
    int | None,
    typer.Option(
        min=1, help="With an environment: turns of the model; default: the run's, else 8.", show_default=False
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling noise.")]
Concurrent = Annotated[int, typer.Option(min=1, max=10**7, help="Max concurrent sequences.")]
Engine = Annotated[str, typer.Option(help="Inference engine: local, or vllm where it is installed.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Way(TypedDict):
    """How prompts are built and answers are scored."""

    max_response_tokens: int
    max_prompt_tokens: int
    template: str
    chat: bool
    verifier: str
    environment: str
    environment_key: str  # where that is said
    max_turns: int


def way_of(
    model: str,
    max_response_tokens: int | None,
    max_prompt_tokens: int | None,
    template: str | None,
    chat: bool | None,
    verifier: str | None,
    *,
    data: str | None = None,
    environment: str | None = None,
    max_turns: int | None = None,
    trust: bool = False,
) -> Way:
    """What was typed; otherwise the settings a run, or the bundled toy model, was trained with.

    Where `data` is a source of that run, the environment is the source's.
    """

    def is_used(key: str) -> bool:
        if key.endswith(".environment"):
            return environment is None and (key == "data.environment" or data is not None)
        return key == "rewards.verifier" and verifier is None

    config = trained_with(model, is_used=is_used, trust=trust)
    limit = default_limit(model)
    way = Way(
        max_response_tokens=limit, max_prompt_tokens=limit, template="dapo", chat=True, verifier="math",
        environment="", environment_key="--environment", max_turns=LimitsConfig.model_fields["max_turns"].default,
    )  # fmt: skip
    if config is not None:
        known = [*train_sources(config), *eval_sources(config)]
        source = next((one for one in known if one.path == data), None)
        way = Way(
            max_response_tokens=config.limits.max_response_tokens,
            max_prompt_tokens=config.limits.max_prompt_tokens,
            template=config.data.template,
            chat=config.data.chat_template,
            verifier=config.rewards.verifier,
            environment=source.environment if source is not None else config.data.environment or "",
            environment_key="data.environment" if source is None else environment_key(source, config),
            max_turns=config.limits.max_turns,
        )
    typed = {
        "max_response_tokens": max_response_tokens, "max_prompt_tokens": max_prompt_tokens, "template": template,
        "chat": chat, "verifier": verifier, "environment": "" if environment == "none" else environment,
        "environment_key": None if environment is None else "--environment", "max_turns": max_turns,
    }  # fmt: skip
    return cast(Way, way | {name: value for name, value in typed.items() if value is not None})


def trained_with(model: str, *, is_used: Callable[[str], bool], trust: bool) -> Config | None:
    """The config of a run, or of the bundled toy model; ConfigError where a stranger's names code that is used."""
    folder = Path(model)
    if (folder / "config.toml").is_file():
        with loading():
            from dapo.trainer.resume import read_run_config
        from dapo.trainer.trust import keys_of, refuse_strangers

        refuse_strangers(
            folder,
            keys_of(folder / "config.toml"),
            is_used=is_used,
            trust=trust,
            remedy="Name your own: --verifier math, --environment none. Or, if you trust who made this run, add "
            "--trust.",
        )
        return read_run_config(folder, ())
    if model == "bundled":
        from dapo.config import load_recipe

        return load_recipe("quickstart", []).config
    return None


def default_limit(model: str) -> int:
    """Default limit of prompts and responses: half of a small model's context."""
    from dapo.config.model_shapes import config_of, positions_of

    positions = positions_of(config_of(model) or {})
    return DEFAULT_LIMIT if positions is None else min(DEFAULT_LIMIT, positions // 2)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """On standard error, and gone at the end."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("responses", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
