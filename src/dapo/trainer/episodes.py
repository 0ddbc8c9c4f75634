"""Environments in a run: their workers, the engine that gives them the word, and what they add to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dapo.config.schema import Config
from dapo.config.sources import Source
from dapo.data.encoded import EncodedSet
from dapo.data.inputs import sources_used
from dapo.data.prompts import PromptFormat
from dapo.distributed.world import World
from dapo.environments.builtin import check_environment
from dapo.environments.pool import EnvironmentPool
from dapo.errors import ConfigError
from dapo.models.policy import Policy
from dapo.rollout.engine import Engine, NoiseKey
from dapo.rollout.episodes import EpisodeEngine, TurnJournal, opened
from dapo.rollout.turn_marks import TurnMarks, end_turns_at
from dapo.sampling.collect import Opening


def environments_of(config: Config) -> dict[str, str]:
    """The environments of a run, each with the key that names it first."""
    named: dict[str, str] = {}
    for source, _ in sources_used(config):
        if source.environment:
            named.setdefault(source.environment, key_of(source, config))
    return named


def key_of(source: Source, config: Config) -> str:
    is_shared = source.environment == config.data.environment
    return "data.environment" if is_shared else f"{source.key}.environment"


def refuse_environments(config: Config, world: World) -> None:
    """Before anything is loaded: what is no environment, and what cannot have one."""
    for name, key in environments_of(config).items():
        check_environment(name, key)
        if world.size > 1:
            raise ConfigError(
                f"{key} = {name}: episodes of several turns are not built for {world.size} ranks.",
                remedy="Start one process, or leave the environment out.",
            )
        if config.rewards.parts:
            raise ConfigError(
                f"{key} = {name}: rewards.parts are measured on a response of one turn.",
                remedy="Leave rewards.parts out; a Score of the environment may have parts, which are recorded.",
            )


def make_environments(config: Config, policy: Policy) -> EnvironmentPool | None:
    """The workers of a run's environments, tried once, with a policy that can take turns; None where it has none."""
    names, rewards = environments_of(config), config.rewards
    if not names:
        return None
    TurnMarks(policy.tokenizer, chat=config.data.chat_template, eos_ids=policy.eos_ids)  # refuses a template
    pool = EnvironmentPool(names, workers=rewards.workers, seconds=rewards.cpu_seconds, memory_mb=rewards.memory_mb)
    try:
        end_all_turns(policy, pool, config)
    except ConfigError:
        pool.close()
        raise
    return pool


def end_all_turns(policy: Policy, pool: EnvironmentPool, config: Config) -> None:
    """Where the environments say; end tokens are the policy's, so one with a `stop` must be every set's."""
    for name, described in pool.described.items():
        key = environments_of(config)[name]
        if described.stop and any(source.environment != name for source, _ in sources_used(config)):
            raise ConfigError(
                f"{key} = {name}: it ends turns at {', '.join(map(repr, described.stop))}, and so would other sets.",
                remedy="Use it for every set as data.environment, or none that has a `stop` of its own.",
            )
        end_turns_at(policy, described.stop, f"{key} = {name}")


def with_episodes(
    config: Config,
    engine: Engine,
    policy: Policy,
    pool: EnvironmentPool,
    problems: Mapping[str, Any],
    journal: TurnJournal,
) -> EpisodeEngine:
    marks = TurnMarks(policy.tokenizer, chat=config.data.chat_template, eos_ids=policy.eos_ids)
    return EpisodeEngine(engine, pool, marks, problems, max_turns=config.limits.max_turns, journal=journal)


def opening_of(engine: Engine, sets: Sequence[EncodedSet], config: Config) -> Opening:
    """What becomes of a prompt of these sets: each source has a format of its own."""
    formats: dict[str, PromptFormat] = {
        problem.id: part.format for whole in sets for part in whole.sources or (whole,) for problem in part.problems
    }

    def with_opening(key: NoiseKey, prompt: tuple[int, ...]) -> tuple[int, ...]:
        return opened(engine, key, prompt, formats[key.problem], max_prompt_tokens=config.limits.max_prompt_tokens)

    return with_opening
