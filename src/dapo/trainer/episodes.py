"""Environments in a run: their workers, the engine that gives them the word, and what they add to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dapo.config.schema import Config
from dapo.config.sources import environment_key
from dapo.data.encoded import EncodedSet
from dapo.data.inputs import sources_used
from dapo.data.prompts import PromptFormat
from dapo.distributed.environments import SharedEnvironments
from dapo.distributed.world import World
from dapo.environments.builtin import check_environment
from dapo.environments.conversation import Environments
from dapo.environments.pool import EnvironmentPool
from dapo.errors import ConfigError
from dapo.models.policy import Policy
from dapo.rewards.parts import own_parts, returned_parts
from dapo.rollout.engine import Engine, NoiseKey
from dapo.rollout.episodes import EpisodeEngine, TurnJournal, opened
from dapo.rollout.turn_marks import TurnMarks
from dapo.sampling.collect import Opening


def environments_of(config: Config) -> dict[str, str]:
    """The environments of a run, each with the key that names it first."""
    named: dict[str, str] = {}
    for source, _ in sources_used(config):
        if source.environment:
            named.setdefault(source.environment, environment_key(source, config))
    return named


def refuse_environments(config: Config) -> None:
    """Before anything is loaded: what is no environment, and what cannot have one."""
    for name, key in environments_of(config).items():
        check_environment(name, key)
        for part, source in own_parts(config.rewards).items():
            what = source.function or source.verifier
            raise ConfigError(
                f"{key} = {name}: rewards.parts.{part} = {what} measures a response of one turn.",
                remedy=f"Let the environment's Score carry it, Score(value, correct, parts={{{part!r}: ...}}), and "
                "give the part its weight alone. Or leave it out.",
            )


def make_environments(config: Config, policy: Policy, world: World) -> EnvironmentPool | SharedEnvironments | None:
    """The workers of a run's environments, tried once, with a policy that can take turns; None where it has none."""
    names, rewards = environments_of(config), config.rewards
    if not names:
        return None
    first = next(iter(names.values()))
    TurnMarks(policy.tokenizer, chat=config.data.chat_template, eos_ids=policy.eos_ids, key=first)  # refuses a template
    pool = EnvironmentPool(
        names, workers=rewards.workers, seconds=rewards.cpu_seconds, memory_mb=rewards.memory_mb, keys=names
    )
    return pool if world.size == 1 else SharedEnvironments(pool, world)


def with_episodes(
    config: Config,
    engine: Engine,
    policy: Policy,
    pool: Environments,
    problems: Mapping[str, Any],
    journal: TurnJournal,
) -> EpisodeEngine:
    marks = TurnMarks(policy.tokenizer, chat=config.data.chat_template, eos_ids=policy.eos_ids)
    limits, parts = config.limits, returned_parts(config.rewards)
    return EpisodeEngine(engine, pool, marks, problems, max_turns=limits.max_turns, journal=journal, parts=parts)


def opening_of(engine: Engine, sets: Sequence[EncodedSet], config: Config) -> Opening:
    """What becomes of a prompt of these sets: each source has a format of its own."""
    formats: dict[str, PromptFormat] = {
        problem.id: part.format for whole in sets for part in whole.sources or (whole,) for problem in part.problems
    }

    def with_opening(key: NoiseKey, prompt: tuple[int, ...]) -> tuple[int, ...]:
        return opened(engine, key, prompt, formats[key.problem], max_prompt_tokens=config.limits.max_prompt_tokens)

    return with_opening
