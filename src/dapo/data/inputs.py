"""What a config names, looked at before torch is loaded: problem sets that are there, a verifier that works."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from dapo.config.hub import is_hub_name
from dapo.config.model_shapes import BUNDLED
from dapo.config.schema import Config
from dapo.data.inventory import HEAD_ROWS, Counting, judge, merge
from dapo.data.names import Use
from dapo.data.problems import keep
from dapo.data.sources import DataSource, find_source
from dapo.errors import ConfigError
from dapo.rewards import VerifierPool
from dapo.rewards.check import check_call, check_verifier
from dapo.rewards.verifiers import is_judge, is_own
from dapo.types import Problem


def check_inputs(config: Config) -> None:
    """DataError for a problem set that is not there, ConfigError for a verifier that is not or fails on a problem."""
    rewards = config.rewards
    check_verifier(rewards.verifier)
    train = find_source(config.data.train, use="train")
    for name in config.data.eval if config.eval.every_steps else ():
        find_source(name, use="eval")
    if not is_own(rewards.verifier) or is_judge(rewards.verifier):
        return
    problem = first_problem(train, config.data.fields or None, rewards.verifier)
    if problem is not None:
        with VerifierPool(
            rewards.verifier, workers=1, seconds=rewards.cpu_seconds, memory_mb=rewards.memory_mb
        ) as pool:
            check_call(pool, problem.answer, problem.for_verifier())


def check_model(config: Config) -> None:
    """ConfigError for a model that is neither a folder nor can be a name of the hub. A run that goes on needs none."""
    path = config.model.path
    if path != BUNDLED and not is_hub_name(path) and not os.path.isdir(path):
        raise ConfigError(
            f"model.path = {path}: no such folder.", remedy='Name a model folder, owner/name of the hub, or "bundled".'
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
