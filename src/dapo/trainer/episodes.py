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
from dapo.environments.builtin import BUILTIN, OWN
from dapo.environments.pool import EnvironmentPool
from dapo.errors import ConfigError, DataError
from dapo.models.policy import Policy
from dapo.rewards.verifiers import is_function
from dapo.rollout.engine import Engine, NoiseKey
from dapo.rollout.episodes import EpisodeEngine, TurnJournal, seed_of
from dapo.rollout.turn_marks import TurnMarks
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
        if name not in BUILTIN and not is_function(name):
            raise ConfigError(
                f"{key} = {name!r}: no such environment.", remedy=f"Use one of {', '.join(BUILTIN)}. {OWN}"
            )
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
        end_turns_at(policy, pool, config)
    except ConfigError:
        pool.close()
        raise
    return pool


def end_turns_at(policy: Policy, pool: EnvironmentPool, config: Config) -> None:
    """Strings that end a turn become end tokens of the policy. A string of several tokens cannot be one."""
    for name, described in pool.described.items():
        key = environments_of(config)[name]
        if described.stop and any(source.environment != name for source, _ in sources_used(config)):
            raise ConfigError(
                f"{key} = {name}: it ends turns at {', '.join(map(repr, described.stop))}, and so would other sets.",
                remedy="Use it for every set as data.environment, or none that has a `stop` of its own.",
            )
        for mark in described.stop:
            policy.eos_ids = tuple(sorted({*policy.eos_ids, token_of(mark, policy.tokenizer, f"{key} = {name}")}))


def token_of(mark: str, tokenizer: Any, what: str) -> int:
    tokens = tokenizer.encode(mark, add_special_tokens=False)
    if len(tokens) != 1:
        raise ConfigError(
            f"{what}: it ends a turn at {mark!r}, which is {len(tokens)} tokens for this model.",
            remedy="A turn can end at a single token: choose another mark, or let the end token do it.",
        )
    return int(tokens[0])


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
    """What becomes of a prompt: what its environment adds is encoded with it; else it stays as it is."""
    formats: dict[str, PromptFormat] = {
        problem.id: part.format for whole in sets for part in whole.sources or (whole,) for problem in part.problems
    }

    def opened(key: NoiseKey, prompt: tuple[int, ...]) -> tuple[int, ...]:
        if not isinstance(engine, EpisodeEngine) or not engine.problems[key.problem].environment:
            return prompt
        problem = engine.problems[key.problem]
        added = engine.environments.opening(problem, seed_of(key))
        if not added:
            return prompt
        longer = formats[key.problem].encode(problem, engine.marks.tokenizer, added)
        if len(longer) > config.limits.max_prompt_tokens:
            raise DataError(
                f"limits.max_prompt_tokens = {config.limits.max_prompt_tokens}: with what environment "
                f"{problem.environment} adds, the prompt of problem {problem.id} has {len(longer)} tokens.",
                remedy=f"Raise it to {len(longer)} or more, or take longer problems out of the set.",
            )
        return longer

    return opened
