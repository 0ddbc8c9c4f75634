"""What a config names, looked at before torch is loaded: problem sets that are there, a verifier that works."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

from dapo.config.hub import is_hub_name
from dapo.config.model_shapes import BUNDLED
from dapo.config.schema import Config, RewardPart
from dapo.config.sources import Source, eval_sources, train_sources
from dapo.data.encoded import naming
from dapo.data.inventory import HEAD_ROWS, Counting, judge, merge
from dapo.data.names import Use
from dapo.data.problems import keep
from dapo.data.prompts import PromptFormat
from dapo.data.sources import DataSource, find_source
from dapo.errors import ConfigError
from dapo.rewards import VerifierPool
from dapo.rewards.check import check_call, check_verifier
from dapo.rewards.parts import make_part_pool, own_parts, returned_parts
from dapo.rewards.verifiers import is_function, is_judge, is_own
from dapo.types import Problem


def check_inputs(config: Config) -> None:
    """DataError for a problem set that is not there, ConfigError for a verifier that is not or fails on a problem."""
    with keys_named("rewards.verifier (--verifier)"):
        check_verifier(config.rewards.verifier)
    tried: set[tuple[str, bool]] = set()
    for source, use in sources_used(config):
        with naming(source), keys_named(verifier_key(source, config), template_key(source, config)):
            PromptFormat(source.template)
            check_verifier(source.verifier)
            found = find_source(source.path, use=use)
            kind = source.verifier, bool(source.environment)
            if is_own(source.verifier) and not is_judge(source.verifier) and kind not in tried:
                tried.add(kind)
                # The parts of an episode's reward are those of its environment's Score.
                parts = () if source.environment else returned_parts(config.rewards)
                try_verifier(found, source.verifier, config, parts)
    check_reward_parts(config)


def sources_used(config: Config) -> list[tuple[Source, Use]]:
    """Every problem set that a run reads."""
    evaluated = eval_sources(config) if config.eval.every_steps else []
    return [*((source, "train") for source in train_sources(config)), *((source, "eval") for source in evaluated)]


def try_verifier(found: DataSource, verifier: str, config: Config, parts: Sequence[str] = ()) -> None:
    """ConfigError where a verifier of the user's fails on the first problem of a set, or its Score lacks a part."""
    rewards = config.rewards
    problem = first_problem(found, config.data.fields or None, verifier)
    if problem is None:
        return
    with VerifierPool(verifier, workers=1, seconds=rewards.cpu_seconds, memory_mb=rewards.memory_mb) as pool:
        check_call(pool, problem.answer, problem.for_verifier(), parts=parts)


def check_reward_parts(config: Config) -> None:
    """ConfigError for a part of the reward that is not there, or that fails on the first problem."""
    rewards, parts = config.rewards, own_parts(config.rewards)
    for name, part in parts.items():
        if part.function is not None and not is_function(part.function):
            raise ConfigError(
                f"{key_of(name, part)} = {part.function!r}: is no name of a function.",
                remedy='Write "package.module:function", or verifier = "…" for a verifier.',
            )
        check_verifier(part.function or part.verifier or "", key_of(name, part))
    named = {name: part.function or part.verifier or "" for name, part in parts.items()}
    own = {name: parts[name] for name, what in named.items() if is_own(what) and not is_judge(what)}
    if not own:
        return
    first = train_sources(config)[0]
    problem = first_problem(find_source(first.path, use="train"), config.data.fields or None, first.verifier)
    if problem is None:
        return
    for name, part in own.items():
        with make_part_pool(part, rewards, workers=1) as pool:
            check_call(pool, problem.answer, problem.for_verifier(), key=key_of(name, part))


def key_of(name: str, part: RewardPart) -> str:
    return f"rewards.parts.{name}.{'verifier' if part.function is None else 'function'}"


def verifier_key(source: Source, config: Config) -> str:
    return "rewards.verifier (--verifier)" if source.verifier == config.rewards.verifier else f"{source.key}.verifier"


def template_key(source: Source, config: Config) -> str:
    return "data.template" if source.template == config.data.template else f"{source.key}.template"


@contextmanager
def keys_named(verifier: str, template: str = "data.template") -> Iterator[None]:
    """Messages about a verifier or template name the key it is from."""
    try:
        yield
    except ConfigError as error:
        message = error.message.replace("rewards.verifier (--verifier)", verifier).replace("data.template", template)
        raise ConfigError(message, remedy=error.remedy) from None


def check_model(config: Config) -> None:
    """ConfigError for a model that is neither a folder nor can be a name of the hub. A resumed run needs none."""
    for key, path in (("model.path", config.model.path), ("algorithm.kl.path", config.algorithm.kl.path)):
        if path not in (None, BUNDLED) and not is_hub_name(path) and not os.path.isdir(path):
            raise ConfigError(
                f"{key} = {path}: no such folder.", remedy='Name a model folder, owner/name of the hub, or "bundled".'
            )


def check_set(text: str, verifier: str | None, *, use: Use) -> None:
    """The same for what was typed, where there is no config."""
    if verifier is not None:
        check_verifier(verifier)
    find_source(text, use=use)


def first_problem(source: DataSource, fields: Mapping[str, str] | None, verifier: str) -> Problem | None:
    """The first usable problem of a set, None where the first rows hold none."""
    head = replace(source, rows=lambda: islice(source.rows(), HEAD_ROWS))
    entries = merge([Counting(head, fields, verifier)])
    judge(entries, verifier)
    return next((problem for entry in entries if (problem := keep(entry, [])) is not None), None)
